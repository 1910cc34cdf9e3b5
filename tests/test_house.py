"""The house stands: layers, names, sizes, bans, public names; each rule bites when broken."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts import sizes
from tests import house

_FILES = house.source_files()
_TEXTS = ("*.md", "docs/**/*.md", "scripts/**/*", "tests/**/*.py", "helios/**/*.py", ".ci/run")
_RULES = {
    "layers": house.layer_faults,
    "sizes": house.size_faults,
    "bans": house.ban_faults,
    "globals": house.global_faults,
    "numbers": house.number_faults,
    "getters": house.getter_faults,
}


@pytest.fixture(scope="module", autouse=True)
def files_are_parsed_once() -> Iterator[None]:
    """Forget the parsed files at the end, which every garbage collection would visit."""
    yield
    house.parse.cache_clear()


@pytest.mark.parametrize("rule", _RULES)
def test_the_package_keeps(rule: str) -> None:
    faults = [fault for path, text in _FILES.items() for fault in _RULES[rule](path, text)]
    assert not faults, "\n".join(faults)


def test_every_room_is_in_one_table_without_a_cycle() -> None:
    assert not (faults := house.table_faults(house.ROOMS)), "\n".join(faults)
    found = {house.room_of(path) for path in _FILES} - {house.FACADE}
    assert found == set(house.ROOMS)
    assert len(house.table_faults({"a": ("b",), "b": ("a",)})) == 1


def test_no_files_import_each_other() -> None:
    assert not (faults := house.cycle_faults(_FILES)), "\n".join(faults)


@pytest.mark.parametrize(
    "back",
    [
        "from helios.data.x import X",
        "from helios.data import x",
        "import helios.data.x",
        "from . import x",
        "from .x import X",
        "def f():\n    from helios.data.x import X",
        "if TYPE_CHECKING:\n    from helios.data.x import X",
        "import helios.data.z",
    ],
)
def test_a_circle_of_files_is_seen(back: str) -> None:
    files = {
        "data/__init__.py": "",
        "data/x.py": "from helios.data.y import Y",
        "data/y.py": back,
        "data/z.py": "from helios.data import x",
    }
    assert len(house.cycle_faults(files)) == 1
    assert house.cycle_faults({**files, "data/x.py": ""}) == []
    assert house.cycle_faults({**files, "data/x.py": "import helios.data.x"}) == []


def test_a_circle_through_the_facade_is_closed_by_the_listed_annotations_only() -> None:
    path = next(path for path, other in house.TYPE_ONLY if other == house.FACADE)
    name = path.removesuffix(".py").replace("/", ".")
    facade = {"__init__.py": f"import helios.{name}"}
    only = "if TYPE_CHECKING:\n    from helios import Trainer"
    assert house.cycle_faults({**facade, path: only}) == []
    assert len(house.cycle_faults({**facade, path: "from helios import Trainer"})) == 1
    other = {"__init__.py": "import helios.loops.x", "loops/x.py": only}
    assert len(house.cycle_faults(other)) == 1


def test_reports_only_read_files() -> None:
    assert not (faults := house.report_faults(_FILES)), "\n".join(faults)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("reports/run_report.py", "from helios.ledger.writer import LedgerWriter"),
        ("reports/run_report.py", "def f():\n    from helios.core import rng"),
        ("ledger/book.py", "from helios.storage import codec"),
    ],
)
def test_a_report_that_gets_to_what_trains_is_seen(path: str, text: str) -> None:
    faults = house.report_faults({**_FILES, path: f"{_FILES[path]}\n{text}\n"})
    assert faults
    assert f"{path}: reports only read files" in "\n".join(faults)


def test_every_exception_of_the_table_is_needed() -> None:
    assert not (idle := house.idle_exceptions(_FILES)), "\n".join(idle)
    assert len(house.idle_exceptions({})) == len(house.PUBLISHED) + len(house.TYPE_ONLY)


def test_no_name_means_two_things() -> None:
    faults = house.same_name_faults(_FILES)
    assert not faults, "\n".join(faults)
    text = "class A: ...\nclass _B: ...\ndef _c(): ...\n"
    assert house.same_name_faults({"a/x.py": text, "b/y.py": text}) == [
        "A means several things: a/x.py, b/y.py."
    ]
    assert len(house.same_name_faults({"a/x.py": "", "b/x.py": ""})) == 1
    function = "def judge(): ..."
    for other in (function, "async def judge(): ...", "class judge: ..."):
        assert house.same_name_faults({"a/x.py": function, "b/y.py": other}) == [
            "judge means several things: a/x.py, b/y.py."
        ]
    overloads = "@overload\ndef f(a: int): ...\n@overload\ndef f(a: str): ...\ndef f(a): ..."
    method = "class A:\n    def f(self): ...\n    def run(self): ..."
    assert house.same_name_faults({"a/x.py": overloads, "b/y.py": method}) == []


def test_every_shared_name_is_shared() -> None:
    assert not (idle := house.idle_names(_FILES)), "\n".join(idle)
    assert len(house.idle_names({})) == len(house.SAME_FILE_NAME) + len(house.SAME_FUNCTION_NAME)


def test_every_long_function_and_signature_has_a_reason_and_is_long() -> None:
    assert not (idle := house.idle_sizes(_FILES)), "\n".join(idle)
    assert len(house.idle_sizes({})) == len(house.LONG_FUNCTIONS) + len(house.LONG_SIGNATURES)


def test_texts_name_no_machine_and_keep_no_notes() -> None:
    paths = {path for pattern in _TEXTS for path in house.ROOT.glob(pattern) if path.is_file()}
    paths = {path for path in paths if "__pycache__" not in path.parts}
    own = {Path(__file__).resolve(), Path(house.__file__).resolve()}
    assert len(paths) > len(_FILES), "The search for texts finds nothing."
    faults = []
    for path in sorted(paths - own):
        faults += house.word_faults(str(path.relative_to(house.ROOT)), path.read_text("utf-8"))
    assert not faults, "\n".join(faults)


def test_the_sizes_of_rooms_are_shown() -> None:
    text = (
        '"""Doc.\n\nMore."""\n\nimport os  # why\n\nX = """a\nb"""\n"""What it is."""\n\n'
        'def f(\n    a,\n):\n    """Doc."""\n    # Comment.\n    return [\n        a\n    ]\n'
    )
    size = sizes.Size(1, 9, 5, 1, (3, "f"), (18, "loops/x.py"))
    assert sizes.measure("loops/x.py", text) == size
    short = {"loops/x.py": text, "loops/y.py": "\n", "session.py": "def g(): ...\n"}
    rooms = sizes.by_room(short)
    assert rooms["loops"] == sizes.Size(2, 9, 5, 1, (3, "f"), (18, "loops/x.py"))
    assert rooms["all"] == sizes.Size(3, 10, 5, 2, (3, "f"), (18, "loops/x.py"))
    assert rooms["core"] == sizes.Size()
    table = sizes.render(rooms).splitlines()
    assert len(table) == len(house.ROOMS) + 3
    assert table[-1].split() == ["all", "3", "10", "5", "2", "3", "f", "18", "loops/x.py"]


def test_words_with_several_meanings_become_fewer() -> None:
    table = house.VAGUE_WORDS.read_text("utf-8")
    assert not (faults := house.vague_word_faults(table, _FILES)), "\n".join(faults)
    assert house.lower_word_counts(table, _FILES) == table
    assert len({form for line in table.splitlines() for form in line.split()[1:]}) > 20


def test_a_name_more_and_a_name_less_with_such_a_word_are_seen() -> None:
    files = {
        "settled/notes.py": "class SettleNote:\n    def _settle_all(self): ...\n"
        "def notebook():\n    settle = 1\n    async def take2settle(): ...\n",
        "settled/x.py": "def HTTPSettle(): ...",
    }
    right = "   5 settle settled\n   2 note notes\n"
    assert house.vague_word_faults(right, files) == []
    [more] = house.vague_word_faults("   4 settle settled\n", files)
    assert "5 names contain it instead of 4" in more
    [fewer] = house.vague_word_faults("   6 settle settled\n", files)
    assert "no longer in 6" in fewer
    raised = "   1 settle settled\n   9 note notes\n"
    assert house.lower_word_counts(raised, files) == "   1 settle settled\n   2 note notes\n"


def test_public_names_are_those_of_the_golden_list() -> None:
    golden = (house.ROOT / "tests/golden/public_names.txt").read_text("utf-8")
    assert house.public_names() == golden, "Meant so? Run scripts/make_golden.py."


def test_every_public_name_exists_and_lists_are_sorted() -> None:
    names = house.public_names().splitlines()
    assert names
    for name in names:
        module, _, attribute = name.rpartition(".")
        getattr(importlib.import_module(module), attribute)
    for path, text in _FILES.items():
        exported = house.exported(text)
        orders = (sorted(exported), sorted(exported, key=str.lower))
        assert exported in orders, f"{path}: __all__ is not sorted."


def test_what_users_reach_has_a_docstring() -> None:
    paths = (house.ROOT / "tests/golden/import_paths.txt").read_text("utf-8")
    faults = []
    for name in {*house.public_names().splitlines(), *paths.splitlines()}:
        faults += house.docstring_faults(name, pkgutil.resolve_name(name))
    assert not faults, "\n".join(faults)


class _Documented:
    """A base that says what its method does."""

    def run(self) -> None:
        """Run."""


class _Undocumented(_Documented):
    def run(self) -> None: ...

    def stop(self) -> None: ...

    @property
    def size(self) -> int:
        return 0

    @classmethod
    def make(cls) -> None: ...

    @staticmethod
    def check() -> None: ...

    def _private(self) -> None: ...


def test_a_public_name_and_each_of_its_members_without_a_docstring_are_seen() -> None:
    assert house.docstring_faults("a", _Documented) == []
    missing = ("a", "a.stop", "a.size", "a.make", "a.check")
    assert house.docstring_faults("a", _Undocumented) == [
        f"{name} has no docstring." for name in missing
    ]
    inherited = type("Inherited", (_Undocumented,), {"__doc__": "It does not say what it adds."})
    assert len(house.docstring_faults("a", inherited)) == 4
    module = types.ModuleType(__name__)
    vars(module).update(bad=_undocumented, _hidden=_undocumented, torch=pytest.fail, number=1)
    assert house.docstring_faults("m", module) == ["m.bad has no docstring."]
    elsewhere = types.ModuleType("m")
    vars(elsewhere).update(bad=_undocumented, seen=_undocumented, __all__=["seen"])
    assert house.docstring_faults("m", elsewhere) == ["m.seen has no docstring."]


def _undocumented() -> None: ...


def test_the_facade_holds_no_logic() -> None:
    allowed = ("from ", "import ", "__all__", '"""', "    ", ")", "]", "if TYPE_CHECKING:", "else:")
    for line in _FILES["__init__.py"].splitlines():
        assert line in ("", "install_moved_modules()") or line.startswith(allowed), line


def test_only_the_packages_that_defer_their_names_intercept_attributes() -> None:
    for path in house.DEFERRED:
        tree = ast.parse(_FILES[path])
        found = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        assert {"__getattr__", "__dir__"} <= {node.id for node in found}, path


_BAD: dict[str, tuple[Callable[[str, str], list[str]], str, str]] = {
    "a room imports upwards": (house.layer_faults, "core/x.py", "import helios.trainer"),
    "a room imports its neighbour": (
        house.layer_faults,
        "data/x.py",
        "from helios.engines import device",
    ),
    "an import hides in a function": (
        house.layer_faults,
        "loops/x.py",
        "def f():\n    from helios.startup import resume",
    ),
    "a relative import points up": (
        house.layer_faults,
        "hooks/x.py",
        "from ..trainer import Trainer",
    ),
    "a plugin imports an engine": (
        house.layer_faults,
        "plugins/x.py",
        "from helios.engines.device import y",
    ),
    "a loop annotates with the façade": (
        house.layer_faults,
        "loops/x.py",
        "if TYPE_CHECKING:\n    from helios import Trainer",
    ),
    "a model annotates with the file of the trainer": (
        house.layer_faults,
        "model/model.py",
        "if TYPE_CHECKING:\n    from helios.trainer import Trainer",
    ),
    "the model imports the façade at run time": (
        house.layer_faults,
        "model/model.py",
        "from helios import Trainer",
    ),
    "the model imports the trainer at run time": (
        house.layer_faults,
        "model/x.py",
        "from helios.trainer import Trainer",
    ),
    "a value type imports a higher one": (
        house.layer_faults,
        "errors.py",
        "from helios.state import Cursor",
    ),
    "the trainer imports a command": (house.layer_faults, "trainer.py", "import helios.cli.main"),
    "a published path imports another room": (
        house.layer_faults,
        "core/logging.py",
        "from helios.data import order",
    ),
    "another module of core imports upwards": (
        house.layer_faults,
        "core/x.py",
        "from helios.terminal import screen",
    ),
    "the rooms of replicas and engines are switched": (
        house.layer_faults,
        "replicas/x.py",
        "from helios.engines.engine import Engine",
    ),
    "a room imports the façade": (house.layer_faults, "loops/x.py", "from helios import Model"),
    "a room stands nowhere": (house.layer_faults, "attic/x.py", ""),
    "a function is too long": (
        house.size_faults,
        "x.py",
        'def f():\n    """Doc."""\n' + "    y = 1\n" * 61,
    ),
    "a function takes too much": (
        house.size_faults,
        "x.py",
        "def f(self, a, b, c, d, *, e, f, g, h): ...",
    ),
    "a method takes too much": (
        house.size_faults,
        "x.py",
        "class A:\n    def f(self, a, b, c, d, *, e, f, g, h): ...",
    ),
    "attributes are intercepted by an assignment": (house.ban_faults, "x.py", "__getattr__ = f"),
    "an attribute is probed": (house.ban_faults, "x.py", "if hasattr(a, 'b'): ..."),
    "attributes are intercepted": (
        house.ban_faults,
        "x.py",
        "class A:\n    def __getattr__(self, name): ...",
    ),
    "a global is rebound": (house.ban_faults, "x.py", "def f():\n    global y\n    y = 1"),
    "a loop reads the trainer": (house.ban_faults, "loops/x.py", "model.trainer.fit()"),
    "another class reads its trainer": (house.ban_faults, "loops/x.py", "self.trainer.rank"),
    "a variable stands in a module": (house.global_faults, "x.py", "cache = {}"),
    "an annotated one too": (house.global_faults, "x.py", "seen: set[int] = set()"),
    "a number that wants to move": (house.global_faults, "x.py", "counter = 0"),
    "a constant is changed": (house.global_faults, "x.py", "_C = {}\n_C['a'] = 1"),
    "a constant is extended": (house.global_faults, "x.py", "C = [1]\ndef f():\n    C.append(2)"),
    "a loop asks whether there is one replica": (
        house.number_faults,
        "loops/x.py",
        "if session.replicas.has_single_replica:\n    pass",
    ),
    "a plugin counts the replicas": (
        house.number_faults,
        "plugins/x.py",
        "if context.num_replicas > 1:\n    pass",
    ),
    "the session counts the processes": (
        house.number_faults,
        "session.py",
        "x = 1 == self.replicas.num_processes",
    ),
    "a property moves a counter": (
        house.getter_faults,
        "x.py",
        "class A:\n    @property\n    def done(self):\n        self.count += 1",
    ),
    "a state that is collected takes a request back": (
        house.getter_faults,
        "x.py",
        "class A:\n    def state_dict(self):\n        return self._find()\n"
        "    def _find(self):\n        return self.waiting.pop()",
    ),
    "a snapshot changes what its object holds": (
        house.getter_faults,
        "x.py",
        "class A:\n    def capture(self):\n        self.session.timer.is_armed = False",
    ),
    "a path of a machine": (house.word_faults, "x.md", "look into " + "/home/" + "me/data"),
    "a note to the writer": (house.word_faults, "x.md", "# TO" + "DO: finish"),
}


@pytest.mark.parametrize("fault", _BAD)
def test_a_broken_rule_is_seen(fault: str) -> None:
    rule, path, text = _BAD[fault]
    assert len(rule(path, text)) == 1, rule(path, text)


_GOOD: dict[str, tuple[Callable[[str, str], list[str]], str, str]] = {
    "layers point down": (
        house.layer_faults,
        "loops/x.py",
        "from helios.session import Session\nfrom helios.core import rng\nimport torch",
    ),
    "a room imports itself": (house.layer_faults, "core/x.py", "from helios.core.rng import key"),
    "a published path imports its implementation": (
        house.layer_faults,
        "core/logging.py",
        "from helios.terminal.root_logger import RootLogger",
    ),
    "trainer and start-up are one room": (
        house.layer_faults,
        "startup/x.py",
        "import helios.trainer",
    ),
    "the façade imports all": (house.layer_faults, "__init__.py", "import helios.trainer"),
    "schedule knows the state": (house.layer_faults, "schedule.py", "from helios.state import X"),
    "a property is annotated": (
        house.layer_faults,
        "model/model.py",
        "if TYPE_CHECKING:\n    from helios import Trainer",
    ),
    "a docstring does not count": (
        house.size_faults,
        "x.py",
        'def f():\n    """' + "a\n" * 70 + '"""\n' + "    y = 1\n" * 60,
    ),
    "a constructor takes what it needs": (
        house.size_faults,
        "x.py",
        "class A:\n    def __init__(self, a, b, c, d, e, f, g, h): ...",
    ),
    "a long file": (house.size_faults, "x.py", "x = 1\n" * 4000),
    "a private function without a docstring": (house.size_faults, "x.py", "def f(): ..."),
    "the house reads the trainer": (house.ban_faults, "startup/x.py", "model.trainer.fit()"),
    "a trainer is handed over": (house.ban_faults, "loops/x.py", "model.trainer = 1"),
    "constants, loggers, types": (
        house.global_faults,
        "x.py",
        "_LOGGER = logging.getLogger(__name__)\nNAMES = ('a',)\n_BY = {}\nBatch = list[int]\n"
        "P, D = 1, 2\n__all__ = ['x']\nx = _BY['a'] if 0 else 1\n".replace("x = ", "X = "),
    ),
    "an engine asks, at the start": (
        house.number_faults,
        "engines/x.py",
        "x = replicas.has_single_replica",
    ),
    "a loop reads the number": (house.number_faults, "loops/x.py", "x = replicas.num_replicas"),
    "a state that is built and a setter": (
        house.getter_faults,
        "x.py",
        "class A:\n    def state_dict(self):\n        state = {}\n        state['a'] = self.a\n"
        "        return state\n    def set(self, a):\n        self.a = a",
    ),
    "an object that is made late": (
        house.getter_faults,
        "engines/engine.py",
        "class A:\n    def state_dict(self):\n        self._scaler = 1",
    ),
    "an address": (house.word_faults, "x.md", "https://example.org/home/page ~/work/x ./opt/y"),
}


@pytest.mark.parametrize("case", _GOOD)
def test_what_keeps_the_rules_passes(case: str) -> None:
    rule, path, text = _GOOD[case]
    assert rule(path, text) == []
