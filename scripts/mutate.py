"""Change the source of the rooms that keep the promise, one place at a time, and run their tests.

A mutant has another comparison, another number, one statement less, two arguments exchanged, or the
like. Tests that stay green show a gap, or that the change makes no difference: each mutant that
survives is listed in scripts/mutants.md, with a word why. Run by hand: 300 mutants take an hour.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.planted import forks, planting  # noqa: E402
from tests.support.started import interrupt_at_signals  # noqa: E402

SECONDS = 120
FROZEN = "tests/integration/test_frozen_runs.py::test_a_frozen_script_gives_its_bits"
ELASTIC = (
    "tests/distributed/test_elastic.py::test_any_number_of_processes_gives_the_same_bits[3-3-1]"
)
RESUME = "tests/integration/test_resume.py::test_a_run_by_steps_resumes_everywhere[plain]"
STATE = (
    "tests/state/test_references.py",
    "tests/state/test_hidden_state.py",
    "tests/state/test_plain_values.py",
    "tests/state/test_optimizers.py",
    "tests/state",
)
LEDGER = ("tests/ledger/test_line.py", "tests/ledger/test_book.py", "tests/ledger/test_writer.py")

# By room, the modules, and which tests see them: the fast ones first.
ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "order": {
        "helios.data.order": (
            "tests/data/test_order.py",
            "tests/data/test_skipped.py",
            "tests/data/test_indices.py",
            "tests/data/test_sharding_plan_samplers.py",
        ),
        "helios.data.permutation": ("tests/data/test_permutation.py", "tests/data/test_mixture.py"),
        "helios.data.sharding_plan": (
            "tests/data/test_sharding_plan.py",
            "tests/data/test_sharding_plan_samplers.py",
            "tests/data/test_skipped.py",
            "tests/data/test_shared.py",
        ),
        "helios.data.samplers": (
            "tests/data/test_samplers.py",
            "tests/data/test_mixture.py",
            "tests/data/test_order.py",
            "tests/data/test_sharding_plan_samplers.py",
            "tests/data/test_indices.py",
        ),
    },
    "keys": {
        "helios.core.rng": (
            "tests/core/test_rng.py",
            "tests/data/test_keyed.py",
        ),
        "helios.data.loader": (
            "tests/data/test_keyed.py",
            "tests/data/test_source.py",
            "tests/data/test_loader.py",
        ),
        "helios.data.keyed_source": (
            "tests/data/test_keyed.py",
            "tests/data/test_source.py",
            "tests/data/test_shared.py",
            "tests/data/test_loader.py",
        ),
    },
    "tree": {
        "helios.replicas.reduction_tree": ("tests/replicas/test_reduction_tree.py",),
        "helios.replicas.tree_reducer": (
            "tests/replicas/test_tree_reducer.py",
            "tests/distributed/test_exchanges.py",
        ),
        "helios.replicas.gradients": (
            "tests/replicas/test_gradients.py",
            "tests/distributed/test_buckets.py",
        ),
        "helios.replicas.flat_gradients": (
            "tests/replicas/test_flat_gradients.py",
            "tests/replicas/test_gradients.py",
            "tests/distributed/test_buckets.py",
        ),
    },
    "commit": {
        "helios.storage.files": (
            "tests/storage/test_files.py",
            "tests/checkpoint/test_store.py",
            "tests/checkpoint/test_kills.py",
        ),
        "helios.storage.digest": (
            "tests/storage/test_digest.py",
            "tests/checkpoint/test_store.py",
            "tests/checkpoint/test_sharded_folders.py",
        ),
        "helios.checkpoint.store": (
            "tests/checkpoint/test_store.py",
            "tests/checkpoint/test_retention.py",
            "tests/checkpoint/test_checkpoint_writer.py",
            "tests/checkpoint/test_loading.py",
            "tests/checkpoint/test_kills.py",
        ),
        "helios.storage.dcp_metadata": ("tests/checkpoint/test_sharded_folders.py",),
    },
    "ledger line": {
        "helios.ledger.line": (*LEDGER, "tests/ledger/test_verification.py"),
        "helios.ledger.book": (
            "tests/ledger/test_book.py",
            "tests/ledger/test_writer.py",
            "tests/ledger/test_runs.py",
        ),
        "helios.ledger.writer": (
            "tests/ledger/test_weight_digests.py",
            "tests/ledger/test_writer.py",
            "tests/ledger/test_runs.py",
        ),
    },
}
ROOMS["state"] = {
    f"helios.state.{name}": STATE
    for name in ("walk", "anchors", "discovery", "restoring", "networks", "links", "digests")
}
# What each mutant of a room must survive in the end.
LAST: dict[str, tuple[str, ...]] = {
    "order": (f"{FROZEN}[today/one_replica]", RESUME),
    "keys": (f"{FROZEN}[today/one_replica]", RESUME),
    "tree": (f"{FROZEN}[today/four_replicas]", ELASTIC),
    "commit": (RESUME,),
    "ledger line": (),
    "state": (RESUME,),
}

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}


@dataclass(frozen=True)
class Mutant:
    """A module with one change.

    Args:
        room: one of ``ROOMS``.
        module: its name.
        place: the line, and the number of the change in the module.
        what: the kind of change.
        before: the statement or expression that is changed.
        after: what it is changed to.
        source: of the whole module.
    """

    room: str
    module: str
    place: tuple[int, int]
    what: str
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        """Return where it is, and what it changes."""
        change = f"{self.before} -> {self.after}"
        return f"{self.module}:{self.place[0]} [{self.what}] {' '.join(change.split())}"


def mutants_of(room: str, module: str) -> Iterator[Mutant]:
    """Generate every mutant of a module, in the order of its source."""
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    tree = ast.parse(source)
    count = 0
    for node in _changeable(tree):
        for what, change in _changes(node):
            before = copy.deepcopy(node)
            changed = change(copy.deepcopy(node))
            fields = vars(node).copy()
            kind = node.__class__
            node.__class__ = changed.__class__  # type: ignore[assignment]
            vars(node).clear()
            vars(node).update(vars(ast.fix_missing_locations(ast.copy_location(changed, before))))
            text = ast.unparse(tree)
            node.__class__ = kind  # type: ignore[assignment]
            vars(node).clear()
            vars(node).update(fields)
            shown = (_first_line(before), _first_line(changed))
            yield Mutant(room, module, (before.lineno, count), what, *shown, text)
            count += 1


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


_UNCHANGED = (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.arg)


def _changeable(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Generate statements and expressions, without types, texts and what errors say."""
    if isinstance(node, _UNCHANGED) or _is_text(node):
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    for child in _parts(node):
        yield from _changeable(child)


def _parts(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.FunctionDef):
        return [node.args, *node.body]
    if isinstance(node, ast.ClassDef):
        return [*node.body]
    if isinstance(node, ast.AnnAssign):
        return [] if node.value is None else [node.value]
    return [*ast.iter_child_nodes(node)]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


Change = Callable[..., ast.AST]


def _changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    for kind, what, change in _SIMPLE:
        if isinstance(node, kind):
            yield what, change
    if isinstance(node, ast.Constant):
        yield from _changes_of_constant(node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", lambda node: node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        yield "operator", _operate_otherwise
    elif isinstance(node, ast.Call):
        yield from _changes_of_call(node)
    elif isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
        yield "return", lambda node: ast.Return(value=ast.Constant(value=None))


def _changes_of_constant(node: ast.Constant) -> Iterator[tuple[str, Change]]:
    if isinstance(node.value, bool):
        yield "bool", lambda node: ast.Constant(value=not node.value)
    elif isinstance(node.value, int):
        yield "number", lambda node: ast.Constant(value=node.value + 1)
        yield "number", lambda node: ast.Constant(value=node.value - 1)


def _changes_of_call(node: ast.Call) -> Iterator[tuple[str, Change]]:
    is_known = isinstance(node.func, ast.Name) and node.func.id == "isinstance"
    has_two = len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:2])
    if has_two and not is_known:
        yield "arguments", _exchange_arguments
    for place, keyword in enumerate(node.keywords):
        if keyword.arg is not None:

            def without(node: ast.Call, place: int = place) -> ast.AST:
                del node.keywords[place]
                return node

            yield "keyword", without


def _compare_otherwise(node: ast.Compare) -> ast.AST:
    node.ops[0] = _COMPARISONS[type(node.ops[0])]()
    return node


def _exchange_and_or(node: ast.BoolOp) -> ast.AST:
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return node


def _operate_otherwise(node: ast.BinOp) -> ast.AST:
    node.op = _OPERATIONS[type(node.op)]()
    return node


def _negate(node: ast.If | ast.While | ast.IfExp) -> ast.AST:
    node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
    return node


def _exchange_arguments(node: ast.Call) -> ast.AST:
    node.args[:2] = node.args[1::-1]
    return node


_SIMPLE: tuple[tuple[Any, str, Change], ...] = (
    (ast.Compare, "comparison", _compare_otherwise),
    (ast.BoolOp, "and/or", _exchange_and_or),
    (ast.If | ast.While | ast.IfExp, "condition", _negate),
    (
        ast.Expr | ast.AugAssign | ast.Delete | ast.Continue | ast.Break,
        "statement",
        lambda node: ast.Pass(),
    ),
)


def draw(seed: int, count: int, chosen: list[str]) -> list[Mutant]:
    """Draw mutants, of each room equally many."""
    drawn: list[Mutant] = []
    rooms = [room for room in ROOMS if not chosen or room in chosen]
    for room in rooms:
        every = [mutant for module in ROOMS[room] for mutant in mutants_of(room, module)]
        print(f"{room}: {len(every)} mutants are possible", flush=True)
        number = min(len(every), count // len(rooms))
        drawn += random.Random(f"{seed} {room}").sample(every, number)
    random.Random(seed).shuffle(drawn)
    return drawn


def judge(mutants: Sequence[Mutant], jobs: int) -> Iterator[tuple[Mutant, str, forks.Outcome]]:
    """Run the tests of mutants, and yield how each one has ended."""
    with tempfile.TemporaryDirectory() as folder:

        def prepare(number: int, mutant: Mutant) -> forks.Task:
            source = Path(folder) / f"{number}.py"
            source.write_text(mutant.source)
            tests = (*ROOMS[mutant.room][mutant.module], *LAST[mutant.room])
            planted = planting.mutant(mutant.module, source)
            return forks.Task(tests, planted, ("-x",), SECONDS)

        tasks = (prepare(number, mutant) for number, mutant in enumerate(mutants))
        for mutant, outcome in zip(mutants, forks.run_all(tasks, jobs), strict=True):
            yield mutant, _describe_end(outcome), outcome


def _describe_end(outcome: forks.Outcome) -> str:
    if outcome.is_late:
        return "too slow"
    if outcome.trouble == forks.NOTHING:
        return "NOT RUN"
    return "killed" if outcome.is_red or outcome.trouble else "SURVIVED"


def main() -> int:
    """Draw mutants, run their tests, and list those that survive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--room", action="append", default=[], choices=list(ROOMS))
    parser.add_argument(
        "--name", help="every mutant whose name holds this text, in place of a draw"
    )
    parser.add_argument("--log", type=Path, help="a file of JSON lines; what is in it is not rerun")
    parser.add_argument("--check", action="store_true", help="run the tests without a mutant")
    arguments = parser.parse_args()
    interrupt_at_signals()
    if arguments.check:
        return check()
    if arguments.name:
        every = [m for room in ROOMS for module in ROOMS[room] for m in mutants_of(room, module)]
        drawn = [mutant for mutant in every if arguments.name in mutant.name]
    else:
        drawn = draw(arguments.seed, arguments.count, arguments.room)
    known = _read_log(arguments.log)
    left = [mutant for mutant in drawn if mutant.name not in known]
    survivors = sum(known.get(mutant.name) == "SURVIVED" for mutant in drawn)
    for mutant, end, outcome in judge(left, arguments.jobs):
        by = (*outcome.failed, outcome.trouble)[0]
        print(f"{end:9} {outcome.seconds:6.1f} s  {mutant.name}  {by}", flush=True)
        survivors += end == "SURVIVED"
        if arguments.log is not None:
            with arguments.log.open("a") as lines:
                lines.write(json.dumps({"name": mutant.name, "end": end, "by": by}) + "\n")
    print(f"{survivors} of {len(drawn)} mutants survive.")
    return 0


def _read_log(log: Path | None) -> dict[str, str]:
    """Return how mutants have ended in an earlier run, by name."""
    if log is None or not log.exists():
        return {}
    return {each["name"]: each["end"] for each in map(json.loads, log.read_text().splitlines())}


def check() -> int:
    """Run every test that mutants are judged by, without a mutant."""
    red = 0
    for room, modules in ROOMS.items():
        for module, tests in modules.items():
            outcome = forks.run(forks.Task((*tests, *LAST[room]), seconds=10 * SECONDS))
            red += outcome.is_red or bool(outcome.trouble)
            found = " ".join(outcome.failed) or outcome.trouble or f"{outcome.passed} passed"
            print(f"{outcome.seconds:6.1f} s  {module}  {found}", flush=True)
    return red


if __name__ == "__main__":
    sys.exit(main())
