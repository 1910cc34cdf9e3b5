"""Change one place of a function of Helios, and run the tests that reach it; again and again.

A mutant has another comparison, another number, one statement less, two arguments exchanged, or the
like. Tests that stay green show a gap, or that it makes no difference: scripts/mutants.md. By hand:

    python scripts/mutate.py record.jsonl                        # runs the tests: who reaches what
    python scripts/mutate.py record.jsonl before.jsonl           # judges the mutants
    python scripts/mutate.py record.jsonl after.jsonl before.jsonl

After a change of the tests, the first runs the new ones, and the last judges those mutants again
that a test has caught whose file has changed, and names those that no test catches any more.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import itertools
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.planted import forks, planting  # noqa: E402
from tests.support.started import interrupt_at_signals  # noqa: E402

SECONDS = 75
FASTEST = 25
CAUGHT = ("caught", "timeout")
# Which only a GPU runs, and texts for people.
_NOT_DRAWN = ("helios.core.cuda:", ".__repr__", ".__str__")
_TESTS_OF_A_RUN = 120

Change = Callable[..., ast.AST]
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
        name: of a function with its module, the number of the change in it, and what it changes.
        source: of the whole module.
    """

    name: str
    source: str

    @property
    def function(self) -> str:
        """Return its function, as ``helios.data.order:Order.advance``."""
        return self.name.partition(" ")[0]

    @property
    def module(self) -> str:
        """Return the name of its module."""
        return self.name.partition(":")[0]


def draw(seed: int, count: int, within: str) -> tuple[list[Mutant], dict[str, str]]:
    """Draw functions by their names, and a change of each: it does not depend on other functions.

    Return modules with ``planted_reached(number)`` before the statements that are changed, too.
    """
    trees: dict[str, ast.Module] = {}
    functions: dict[str, ast.AST] = {}
    for path in sorted((ROOT / "helios").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        trees[module] = ast.parse(path.read_text())
        functions |= _functions_of(trees[module], f"{module}:")
    names = [name for name in functions if within in name and any(_changes_in(functions[name]))]
    names = [name for name in names if not any(text in name for text in _NOT_DRAWN)]
    chances = {name: random.Random(f"{seed} {name}") for name in names}
    names.sort(key=lambda name: chances[name].random())
    mutants, statements = [], []
    for name in names[:count]:
        changes = list(_changes_in(functions[name]))
        place = chances[name].randrange(len(changes))
        mutants.append(_mutate(trees[name.partition(":")[0]], name, place, changes[place]))
        statements.append(changes[place].statement)
    for number, (mutant, statement) in enumerate(zip(mutants, statements, strict=True)):
        probe = ast.parse(f"planted_reached({number})").body[0]
        _Replacement(statement, [probe, statement]).visit(trees[mutant.module])
    return mutants, {mutant.module: ast.unparse(trees[mutant.module]) for mutant in mutants}


def _functions_of(node: ast.AST, start: str) -> dict[str, ast.AST]:
    """Return functions and methods by name; those in a function belong to it."""
    found: dict[str, ast.AST] = {}
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found[start + child.name] = child
        elif isinstance(child, ast.ClassDef):
            found |= _functions_of(child, f"{start}{child.name}.")
    return found


@dataclass(frozen=True)
class _Change:
    statement: ast.stmt
    node: ast.expr | ast.stmt
    what: str
    apply: Change


def _changes_in(function: Any) -> Iterator[_Change]:
    """Generate every change of a function, in the order of its source."""
    first = function.body[1 if _is_text(function.body[0]) and function.body[1:] else 0]
    for node, statement in _changeable(function, function):
        for what, apply in _changes(node):
            yield _Change(first if statement is function else statement, node, what, apply)


def _mutate(tree: ast.Module, function: str, place: int, change: _Change) -> Mutant:
    before, after = change.node, change.apply(copy.deepcopy(change.node))
    what = " ".join(f"{_first_line(before)} -> {_first_line(after)}".split())
    _Replacement(before, after).visit(tree)
    source = ast.unparse(tree)
    _Replacement(after, before).visit(tree)
    return Mutant(f"{function} {place} [{change.what}] {what}", source)


class _Replacement(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: Any) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        """Replace a node."""
        return self._new if node is self._old else self.generic_visit(node)


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


_UNCHANGED = (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.arg)


def _changeable(node: ast.AST, statement: ast.stmt) -> Iterator[tuple[Any, ast.stmt]]:
    """Generate statements and expressions, without types, texts and what errors say.

    With each comes the statement in which it is: for a parameter that is the function.
    """
    if isinstance(node, _UNCHANGED) or _is_text(node):
        return
    if isinstance(node, ast.stmt):
        statement = node
    if isinstance(node, ast.expr | ast.stmt):
        yield node, statement
    for child in _parts(node):
        yield from _changeable(child, statement)


def _parts(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.args, *node.body]
    if isinstance(node, ast.ClassDef):
        return [*node.body]
    if isinstance(node, ast.AnnAssign):
        return [] if node.value is None else [node.value]
    return [*ast.iter_child_nodes(node)]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


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


def record(drawn: Sequence[Mutant], probed: dict[str, str], log: Path, jobs: int) -> None:
    """Run the tests that a log does not have, and write down which mutants each reaches.

    Of the test "" it is what is reached before the first test, as modules are imported.
    """
    known = {line["test"] for line in _read(log)}
    new = [test for test in _collect() if test not in known]
    print(f"{len(new)} tests are new.", flush=True)
    groups = [new[at : at + _TESTS_OF_A_RUN] for at in range(0, len(new), _TESTS_OF_A_RUN)]
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(number) for number in range(len(groups))]
        tasks = (
            forks.Task(tests, _plant(folder, probed), seconds=SECONDS * len(tests))
            for tests, folder in zip(groups, folders, strict=True)
        )
        for number, outcome in enumerate(forks.run_all(tasks, jobs)):
            print(f"{outcome.seconds:6.1f} s  {outcome.trouble}{outcome.failed}", flush=True)
            reached = _read_reached(folders[number] / "reached", drawn)
            for test in ("", *groups[number]):
                passed = test in outcome.seconds_of and test not in outcome.failed
                seconds = round(outcome.seconds_of.get(test, 0.0), 3)
                line = {"test": test, "passed": passed, "seconds": seconds}
                _append(log, {**line, "reached": sorted(reached[test])})


def _collect() -> list[str]:
    return [*forks.run(forks.Task(("tests", "helios"), "", ("--collect-only",))).seconds_of]


def _plant(folder: Path, sources: dict[str, str]) -> str:
    folder.mkdir()
    for module, source in sources.items():
        (folder / f"{module}.py").write_text(source)
    return planting.sources(folder)


def _read_reached(file: Path, drawn: Sequence[Mutant]) -> defaultdict[str, set[str]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for line in file.read_text().splitlines() if file.exists() else ():
        number, _, test = line.partition(" ")
        found[test].add(drawn[int(number)].function)
    return found


def _read(log: Path | None) -> list[dict[str, Any]]:
    if log is None or not log.exists():
        return []
    return [json.loads(line) for line in log.read_text().splitlines()]


def _append(log: Path, line: dict[str, Any]) -> None:
    with log.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def judge(drawn: Sequence[Mutant], logs: argparse.Namespace) -> None:
    """Run the tests of each mutant that a log does not have, until one fails."""
    present = {"", *_collect()}
    runs = [line for line in _read(logs.record) if line["test"] in present]
    before = {line["mutant"]: line for line in _read(logs.before)}
    done = {line["mutant"] for line in _read(logs.log)}
    left: list[tuple[Mutant, list[str]]] = []
    for mutant in drawn:
        old = before.get(mutant.name)
        if mutant.name in done or (logs.before and old is None):
            continue
        tests = choose_tests(mutant, runs)
        if old and (old["end"] not in CAUGHT or old["file"] == _digest(old["by"])):
            _append(logs.log, old)
        elif not tests:
            _write_end(logs.log, mutant, "not reached")
        else:
            first = [old["by"]] if old and old["by"] in present else []
            left.append((mutant, first + tests))
    with tempfile.TemporaryDirectory() as name:
        tasks = (
            forks.Task(tests, _plant(Path(name) / str(n), {m.module: m.source}), ("-x",), SECONDS)
            for n, (m, tests) in enumerate(left)
        )
        for (mutant, _), outcome in zip(left, forks.run_all(tasks, logs.jobs), strict=True):
            by = (*outcome.failed, outcome.trouble)[0]
            end = _describe_end(outcome)
            print(f"{outcome.seconds:6.1f} s  {end}  {mutant.name}  {by}", flush=True)
            _write_end(logs.log, mutant, end, by)
    for line in _read(logs.log):
        old = before.get(line["mutant"], line)
        if old["end"] in CAUGHT and line["end"] not in CAUGHT:
            print(f"LOST  {line['mutant']}  {old['by']}")


def choose_tests(mutant: Mutant, runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the tests that judge a mutant: the fastest, and one that reaches the most.

    Those of its package judge what is reached only as modules are imported.
    """
    reaching = [run for run in runs if mutant.function in run["reached"]]
    if not any(run["passed"] for run in reaching) and reaching:
        folder = f"tests/{mutant.module.split('.')[1]}/"
        reaching = [run for run in runs if run["test"].startswith(folder)]
    passed = sorted((run for run in reaching if run["passed"]), key=lambda run: run["seconds"])
    strong = [run for run in passed[FASTEST:] if run["test"].startswith("tests/integration")]
    strong.sort(key=lambda run: len(run["reached"]) - 10 * run["seconds"])
    chosen = [*passed[:FASTEST], *strong[-1:]]
    sums = itertools.accumulate(run["seconds"] for run in chosen)
    in_time = sum(seconds < SECONDS / 2 for seconds in sums)
    return [run["test"] for run in chosen[: max(1, in_time)]]


def _write_end(log: Path, mutant: Mutant, end: str, by: str = "") -> None:
    _append(log, {"mutant": mutant.name, "end": end, "by": by, "file": _digest(by)})


def _digest(test: str) -> str:
    """Return what changes with the file of a test."""
    file = ROOT / test.partition("::")[0]
    return hashlib.sha256(file.read_bytes()).hexdigest()[:8] if file.is_file() else ""


def _describe_end(outcome: forks.Outcome) -> str:
    if outcome.trouble == forks.NOTHING:
        return "not run"
    if outcome.is_late:
        return "timeout"
    return "caught" if outcome.is_red or outcome.trouble else "survived"


def main() -> None:
    """Draw mutants, and record which tests reach them, or judge them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="JSON lines: which mutants a test reaches")
    parser.add_argument("log", type=Path, nargs="?", help="JSON lines: how mutants have ended")
    parser.add_argument("before", type=Path, nargs="?", help="such a log from before a change")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--within", default="", help="a text in the names of the functions")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    interrupt_at_signals()
    drawn, probed = draw(arguments.seed, arguments.count, arguments.within)
    if arguments.log is None:
        record(drawn, probed, arguments.record, arguments.jobs)
    else:
        judge(drawn, arguments)


if __name__ == "__main__":
    main()
