"""The rules of the house, as functions that take source text and return what breaks them.

``ROOMS`` says which package may import which; ``test_house.py`` applies all rules to the package,
and to small bad snippets, so that a rule that no longer bites is seen.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import inspect
import re
import types
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "helios"

_VALUES = (
    *("errors", "version", "deferred", "state", "schedule", "protocols", "listeners"),
    *("findings", "text", "best"),
)
_TOOLS = (*_VALUES, "core", "distributed", "storage")
# Every room, from the lowest to the highest, with the rooms that it may import: only rooms above
# it in this table, so that there is no cycle.
ROOMS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "version": (),
    "deferred": (),
    "state": ("errors",),
    "schedule": ("errors", "state"),
    "protocols": ("errors", "state"),
    "listeners": ("errors", "state"),
    "findings": (),
    "text": (),
    "best": ("errors", "text"),
    "core": _VALUES,
    "distributed": _VALUES,
    "storage": (*_VALUES, "core", "distributed"),
    "terminal": _TOOLS,
    "state_graph": _TOOLS,
    "data": (*_TOOLS, "state_graph"),
    "init": (*_VALUES, "core"),
    "launch": _TOOLS,
    "replicas": (*_TOOLS, "state_graph"),
    "ledger": (*_VALUES, "storage"),
    "reports": (*_VALUES, "storage", "ledger"),
    "tracking": (*_TOOLS, "ledger"),
    "sharding": (*_TOOLS, "state_graph", "replicas"),
    "engines": (*_TOOLS, "replicas", "launch", "sharding"),
    "hooks": (*_TOOLS, "data", "replicas", "state_graph", "ledger", "engines"),
    "model": (*_TOOLS, "hooks", "data", "state_graph", "sharding", "engines"),
    "checkpoint": (*_TOOLS, "replicas", "state_graph", "hooks", "model"),
    "migration": (*_TOOLS, "checkpoint"),
    "plugins": (*_TOOLS, "hooks", "state_graph", "tracking", "model"),
    "session": (
        *(*_TOOLS, "terminal", "hooks", "data", "replicas", "state_graph", "checkpoint", "engines"),
        *("model", "plugins"),
    ),
    "loops": (
        *(*_TOOLS, "terminal", "hooks", "data", "replicas", "state_graph", "ledger", "engines"),
        *("model", "plugins", "session"),
    ),
    "audit": (
        *(*_TOOLS, "terminal", "replicas", "state_graph", "engines", "model", "session", "loops"),
    ),
    "trainer": (
        *(*_TOOLS, "terminal", "hooks", "data", "replicas", "init", "launch", "state_graph"),
        *("checkpoint", "ledger", "sharding", "engines", "model", "plugins"),
        *("session", "loops", "audit"),
    ),
    # What the façade shows; nothing imports it.
    "exports": (
        *(*_TOOLS, "hooks", "data", "checkpoint", "sharding", "engines", "model", "plugins"),
        "trainer",
    ),
    "cli": (*_TOOLS, "checkpoint", "ledger", "reports", "tracking", "trainer", "migration"),
    "chkpt_migrator": (*_TOOLS, "migration", "cli"),
    "__main__": ("cli",),
}
# The trainer and what starts its runs are one room, and so are replicas and the requests that their
# messages carry.
SAME_ROOM = {"startup": "trainer", "requests": "replicas"}
HIGHEST = {"trainer", "chkpt_migrator", "cli", "__main__"}
FACADE = "__init__"
# Import paths that scripts use, whose implementation has a room of its own.
PUBLISHED = {
    ("core/distributed.py", "distributed"),
    ("core/logging.py", "storage"),
    ("core/logging.py", "terminal"),
}
# The types that users read are recursive: the trainer of a model has a model, whose context has it
# again. These files name a published class that stands above them, in annotations only and as users
# import it. No other file below the façade does.
TYPE_ONLY = {
    ("data/datamodule.py", FACADE),
    ("hooks/context.py", FACADE),
    ("hooks/live_run.py", FACADE),
    ("model/model.py", FACADE),
    ("model/processor.py", FACADE),
    ("plugins/plugin.py", FACADE),
}
# What reports are made with, directly and by way of other modules: values, storage, and what reads
# the files of a run. Nothing in here trains.
READ_BY_REPORTS = {
    *("best.py", "errors.py", "protocols.py", "state.py", "text.py", "version.py"),
    *("storage/local_paths.py", "storage/files.py"),
    *(
        f"ledger/{name}.py"
        for name in (
            *("book", "line", "lineage", "manifest_file"),
            *("run_facts", "timing", "validation_scores"),
            "verification",
        )
    ),
}
# Files that share their name with another one, each with the reason.
SAME_FILE_NAME = {
    "__init__.py": "what a package exports",
    "exports.py": "names that a package defers: its own, those of core/ and of ledger/",
}
# Public functions that share their name with another function or class, each with the reason.
SAME_FUNCTION_NAME = {
    "main": "where a program starts: the command line, the migrator, the process that sends",
}
# Packages that import their names when they are first used, so that commands that only read text
# start without PyTorch.
DEFERRED = ("__init__.py", "core/__init__.py", "ledger/__init__.py")
INTERCEPTORS = {
    *("__getattr__", "__setattr__", "__getattribute__", "__delattr__"),
}
# What is only read says so to those who assign to it.
KEPT_INTERCEPTORS = {("hooks/context.py", "__setattr__")}
# One replica goes the way of many: what differs is chosen at the start of a run, in engines/.
ONE_PATH = {"loops", "session", "model", "plugins"}
QUESTIONS = {"has_single_replica", "has_single_process", "has_one_per_process"}
NUMBERS = {"num_replicas", "num_processes", "world_size"}
GETTERS = {"state_dict", "get_extra_state", "capture", "_collect_states", "snapshot"}
PROPERTIES = {"property", "cached_property", "functools.cached_property"}
# What getters keep for themselves: a generator that is set when it is asked for, a length that is
# counted again, an object that is made late, what was warned of, a table that is found again, what
# the next owner refers to, the process that takes the place of one that hangs.
KEPT_BY_GETTERS = {
    ("core/rng.py", "is_taken"),
    ("core/rng.py", "pending"),
    ("core/rng.py", "_generator.bit_generator.state"),
    *(("data/samplers.py", name) for name in ("_length", "num_samples", "total_size")),
    *(
        ("data/workers.py", name)
        for name in ("_job", "_link", "_has_begun", "_process", "_reader", "begun")
    ),
    ("engines/engine.py", "_scaler"),
    ("state_graph/discovery.py", "_named"),
    ("state_graph/discovery.py", "_nodes"),
    ("state_graph/discovery.py", "_named_objects"),
    ("state_graph/owner_states.py", "_outside"),
    ("state_graph/owner_states.py", "_others()"),
}
OWNERS_OF_TRAINER = ("data/datamodule.py", "model/model.py", "plugins/plugin.py")

MAX_FUNCTION, MAX_PARAMETERS = 60, 7
# Functions ("file:name", as in "loops/epoch.py:EpochLoop.advance") with a longer body, each with
# the reason why it is read best in one piece.
LONG_FUNCTIONS: dict[str, str] = {}
# Functions that take more, each with the reason. Constructors take what they need.
LONG_SIGNATURES = {"data/loader.py:create_dataloader": "the signature that existing users rely on"}
CONSTRUCTORS = {"__init__", "__new__"}
MUTATORS = {
    *("append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem"),
    *("remove", "discard", "clear", "appendleft"),
}
# Words that have several meanings in the package, each with the number of names that contain one of
# its forms. It may only shrink.
VAGUE_WORDS = ROOT / "tests/golden/vague_words.txt"
MACHINE_PATHS = re.compile(r"(?<![\w.~/-])/(?:root|home|Users|work|workspace|mnt|opt)/[\w.]")
NOTES = re.compile(r"\b(?:TODO|FIXME|XXX|HACK|WIP)\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Function:
    """A function's place, its body's length without the docstring, and its parameters."""

    place: str
    name: str
    lines: int
    parameters: int

    @property
    def takes_too_much(self) -> bool:
        """Whether it takes more than callers can keep in mind; a constructor may."""
        is_constructor = self.name.split(".")[-1] in CONSTRUCTORS
        return self.parameters > MAX_PARAMETERS and not is_constructor


@functools.cache
def parse(text: str) -> ast.Module:
    """Parse a file once: each rule reads all of them."""
    return ast.parse(text)


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a file."""
    return tuple(ast.walk(parse(text)))


def source_files() -> dict[str, str]:
    """Return the text of every module of the package by its path below ``helios/``."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in files}


def room_of(path: str) -> str:
    """Return the room that a file or a dotted module below ``helios`` belongs to."""
    first = path.removesuffix(".py").replace(".", "/").split("/")[0]
    return SAME_ROOM.get(first, first)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _absolute(node: ast.ImportFrom, path: str) -> str:
    if not node.level:
        return node.module or ""
    package = ["helios", *path.split("/")[:-1]]
    kept = package[: len(package) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _targets(node: ast.AST, path: str) -> Iterator[str]:
    """Yield the dotted name of all that an import statement takes from the package."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        module = _absolute(node, path)
        names = [f"{module}.{alias.name}" for alias in node.names]
    yield from (name for name in names if name.split(".")[0] == "helios")


@functools.cache
def _imported_names(path: str, text: str) -> list[tuple[int, str, bool]]:
    """Return line, dotted name and "only for annotations" of each import inside the package."""
    guarded = [node for node in nodes(text) if _is_type_checking(node)]
    lines = {inner.lineno for g in guarded for inner in ast.walk(g) if isinstance(inner, ast.stmt)}
    return [
        (node.lineno, name, node.lineno in lines)
        for node in nodes(text)
        for name in _targets(node, path)
    ]


def _imported_room(name: str) -> str:
    room = room_of(name.partition(".")[2])
    return room if room in ROOMS else FACADE


def imports(path: str, text: str) -> list[tuple[int, str, bool]]:
    """Return line, room and "only for annotations" of each import inside the package."""
    found = [(line, _imported_room(name), only) for line, name, only in _imported_names(path, text)]
    return list(dict.fromkeys(found))


def _imported_file(name: str, files: Mapping[str, str]) -> str:
    """Return the path of the module that holds what a dotted name names."""
    parts = name.split(".")[1:]
    while parts:
        for path in (f"{'/'.join(parts)}.py", f"{'/'.join(parts)}/__init__.py"):
            if path in files:
                return path
        parts.pop()
    return f"{FACADE}.py"


def cycle_faults(files: Mapping[str, str]) -> list[str]:
    """A circle of files that import each other: when a module, a function or a checker runs."""
    graph = {
        path: {
            _imported_file(name, files)
            for _, name, is_type_only in _imported_names(path, text)
            if not (is_type_only and (path, _imported_room(name)) in TYPE_ONLY)
        }
        - {path}
        for path, text in files.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [f"Files import each other: {' <- '.join(error.args[1])}."]
    return []


def report_faults(files: Mapping[str, str]) -> list[str]:
    """Modules that reports import, directly or by way of others, besides those that only read."""
    seen = {path for path in files if room_of(path) == "reports"}
    waiting, faults = sorted(seen), []
    while waiting:
        path = waiting.pop()
        found = {_imported_file(name, files) for _, name, _ in _imported_names(path, files[path])}
        new = sorted(found - seen - {f"{FACADE}.py"})
        seen.update(new)
        waiting += new
        faults += [
            f"{path}: reports only read files, and must not get to {other}."
            for other in new
            if other not in READ_BY_REPORTS
        ]
    idle = sorted(READ_BY_REPORTS - seen)
    return faults + [f"No report needs {path} any more." for path in idle]


def _may_import(path: str, other: str, *, is_type_only: bool) -> bool:
    room = room_of(path)
    if room == other or other in ROOMS[room] or (path, other) in PUBLISHED:
        return True
    return is_type_only and (path, other) in TYPE_ONLY


def layer_faults(path: str, text: str) -> list[str]:
    """Imports of a room that the table of rooms does not allow, and of the façade."""
    room = room_of(path)
    if room == FACADE:
        return []
    if room not in ROOMS:
        return [f"{path}: the room {room!r} is missing in the table of rooms."]
    return [
        f"{path}:{line}: {room} must not import {other}."
        for line, other, is_type_only in imports(path, text)
        if not _may_import(path, other, is_type_only=is_type_only)
    ]


def table_faults(rooms: Mapping[str, Sequence[str]]) -> list[str]:
    """Rooms that may import one that does not stand above them in the table."""
    order = list(rooms)
    return [
        f"{room} may import {other}, which does not stand above it."
        for room, others in rooms.items()
        for other in others
        if other not in order[: order.index(room)]
    ]


def idle_exceptions(files: Mapping[str, str]) -> list[str]:
    """Exceptions of the table of rooms that no import needs any more."""
    found = {
        (path, other, is_type_only)
        for path, text in files.items()
        for _, other, is_type_only in imports(path, text)
    }
    published = {(path, other) for path, other, _ in found}
    annotated = {(path, other) for path, other, is_type_only in found if is_type_only}
    idle = sorted((PUBLISHED - published) | (TYPE_ONLY - annotated))
    return [f"Nothing needs the exception {exception}." for exception in idle]


def same_name_faults(files: Mapping[str, str]) -> list[str]:
    """Files of one name in two packages; classes and functions of one name in two modules."""
    return [
        f"{name} means several things: {', '.join(paths)}."
        for name, paths in _places_by_name(files).items()
        if len(paths) > 1 and name not in SAME_FILE_NAME and name not in SAME_FUNCTION_NAME
    ]


def idle_names(files: Mapping[str, str]) -> list[str]:
    """Entries of the tables of shared names that only one place, or none, has."""
    found = _places_by_name(files)
    names = [*SAME_FILE_NAME, *SAME_FUNCTION_NAME]
    return [f"Nothing needs the exception {name}." for name in names if len(found[name]) < 2]


def _places_by_name(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the paths of each name of a file, and of each name that its module level defines."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, text in files.items():
        found[path.split("/")[-1]].append(path)
        # A name that is defined twice in one file has overloads.
        for name in {node.name: None for node in parse(text).body if isinstance(node, _NAMED)}:
            if not name.startswith("_"):
                found[name].append(path)
    return found


_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def _count_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def functions(path: str, text: str) -> list[Function]:
    """Measure every function, also nested ones."""
    found: list[Function] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{prefix}{child.name}"
                place = f"{path}:{child.lineno}"
                found.append(Function(place, name, _body_lines(child), _count_parameters(child)))
                name += "."
            elif isinstance(child, ast.ClassDef):
                name = f"{prefix}{child.name}."
            visit(child, name)

    visit(parse(text), "")
    return found


def size_faults(path: str, text: str) -> list[str]:
    """Functions that are too long, or take too much, without a reason in a table."""
    faults = []
    for place, function in _functions_by_place(path, text).items():
        if function.lines > MAX_FUNCTION and place not in LONG_FUNCTIONS:
            faults.append(f"{function.place}: {function.name} has {function.lines} lines.")
        if function.takes_too_much and place not in LONG_SIGNATURES:
            faults.append(f"{function.place}: {function.name} takes {function.parameters}.")
    return faults


def _functions_by_place(path: str, text: str) -> dict[str, Function]:
    return {f"{path}:{function.name}": function for function in functions(path, text)}


def idle_sizes(files: Mapping[str, str]) -> list[str]:
    """Entries of the tables of long functions and signatures that nothing needs any more."""
    found: dict[str, Function] = {}
    for path, text in files.items():
        found |= _functions_by_place(path, text)
    long = {place for place, function in found.items() if function.lines > MAX_FUNCTION}
    wide = {place for place, function in found.items() if function.takes_too_much}
    idle = sorted((LONG_FUNCTIONS.keys() - long) | (LONG_SIGNATURES.keys() - wide))
    return [f"Nothing needs the exception {place}." for place in idle]


def docstring_faults(name: str, value: object) -> list[str]:
    """What users reach under a public name, and has no docstring: itself, and its members.

    A member that overrides one with a docstring inherits it.
    """
    if inspect.ismodule(value):
        shown = vars(value).get("__all__", ())
        return [
            fault
            for member, inner in vars(value).items()
            if member in shown or getattr(inner, "__module__", "") == value.__name__
            if not member.startswith("_") and _is_ours(inner)
            for fault in docstring_faults(f"{name}.{member}", inner)
        ]
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return []
    faults = [] if value.__doc__ else [f"{name} has no docstring."]
    for kind in value.__mro__ if inspect.isclass(value) else ():
        faults += [
            f"{name}.{member} has no docstring."
            for member, inner in (vars(kind).items() if _is_ours(kind) else ())
            if not member.startswith("_") and isinstance(inner, _MEMBERS)
            if not any(vars(base)[member].__doc__ for base in value.__mro__ if member in vars(base))
        ]
    return faults


_MEMBERS = (
    *(types.FunctionType, property, functools.cached_property, staticmethod, classmethod),
    functools.singledispatchmethod,
)


def _is_ours(value: object) -> bool:
    is_named = inspect.isclass(value) or inspect.isroutine(value)
    return is_named and (value.__module__ or "").split(".")[0] in ("helios", "tests")


def ban_faults(path: str, text: str) -> list[str]:
    """Probing and intercepting of attributes, ``global``, and reads of ``.trainer``."""
    faults = []
    for node in nodes(text):
        if isinstance(node, ast.Name) and node.id == "hasattr":
            faults.append(f"{path}:{node.lineno}: hasattr probes; ask for a type or a protocol.")
        elif name := _intercepts(node, path):
            faults.append(f"{path}:{node.lineno}: {name} intercepts attributes.")
        elif isinstance(node, ast.Global):
            faults.append(f"{path}:{node.lineno}: a global is rebound.")
        elif _reads_trainer(node, path):
            faults.append(f"{path}:{node.lineno}: .trainer is for users, not for the house.")
    return faults


def _intercepts(node: ast.AST, path: str) -> str:
    """Return the name of an interceptor that is defined or assigned, or an empty string."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        is_kept = (path, node.name) in KEPT_INTERCEPTORS
        return node.name if node.name in INTERCEPTORS and not is_kept else ""
    is_assigned = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    is_found = is_assigned and node.id in INTERCEPTORS and path not in DEFERRED
    return node.id if is_found else ""


def _reads_trainer(node: ast.AST, path: str) -> bool:
    if not (isinstance(node, ast.Attribute) and node.attr == "trainer"):
        return False
    owner = ast.unparse(node.value)
    is_own = owner == "self" and path in OWNERS_OF_TRAINER
    room = room_of(path)
    is_high = room in HIGHEST or room not in ROOMS
    return isinstance(node.ctx, ast.Load) and not (is_own or is_high or owner == "helios")


def _is_mutable(value: ast.expr | None) -> bool:
    makers = {"list", "dict", "set", "defaultdict", "deque", "OrderedDict", "Counter", "bytearray"}
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1] in makers
    return isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


def _module_names(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, ast.expr | None]]:
    for node in tree.body:
        if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            yield ast.unparse(node.target), node, node.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                for name in names:
                    if isinstance(name, ast.Name):
                        yield name.id, node, node.value


def _is_mutation(node: ast.AST, constants: set[str]) -> str:
    """Return the name of the constant that this node changes in place, or an empty string."""
    owner: ast.AST | None = None
    if isinstance(node, ast.AugAssign):
        owner = node.target
    elif isinstance(node, ast.Attribute):
        owner = node.value if node.attr in MUTATORS else None
    elif isinstance(node, ast.Subscript):
        owner = None if isinstance(node.ctx, ast.Load) else node.value
    return owner.id if isinstance(owner, ast.Name) and owner.id in constants else ""


def global_faults(path: str, text: str) -> list[str]:
    """Module-level state besides loggers, constants that nobody changes, and registries."""
    tree = parse(text)
    faults, containers = [], set()
    for name, node, value in _module_names(tree):
        if re.fullmatch(r"_?[A-Z][A-Z0-9_]*|__\w+__", name):
            containers |= {name} if _is_mutable(value) else set()
        elif not re.fullmatch(r"_?[A-Z]\w*", name) or _is_mutable(value):
            faults.append(f"{path}:{node.lineno}: {name} is a module-level variable.")
    for node in nodes(text):
        if name := _is_mutation(node, containers):
            faults.append(f"{path}:{getattr(node, 'lineno', 0)}: {name} is changed in place.")
    return faults


def number_faults(path: str, text: str) -> list[str]:
    """Questions how many replicas or processes there are, where one path serves any number."""
    if room_of(path) not in ONE_PATH:
        return []
    faults = []
    for node in nodes(text):
        operands = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        found = [one.attr for one in operands if isinstance(one, ast.Attribute)]
        if isinstance(node, ast.Attribute) and node.attr in QUESTIONS:
            found.append(node.attr)
        for name in QUESTIONS.union(NUMBERS).intersection(found):
            line = getattr(node, "lineno", 0)
            faults.append(f"{path}:{line}: {name} is asked for, which is settled at the start.")
    return faults


def getter_faults(path: str, text: str) -> list[str]:
    """Properties, and methods that collect a state, which change their object on the way.

    Methods of the same class that they call are looked into, too.
    """
    faults = []
    for kind in nodes(text):
        if isinstance(kind, ast.ClassDef):
            methods = {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)}
            for name, method in methods.items():
                if name in GETTERS or PROPERTIES.intersection(
                    map(ast.unparse, method.decorator_list)
                ):
                    faults += [
                        f"{path}:{line}: {kind.name}.{name} only tells, but changes {changed}."
                        for line, changed in _changes_of(method, methods)
                        if (path, changed) not in KEPT_BY_GETTERS
                    ]
    return faults


def _changes_of(
    method: ast.FunctionDef, methods: dict[str, ast.FunctionDef]
) -> Iterator[tuple[int, str]]:
    """Yield line and name of each attribute of ``self`` that a method changes, or has changed."""
    waiting, seen = [method], {method.name}
    while waiting:
        for node in ast.walk(waiting.pop()):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                changed = ast.unparse(node)
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                changed = ast.unparse(node.value)
            elif _is_call_on(node, MUTATORS):
                changed = ast.unparse(node.func.value)
            elif _is_call_on(node, methods) and ast.unparse(node.func.value) == "self":
                called = methods[node.func.attr]
                waiting += [called] if called.name not in seen else []
                seen.add(called.name)
                continue
            else:
                continue
            if changed.startswith("self."):
                yield node.lineno, changed.removeprefix("self.")


def _is_call_on(node: ast.AST, names: Iterable[str]) -> bool:
    """Whether a node is the call of a method that has one of these names."""
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_method and node.func.attr in names


def word_faults(path: str, text: str) -> list[str]:
    """Paths of one machine, and notes that were meant for the writer only."""
    return [
        f"{path}:{number}: {found.group(0)!r} does not belong here."
        for number, line in enumerate(text.splitlines(), 1)
        for pattern in (MACHINE_PATHS, NOTES)
        if (found := pattern.search(line))
    ]


def count_words(files: Mapping[str, str]) -> Counter[frozenset[str]]:
    """Count the names of files, packages, classes and functions by the set of their words."""
    names = [path.split("/")[-1].removesuffix(".py") for path in files]
    names += {folder for path in files for folder in path.split("/")[:-1]}
    names += [node.name for text in files.values() for node in nodes(text) if _is_named(node)]
    return Counter(frozenset(map(str.lower, _WORD.findall(name))) for name in names)


_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def _is_named(node: ast.AST) -> bool:
    return isinstance(node, _NAMED)


def _count_forms(table: str, files: Mapping[str, str]) -> Iterator[tuple[int, int, list[str]]]:
    """Yield, for each line of the table of words, the number in it, the true one, and the forms."""
    names = count_words(files)
    for line in table.splitlines():
        number, *forms = line.split()
        yield int(number), sum(names[each] for each in names if each & {*forms}), forms


def vague_word_faults(table: str, files: Mapping[str, str]) -> list[str]:
    """Words of several meanings that more names contain than the table says, or fewer."""
    faults = []
    for listed, count, forms in _count_forms(table, files):
        if count > listed:
            faults.append(
                f"{forms[0]!r} has several meanings here, and {count} names contain it instead of "
                f"{listed}. Take a word with one meaning for the new name."
            )
        elif count < listed:
            faults.append(
                f"{forms[0]!r} is in {count} names, no longer in {listed}. Lower the number: "
                "python scripts/make_golden.py words"
            )
    return faults


def lower_word_counts(table: str, files: Mapping[str, str]) -> str:
    """Return the table with the numbers that are too high lowered; none is raised."""
    lines = [
        f"{min(listed, count):4} {' '.join(forms)}\n"
        for listed, count, forms in _count_forms(table, files)
    ]
    return "".join(lines)


def public_names() -> str:
    """List what each ``__init__`` of the package exports, one dotted name a line."""
    lines = []
    for path, text in source_files().items():
        if path.endswith("__init__.py"):
            package = ".".join(["helios", *path.split("/")[:-1]])
            lines += [f"{package}.{name}" for name in exported(text)]
    return "".join(f"{line}\n" for line in sorted(lines))


def exported(text: str) -> list[str]:
    """Return the names in a module's ``__all__``."""
    for name, _, value in _module_names(parse(text)):
        if name == "__all__" and value is not None:
            return list(ast.literal_eval(value))
    return []
