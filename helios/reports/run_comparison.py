"""Compares the results of several runs: means, deviations, intervals, and what differs."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import helios.ledger.lineage as lineage
from helios.best import rank_by_score
from helios.errors import ArgumentError
from helios.ledger.book import read_course, read_last_iteration, read_last_line, read_last_losses
from helios.ledger.differences import diff
from helios.ledger.line import hash_of
from helios.ledger.manifest_file import Effect, compare_facts, flatten
from helios.ledger.run_facts import RunFacts, read_run
from helios.reports.document import (
    Block,
    Chapter,
    Document,
    shorten,
    write_fitting,
    write_table,
    write_text,
)
from helios.reports.estimates import (
    Estimate,
    Parts,
    estimate,
    find_crossing_fault,
    is_usable,
    split_variance,
    subtract,
)
from helios.reports.figures import RunCurves, draw_over
from helios.text import number_text, with_step

_ALL = "all"
_AT = b'"at":['
_ABSENT = "not set"


@dataclass
class RunComparison:
    """The result of ``helios.ledger.compare``.

    Attributes:
        runs: the names of the runs.
        by: the whole name of what groups them; ``None`` for one group.
        groups: the names of the runs in each group.
        estimates: for each number (last and best scores, final losses), what each group says.
        varying: each entry of the manifests that differs and may change the training, with its
            value in each run.
        paired: for each number, the difference of the two groups over pairs of equal seeds.
        parts: for each number, the parts of its variance.
        sweep: the runs one by one, if their hyper-parameters differ; nothing is estimated then.
        notes: why something is not there, and what to be careful with.
        found: what was read of each run, by its name.
    """

    runs: list[str]
    by: str | None = None
    groups: dict[str, list[str]] = field(default_factory=dict)
    estimates: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    varying: dict[str, list[str]] = field(default_factory=dict)
    paired: dict[str, Estimate] = field(default_factory=dict)
    parts: dict[str, Parts] = field(default_factory=dict)
    sweep: Sweep | None = None
    notes: list[str] = field(default_factory=list)
    found: dict[str, RunFacts] = field(default_factory=dict, repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        estimates = {
            name: {group: each.as_dict() for group, each in table.items()}
            for name, table in self.estimates.items()
        }
        paired = {name: each.as_dict() for name, each in self.paired.items()}
        parts = {name: each.as_dict() for name, each in self.parts.items()}
        sweep = None if self.sweep is None else asdict(self.sweep)
        changed = {"estimates": estimates, "paired": paired, "parts": parts, "sweep": sweep}
        told = {name: value for name, value in vars(self).items() if name != "found"}
        return {**told, **changed}


@dataclass
class Sweep:
    """Runs whose hyper-parameters differ, the best first.

    Attributes:
        by: what decides which run is the best; ``None`` if the runs do not agree on it.
        parameters: names of the hyper-parameters that differ.
        scores: names of the scores: those of the best validation of each run, or else the last.
        rows: name, hyper-parameters and scores of each run.
    """

    by: str | None
    parameters: list[str]
    scores: list[str]
    rows: list[SweepRow]


@dataclass
class SweepRow:
    """A run of a sweep.

    Attributes:
        run: its name.
        parameters: its hyper-parameters, in the order of their names.
        scores: its scores, by name.
    """

    run: str
    parameters: list[str]
    scores: dict[str, float]


def compare(*runs: str | Path, by: str | None = None) -> RunComparison:
    """Compare the results of runs.

    Args:
        runs: the folders of at least two runs.
        by: what groups them: an argument of the command, an option, an entry of the manifest such
            as ``seeds.random_seed``, or a topic. ``None`` for one group.

    Raises:
        ArgumentError: for fewer than two runs, for one that is named twice, or if no run has
            ``by``.
        LedgerError: if a run has no evidence, or if it cannot be read.
    """
    found = [read_run(run) for run in runs]
    folders = [run.folder.resolve() for run in found]
    if len(set(folders)) != len(folders) or len(folders) < 2:
        raise ArgumentError(
            f"compare needs at least two runs, each once, got {', '.join(map(str, runs))}. Pass "
            "the folders of different runs."
        )
    names = _name_runs(found)
    result = RunComparison(names, found=dict(zip(names, found, strict=True)))
    facts = [run.facts for run in found]
    levels = [_ALL] * len(found)
    if by is not None:
        result.by, levels = _find_levels(facts, by)
    for name, level in zip(names, levels, strict=True):
        result.groups.setdefault(level, []).append(name)
    numbers = _Numbers(names, found, levels)
    result.varying = _list_varying(facts)
    parameters = _list_hyper_parameters(result.varying)
    if any(_differs_within(values, levels) for values in parameters.values()):
        # Their mean would be that of different things.
        result.sweep = _make_sweep(names, found, parameters)
    else:
        result.estimates = {key: dict(numbers.estimate(key)) for key in numbers.names}
        if by is not None:
            _pair_groups(result, numbers, facts)
        _split(result, numbers, facts, levels)
    result.notes += _note(names, found, numbers)
    return result


def _differs_within(values: Sequence[str], levels: Sequence[str]) -> bool:
    """Whether runs of one group have different values."""
    return len({*zip(values, levels, strict=True)}) > len({*levels})


def _make_sweep(
    names: Sequence[str], found: Sequence[RunFacts], parameters: Mapping[str, Sequence[str]]
) -> Sweep:
    bests = [run.find_best() for run in found]
    rules = {best.rule for best in bests if best is not None}
    rule = rules.pop() if len(rules) == 1 else None
    rows, scored = [], []
    for number, (name, run, best) in enumerate(zip(names, found, bests, strict=True)):
        if rule is None:
            scores = {key: values[-1][1] for key, values in run.find_scores().items()}
        else:
            scores = {} if best is None else dict(best.scores)
        row = SweepRow(name, [values[number] for values in parameters.values()], scores)
        rows.append(row)
        if rule is not None and rule.metric is not None:
            scored.append((scores.get(rule.metric, math.nan), row))
    ranked = [] if rule is None or rule.mode is None else rank_by_score(scored, rule.mode)
    rest = [row for row in rows if not any(row is each for each in ranked)]
    keys = list(dict.fromkeys(key for row in rows for key in row.scores))
    by = None if rule is None or rule.metric is None else str(rule)
    return Sweep(by, list(parameters), keys, [*ranked, *rest])


def _name_runs(found: Sequence[RunFacts]) -> list[str]:
    """Return the name of each folder, or its path where several have one name."""
    names = [run.name for run in found]
    return [
        str(run.folder) if names.count(name) > 1 else name
        for run, name in zip(found, names, strict=True)
    ]


class _Numbers:
    """The numbers of each run, and the group that it is in."""

    def __init__(
        self, runs: Sequence[str], found: Sequence[RunFacts], levels: Sequence[str]
    ) -> None:
        self.tables = {
            name: dict(_read_numbers(run)) for name, run in zip(runs, found, strict=True)
        }
        self.levels = dict(zip(runs, levels, strict=True))
        self.names = list(dict.fromkeys(key for table in self.tables.values() for key in table))

    def select(self, key: str, level: str) -> dict[str, float]:
        """Return the number of each run of a group that has it."""
        return {
            run: table[key]
            for run, table in self.tables.items()
            if key in table and self.levels[run] == level
        }

    def estimate(self, key: str) -> Iterator[tuple[str, Estimate]]:
        """Yield what each group says of a number."""
        for level in dict.fromkeys(self.levels.values()):
            found = estimate(self.select(key, level))
            if found is not None:
                yield level, found


def _read_numbers(run: RunFacts) -> Iterator[tuple[str, float]]:
    best = run.find_best()
    for name, values in run.find_scores().items():
        yield f"{name} (last)", values[-1][1]
        if best is not None and name in best.scores:
            yield f"{name} (best)", best.scores[name]
    if run.ledger is not None:
        for name, loss in read_last_losses(run.ledger).items():
            yield f"{name} (loss of the last iteration)", loss


def _pair_groups(
    result: RunComparison, numbers: _Numbers, facts: Sequence[Mapping[str, Any]]
) -> None:
    """Subtract the second group from the first, run by run of equal seeds."""
    if len(result.groups) != 2:
        result.notes.append(f"not paired: there are {len(result.groups)} groups, not two")
        return
    keys = dict(zip(result.runs, _find_seeds(facts, result.by), strict=True))
    first, second = result.groups.values()
    sides = [{keys[run]: run for run in group} for group in (first, second)]
    is_paired = sides[0].keys() == sides[1].keys() and len(sides[0]) == len(first) == len(second)
    if not is_paired or len(first) < 2 or None in sides[0]:
        result.notes.append("not paired: the seeds of both groups do not match one to one")
        return
    pairs = {key: f"{sides[0][key]} - {sides[1][key]}" for key in sides[0]}
    for name in numbers.names:
        tables = [numbers.select(name, level) for level in result.groups]
        values = [
            {key: table[run] for key, run in side.items() if run in table}
            for side, table in zip(sides, tables, strict=True)
        ]
        found = subtract(values[0], values[1], pairs)
        if found is not None:
            result.paired[name] = found


def _find_seeds(facts: Sequence[Mapping[str, Any]], by: str | None) -> list[Hashable]:
    """Return the seeds of each run, without the one that makes the groups; ``None`` if unknown."""
    found: list[Hashable] = []
    for each in facts:
        seeds = {key: x for key, x in flatten({"seeds": each.get("seeds", {})}) if key != by}
        found.append(json.dumps(seeds, sort_keys=True) if seeds else None)
    return found


def _split(
    result: RunComparison,
    numbers: _Numbers,
    facts: Sequence[Mapping[str, Any]],
    groups: Sequence[str],
) -> None:
    """Split the variance of each number, if every level of each factor meets all of the others."""
    tables = [dict(flatten({"seeds": each.get("seeds", {})})) for each in facts]
    names = dict.fromkeys(key for table in tables for key in table)
    columns = {name: [repr(table.get(name)) for table in tables] for name in names}
    if result.by is not None:
        columns[result.by] = list(groups)
    columns = {name: column for name, column in columns.items() if len(set(column)) > 1}
    if len(columns) < 2:
        what = ", ".join(columns) or "nothing"
        result.notes.append(
            f"no parts of the variance: at least two seeds or groups must vary, here: {what}"
        )
        return
    levels = list(zip(*columns.values(), strict=True))
    fault = find_crossing_fault(levels)
    if fault is not None:
        result.notes.append(f"no parts of the variance: {fault}")
        return
    for name in numbers.names:
        values = [table[name] for table in numbers.tables.values() if name in table]
        if len(values) == len(levels) and all(map(is_usable, values)):
            result.parts[name] = split_variance(list(columns), levels, values)


def _note(names: Sequence[str], found: Sequence[RunFacts], numbers: _Numbers) -> Iterator[str]:
    for name, run in zip(names, found, strict=True):
        for file_name, text in run.missing.items():
            if file_name != lineage.FILE_NAME:
                yield f"{name}: {text.rstrip('.')}"
    courses: dict[bytes, tuple[str, Path]] = {}
    for name, run in zip(names, found, strict=True):
        if run.ledger is None:
            continue
        line, own = read_last_line(run.ledger), (name, run.ledger)
        if b'"end":1' not in line:
            yield f"{name} has not ended"
        twin = courses.setdefault(read_course(run.ledger), own) if _AT in line else own
        if twin is not own:
            yield from _compare_twins(twin, own)
    yield from _note_lengths(found)
    yield from _note_numbers(numbers)


def _compare_twins(one: tuple[str, Path], other: tuple[str, Path]) -> Iterator[str]:
    """Yield whether two runs with equal iterations have equal scores and buffers, too."""
    names = f"{one[0]} and {other[0]}"
    found = diff(one[1], other[1])
    if found.iteration is None:
        yield f"{names} have equal ledgers: they are one result, not two"
    else:
        left, right = found.details.get("scores", ({}, {}))
        place = with_step(found.iteration, found.steps.get("iteration"))
        scores = [f"{name} {left[name]!r} | {right[name]!r}" for name in left]
        buffers = [f"the buffer {name}" for name in found.details.get("buffers", ({}, {}))[0]]
        parts = ["scores"] * bool(scores) + ["buffers"] * bool(buffers)
        yield (
            f"{names} have equal ledgers but for {' and '.join(parts)}: they differ at the latest "
            f"from iteration {place} on, in {', '.join([*scores, *buffers])}"
        )
    if found.not_compared:
        yield f"{names}: {'; '.join(found.not_compared)}"


def _note_numbers(numbers: _Numbers) -> Iterator[str]:
    for key in numbers.names:
        tables = numbers.tables
        absent = [run for run, table in tables.items() if key not in table]
        infinite = [run for run, x in tables.items() if not math.isfinite(x.get(key, 0.0))]
        unusable = [run for run, x in tables.items() if not is_usable(x.get(key, 0.0))]
        large = [run for run in unusable if run not in infinite]
        if absent:
            yield f"without {key}: {', '.join(absent)}"
        if infinite:
            yield f"{key} is not finite, and left out, in: {', '.join(infinite)}"
        if large:
            yield f"{key} is too large for its square, and left out, in: {', '.join(large)}"


def _note_lengths(found: Sequence[RunFacts]) -> Iterator[str]:
    ends = {read_last_iteration(run.ledger) for run in found if run.ledger is not None}
    *counts, most = sorted(end for end in ends if end is not None) or [0]
    if counts:
        yield (
            f"the runs have {', '.join(map(str, counts))} and {most} iterations: their last "
            "numbers are not of the same length of training"
        )


HEAD = ("number", "group", "runs", "mean", "deviation", "95% interval")
_NUMBERS = ("runs", "pairs", "mean", "deviation")


@dataclass(frozen=True)
class ResultTable:
    """A table of a comparison, as a terminal and a page show it.

    Attributes:
        title: what it shows.
        head: the headings.
        rows: the cells, as texts.
        numbers: headings of columns of numbers.
        note: a sentence below it; may be empty.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = _NUMBERS
    note: str = ""


def list_tables(found: RunComparison) -> Iterator[ResultTable]:
    """Yield the results, and what else there is: pairs, parts of the variance, differences."""
    rows: list[tuple[str, ...]]
    if found.sweep is None:
        rows = [
            (name, group, *_describe_estimate(each))
            for name, table in found.estimates.items()
            for group, each in table.items()
        ]
        yield ResultTable("results", HEAD, rows)
    else:
        yield _list_sweep(found.sweep)
    if found.paired:
        first, second = found.groups
        rows = [(name, *_describe_estimate(each)) for name, each in found.paired.items()]
        title = f"pairs of equal seeds, {found.by}: {first} minus {second}"
        yield ResultTable(title, ("number", "pairs", *HEAD[3:]), rows)
    if found.parts:
        rows = [(name, *row) for name, parts in found.parts.items() for row in _list_parts(parts)]
        yield ResultTable("parts of the variance", ("number", "part", "variance", "share"), rows)
    shown = {} if found.sweep is None else {x: found.varying[x] for x in found.sweep.parameters}
    rows = [
        (name, *values)
        for name, values in found.varying.items()
        if not _is_repeated(name, values, shown)
    ]
    if rows:
        title = f"the runs {'' if found.sweep is None else 'also '}differ in"
        yield ResultTable(title, ("what", *found.runs), rows, ())


def _describe_estimate(found: Estimate) -> tuple[str, str, str, str]:
    """Return count, mean, deviation and interval as texts."""
    interval = "-"
    if found.interval is not None:
        interval = " to ".join(map(number_text, found.interval))
    deviation = "-" if found.deviation is None else number_text(found.deviation)
    return str(len(found.values)), number_text(found.mean), deviation, interval


def _list_parts(found: Parts) -> Iterator[tuple[str, str, str]]:
    """Yield name, variance and share of each part."""
    parts = {**found.variances, "rest": found.rest}
    total = sum(parts.values())
    for part, value in parts.items():
        yield part, number_text(value), f"{value / total:.0%}" if total else "-"


def _list_sweep(sweep: Sweep) -> ResultTable:
    names = [name.removeprefix("params.").removeprefix("found.") for name in sweep.parameters]
    if len({*names, *sweep.scores}) < len(names) + len(sweep.scores):
        names = sweep.parameters
    rows = [
        (row.run, *row.parameters, *(_show_score(row.scores.get(name)) for name in sweep.scores))
        for row in sweep.rows
    ]
    note = "The scores are the last ones: the runs have no best validation by one score."
    if sweep.by is not None:
        best = f"each run's best validation by {sweep.by}"
        note = f"The scores are those of {best}, the best run first."
    columns = (*names, *sweep.scores)
    return ResultTable("results", ("run", *columns), rows, columns, note)


def _show_score(score: float | None) -> str:
    return "-" if score is None else number_text(score)


def write_comparison(comparison: RunComparison) -> str:
    """Return the text of an HTML file, with the curves of all runs over each other.

    Raises:
        LedgerError: if a ledger cannot be read.
    """
    courses = {name: RunCurves.read(run) for name, run in comparison.found.items()}
    results, *others = map(_write_chapter, list_tables(comparison))
    results.blocks += _write_runs(comparison)
    notes = [write_text(f"{note}.") for note in comparison.notes or ["None"]]

    def make(points: int) -> Document:
        sections = [results, *draw_over(courses, points), *others, Chapter("Notes", [*notes])]
        by = "" if comparison.by is None else f" by {comparison.by}"
        title = f"{len(comparison.runs)} runs{by}"
        return Document(title, "Comparison of training runs", sections)

    return write_fitting(make)[1]


def _write_chapter(table: ResultTable) -> Chapter:
    blocks: list[Block] = [write_table(table.head, table.rows)]
    blocks += [write_text(table.note)] if table.note else []
    return Chapter(table.title[0].upper() + table.title[1:], blocks)


def _write_runs(comparison: RunComparison) -> Iterator[Block]:
    """Yield the numbers of each run, and what the interval of their mean takes for granted."""
    if comparison.sweep is not None:
        yield write_text("Their hyper-parameters differ, so there is no mean of them.")
        return
    yield write_text("The interval is by Student's t, which assumes independent runs.")
    tables = {
        name: {run: x for each in groups.values() for run, x in each.values.items()}
        for name, groups in comparison.estimates.items()
    }
    rows = [
        (run, *(_show_score(table.get(run)) for table in tables.values()))
        for run in comparison.runs
    ]
    yield write_table(("run", *tables), rows)


def _find_levels(facts: Sequence[Mapping[str, Any]], name: str) -> tuple[str, list[str]]:
    """Return the whole name of an entry of the manifest, and its value in each run.

    Args:
        facts: what the manifest of each run says, by topic.
        name: an argument of the command (``lr`` for ``--lr 0.1``), an option (``precision``), an
            entry with its topic (``seeds.random_seed``), or a topic.

    Raises:
        ArgumentError: if no run has it, or if several entries have that name.
    """
    arguments = [_parse_arguments(each.get("command", {}).get("arguments", ())) for each in facts]
    wanted = _normalize(name)
    if any(wanted in table for table in arguments):
        return f"--{wanted}", [table.get(wanted, _ABSENT) for table in arguments]
    if any(name in each for each in facts):
        return name, [_show(each[name]) if name in each else _ABSENT for each in facts]
    flat = [dict(flatten(each)) for each in facts]
    found = list(dict.fromkeys(key for table in flat for key in table if _has_name(key, name)))
    levels = [[_show(table[key]) if key in table else _ABSENT for table in flat] for key in found]
    if not found:
        raise ArgumentError(
            f"The manifest of no run has {name!r}. Name an argument of the command, an option, or "
            f"an entry such as seeds.random_seed; these differ: {', '.join(_list_varying(facts))}."
        )
    if any(each != levels[0] for each in levels):
        raise ArgumentError(f"{name!r} may be {' or '.join(found)}. Pass one of these names.")
    # A seed is an option, too; as a seed, it is known to pairs and to parts of the variance.
    return min(found, key=lambda key: not key.startswith("seeds.")), levels[0]


def _has_name(key: str, name: str) -> bool:
    return key == name or key.endswith(f".{name}")


def _normalize(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def _parse_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Return the values of ``--name value`` and ``--name=value``; ``yes`` for one without."""
    found: dict[str, str] = {}
    name: str | None = None
    for argument in arguments:
        if argument.startswith("-") and not _is_number(argument):
            key, equal, value = argument.partition("=")
            name = None if equal else _normalize(key)
            found[_normalize(key)] = value if equal else "yes"
        elif name is not None:
            found[name] = argument if found[name] == "yes" else f"{found[name]} {argument}"
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _show(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{hash_of(value)} (hash)"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _list_varying(facts: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the value in each run of every entry that differs and may change the training."""
    known = [each for each in facts if each]
    names = dict.fromkeys(
        change.name
        for other in known[1:]
        for change in compare_facts(known[0], other)
        if change.effect is not Effect.NONE
    )
    # What a constructor was given is told by the data itself, too.
    twice = {f"found.{name}" for name in names}
    told = [name for name in names if name not in twice]
    return {name: [shorten(_look_up(each, name), 80) for each in facts] for name in told}


def _list_hyper_parameters(varying: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return, of the entries that differ, those that describe the training, without seeds.

    A value that was declared and also given to a constructor is listed once.

    Args:
        varying: what :func:`_list_varying` returned.
    """
    found: dict[str, list[str]] = {}
    for topic in ("params", "found", "data", "options"):
        for name, values in varying.items():
            parts = name.split(".")
            is_seed = parts[-1].endswith("seed") or "seeds" in parts
            is_new = parts[0] == topic and not _is_repeated(name, values, found)
            if is_new and not is_seed:
                found[name] = values
    return found


def _is_repeated(name: str, values: Sequence[str], columns: Mapping[str, Sequence[str]]) -> bool:
    """Whether a column has the same values, under a name with the same end."""
    end = name.split(".")[-1]
    return any(each.split(".")[-1] == end and known == values for each, known in columns.items())


def _look_up(facts: Mapping[str, Any], name: str) -> str:
    if not facts:
        return "unknown"
    topic, _, rest = name.partition(".")
    if topic == "code":
        hashes = facts.get("code", {}).get(rest)
        return _ABSENT if hashes is None else str(hashes["text"])
    return next((_show(value) for key, value in flatten(facts) if key == name), _ABSENT)
