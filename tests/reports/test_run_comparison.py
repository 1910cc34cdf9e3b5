"""Comparisons of runs: the statistics, and when there are none."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from helios.cli import main
from helios.errors import ArgumentError, LedgerError
from helios.ledger import compare, timing
from helios.ledger.book import (
    read_last_iteration,
    read_last_line,
    read_last_losses,
)
from helios.reports.estimates import find_crossing_fault, find_quantile, split_variance
from helios.reports.run_comparison import write_comparison
from helios.text import number_text
from tests.reports.test_run_reports import Page
from tests.support.synthetic_run import write_ledger, write_lines, write_run

BASE = {"options": {"precision": "fp32"}, "seeds": {"random_seed": 1}}


def _run(
    folder: Path, scores: Sequence[float], *, lr: str = "0.1", **facts: Mapping[str, Any]
) -> Path:
    """Write a run whose last loss is its last score."""
    command = {"command": {"script": "train.py", "arguments": ["--lr", lr, "--fast"]}}
    losses = [5.0, scores[-1]]
    return write_run(folder, {**BASE, **command, **facts}, scores={"error": scores}, losses=losses)


@pytest.fixture(scope="module")
def stats() -> Any:
    """Return SciPy's statistics, whose import takes seconds."""
    import scipy.stats

    return scipy.stats


@pytest.fixture
def grid(tmp_path: Path) -> list[Path]:
    """Return six runs: two learning rates with three seeds each."""
    numbers = random.Random(3)
    return [
        _run(
            tmp_path / f"{lr}-{seed}",
            [2.0, float(lr) + seed + numbers.random() / 10],
            lr=lr,
            seeds={"random_seed": seed},
        )
        for lr in ("0.1", "0.2")
        for seed in (1, 2, 3)
    ]


@pytest.mark.shows("P46")
@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 10, 29, 30, 200, 1001])
def test_quantiles_are_those_of_the_distribution(freedom: int, stats: Any) -> None:
    for probability in (0.6, 0.9, 0.975, 0.995):
        known = float(stats.t.ppf(probability, freedom))
        assert find_quantile(probability, freedom) == pytest.approx(known, rel=1e-9)


@pytest.mark.shows("P46")
def test_means_deviations_and_intervals(tmp_path: Path, stats: Any) -> None:
    values = [0.5, 0.7, 0.65, 0.8]
    runs = [
        _run(tmp_path / str(n), [0.1, x], seeds={"random_seed": n}) for n, x in enumerate(values)
    ]
    found = compare(*runs)
    last = found.estimates["error (last)"]["all"]
    interval = stats.t.interval(0.95, 3, loc=last.mean, scale=stats.sem(values))
    assert last.mean == pytest.approx(0.6625)
    assert last.deviation == pytest.approx(math.sqrt(0.046875 / 3))
    assert last.interval == pytest.approx(interval)
    assert found.estimates["error (best)"]["all"].mean == pytest.approx(0.1)
    assert found.estimates["loss (loss of the last iteration)"]["all"].mean == last.mean
    assert found.varying == {"seeds.random_seed": ["0", "1", "2", "3"]}


@pytest.mark.shows("P46")
def test_pairs_of_equal_seeds(grid: list[Path], stats: Any) -> None:
    found = compare(*grid, by="lr")
    assert list(found.groups) == ["0.1", "0.2"]
    pairs = found.paired["error (last)"]
    assert list(pairs.values) == ["0.1-1 - 0.2-1", "0.1-2 - 0.2-2", "0.1-3 - 0.2-3"]
    last = compare(*grid).estimates["error (last)"]["all"].values
    differences = [last[f"0.1-{seed}"] - last[f"0.2-{seed}"] for seed in (1, 2, 3)]
    known = stats.ttest_1samp(differences, 0).confidence_interval()
    assert pairs.interval == pytest.approx((known.low, known.high))
    # The seeds are far apart, so that the groups alone say little.
    low, high = found.estimates["error (last)"]["0.1"].interval
    assert known.high - known.low < (high - low) / 10


@pytest.mark.shows("P46")
def test_groups_without_equal_seeds_are_not_paired(grid: list[Path]) -> None:
    found = compare(*grid[:-1], by="lr")
    assert found.paired == {}
    assert "not paired: the seeds of both groups do not match one to one" in found.notes
    assert any(note.startswith("no parts of the variance: the design") for note in found.notes)
    others = compare(*grid[:2], *grid[4:], by="lr")
    assert [len(group) for group in others.groups.values()] == [2, 2]
    assert others.paired == {}
    by_seed = compare(*grid, by="random_seed")
    assert by_seed.groups.keys() == {"1", "2", "3"}
    assert "not paired: there are 3 groups, not two" in by_seed.notes


def test_a_seed_may_make_the_groups(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path / f"{a}{b}", [a + b / 10.0], seeds={"random_seed": 1, "init": a, "order": b})
        for a, b in itertools.product((1, 2), (1, 2, 3))
    ]
    found = compare(*runs, by="init")
    assert found.by == "seeds.init"
    assert found.paired["error (last)"].mean == pytest.approx(-1.0)


@pytest.mark.shows("P46")
def test_parts_of_the_variance_of_a_crossed_design(tmp_path: Path, stats: Any) -> None:
    seeds = random.Random(5)
    inits = [seeds.gauss(0, 2) for _ in range(12)]
    orders = [seeds.gauss(0, 1) for _ in range(12)]
    runs = [
        _run(
            tmp_path / f"{a}-{b}",
            [one + other + seeds.gauss(0, 0.1)],
            seeds={"random_seed": 1, "init": a, "order": b},
        )
        for (a, one), (b, other) in itertools.product(enumerate(inits), enumerate(orders))
    ]
    parts = compare(*runs).parts["error (last)"]
    assert set(parts.variances) == {"seeds.init", "seeds.order"}
    assert parts.variances["seeds.init"] == pytest.approx(stats.tvar(inits), rel=0.05)
    assert parts.variances["seeds.order"] == pytest.approx(stats.tvar(orders), rel=0.05)
    assert parts.rest == pytest.approx(0.01, rel=0.5)
    assert compare(*runs[:-1]).parts == {}


def test_the_parts_are_those_of_a_worked_example() -> None:
    """Rows 1 and 2 differ by 2, columns by 1, and one cell by 0.4 more."""
    levels = [(a, b) for a in (0, 1) for b in (0, 1, 2)]
    values = [2.0 * a + b + (0.4 if (a, b) == (1, 2) else 0.0) for a, b in levels]
    found = split_variance(["a", "b"], levels, values)
    # What rows and columns leave of one cell, with two degrees of freedom.
    rest = sum((0.4 * x * y) ** 2 for x in (1 / 2, -1 / 2) for y in (2 / 3, -1 / 3, -1 / 3)) / 2
    assert found.rest == pytest.approx(rest)
    square = 3 * 2 * ((2 + 0.4 / 3) / 2) ** 2
    assert found.variances["a"] == pytest.approx((square - rest) / 3)


def test_many_factors_take_little_time() -> None:
    """Four factors that differ in each of 300 runs have eight billion combinations."""
    fault = find_crossing_fault([(n, n, n, n) for n in range(300)])
    assert fault is not None
    assert "300 runs have 300 of 8100000000 combinations" in fault
    whole = [*itertools.product((1, 2), (3, 4, 5))]
    assert find_crossing_fault(whole) is None
    assert find_crossing_fault(whole[1:]) is not None
    assert find_crossing_fault([*whole, whole[0]]) is not None


def test_lines_of_any_length_have_a_last_loss(tmp_path: Path) -> None:
    """A line of a full ledger names each tensor."""
    name = "loss" * 200_000
    write_ledger(tmp_path, [0.5, 0.25], names=[name])
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert read_last_losses(path) == {name: 0.25}
    assert (read_last_iteration(path), read_last_line(path)) == (2, lines[-1])
    path.write_bytes(b"".join(lines[:-1]))
    assert read_last_line(path) == lines[-2]


def test_what_makes_groups_is_found_by_its_name(grid: list[Path]) -> None:
    assert compare(*grid, by="--lr").by == "--lr"
    assert list(compare(*grid, by="precision").groups) == ["fp32"]
    assert compare(*grid, by="random_seed").by == "seeds.random_seed"
    assert len(compare(*grid, by="command").groups) == 2
    with pytest.raises(ArgumentError, match=r"no run has 'color'.*seeds\.random_seed"):
        compare(*grid, by="color")


def test_a_name_of_several_entries_is_refused(tmp_path: Path) -> None:
    facts = [{"data": {"seed": n}, "other": {"seed": 1}} for n in (1, 2)]
    runs = [_run(tmp_path / str(n), [1.0], **each) for n, each in enumerate(facts)]
    with pytest.raises(ArgumentError, match=r"may be data\.seed or other\.seed"):
        compare(*runs, by="seed")


@pytest.mark.shows("P46")
def test_what_is_doubtful_is_said(tmp_path: Path) -> None:
    first = _run(tmp_path / "first", [1.0])
    second = _run(tmp_path / "second", [1.0])
    bad = _run(tmp_path / "bad", [math.nan], seeds={"random_seed": 2})
    lone = tmp_path / "lone"
    write_ledger(lone, [3.0, 4.0])
    (lone / "ledger.jsonl").write_bytes(
        b"".join((lone / "ledger.jsonl").read_bytes().splitlines(keepends=True)[:-1])
    )
    notes = compare(first, second, bad, lone).notes
    assert "first and second have equal ledgers: they are one result, not two" in notes
    assert "error (last) is not finite, and left out, in: bad" in notes
    assert "without error (last): lone" in notes
    assert "lone has not ended" in notes
    assert any(note.startswith("lone: There is no manifest") for note in notes)
    assert compare(lone, first, bad).varying == {"seeds.random_seed": ["unknown", "1", "2"]}


def test_very_large_numbers_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {(1, 1): 1.0, (1, 2): 2.0, (2, 1): 1e308, (2, 2): -1e308, (3, 1): 1e200, (3, 2): 1e149}
    runs = [
        _run(tmp_path / f"{a}{b}", [x], seeds={"init": a, "order": b})
        for (a, b), x in values.items()
    ]
    found = compare(*runs)
    assert list(found.estimates["error (last)"]["all"].values) == ["11", "12", "32"]
    assert "error (last) is too large for its square, and left out, in: 21, 22, 31" in found.notes
    assert found.parts == {}
    assert main(["compare", *map(str, runs), "--json"]) == 0
    text = capsys.readouterr().out
    assert "Infinity" not in text
    assert "NaN" not in text


def test_pairs_of_numbers_that_are_used_are_used_too(tmp_path: Path) -> None:
    values = {(1, 1): 9e149, (1, 2): 8e149, (2, 1): -9e149, (2, 2): -8e149}
    runs = [
        _run(tmp_path / f"{a}{b}", [x], seeds={"init": a, "order": b})
        for (a, b), x in values.items()
    ]
    paired = compare(*runs, by="init").paired["error (last)"]
    assert list(paired.values.values()) == [1.8e150, 1.6e150]
    assert paired.mean == pytest.approx(1.7e150)
    assert paired.deviation == pytest.approx(math.sqrt(2) * 1e149)


def test_runs_of_different_lengths_are_said(tmp_path: Path) -> None:
    lengths = {"a": 60, "b": 30, "c": 30}
    for name, length in lengths.items():
        write_ledger(tmp_path / name, [1.0 + length] * length)
    text = "the runs have 30 and 60 iterations: their last numbers are not of the same length"
    assert f"{text} of training" in compare(*(tmp_path / name for name in lengths)).notes
    assert not [note for note in compare(tmp_path / "b", tmp_path / "c").notes if text[:9] in note]


def test_bad_calls_are_refused(
    tmp_path: Path, grid: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ArgumentError, match="at least two runs, each once"):
        compare(grid[0])
    with pytest.raises(ArgumentError, match="at least two runs, each once"):
        compare(grid[0], grid[0] / "ledger.jsonl")
    with pytest.raises(LedgerError, match="no run"):
        compare(grid[0], tmp_path / "missing")
    assert main(["compare", str(grid[0]), str(tmp_path / "missing")]) == 2
    assert main(["compare", *map(str, grid), "--html", "x.txt"]) == 2
    assert "must end in .html" in capsys.readouterr().err


def test_the_command_shows_all_of_it(
    grid: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    words = ["compare", *map(str, grid), "--by", "lr", "--html", str(page)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"error \(last\) +0\.1 +3 +2\.\d+ +\d\.\d+ +-?\d.* to \d", out)
    assert "pairs of equal seeds, --lr: 0.1 minus 0.2:" in out
    assert re.search(r"error \(last\) +seeds\.random_seed +\d\.\d+ +9\d%", out)
    read = Page(page.read_text("utf-8"))
    assert "Pairs of equal seeds, --lr: 0.1 minus 0.2" in read.words
    assert "Parts of the variance" in read.words
    found = compare(*grid, by="lr")
    for name, groups in found.estimates.items():
        for run, value in groups["0.1"].values.items():
            row = next(row for row in page.read_text("utf-8").split("<tr>") if f">{run}<" in row)
            assert f"<td>{number_text(value)}</td>" in row, name
    # Of the loss, the rate and the score.
    assert read.tags.count("svg") == 3
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["estimates"]["error (last)"]["0.1"]["n"] == 3
    assert document["by"] == "--lr"


@pytest.mark.shows("P147")
def test_noise_of_single_iterations_hides_no_line_behind_another(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, {}, scores={}, losses=[1.0, 2.0] * 1_000)
    text = write_comparison(compare(tmp_path / "a", tmp_path / "b"))
    paths = re.findall(r'<path class="line l\d" d="M(.*?)"', text)
    assert len(paths) == 4
    assert all(100 < path.count("L") < 200 for path in paths)


@pytest.mark.shows("P147")
def test_the_curves_of_all_runs_lie_over_each_other(tmp_path: Path) -> None:
    courses = {"a": [4.0, 2.0, 1.0], "b": [8.0, 4.0, 2.0, 1.0], "<c>": [3.0, 3.0]}
    for name, losses in courses.items():
        folder = write_run(tmp_path / name, {}, scores={"error": losses[:2]}, losses=losses)
        start = {"iteration": 0, "host": "here", "processes": 1, "run": "0"}
        stretches = [
            {"iteration": number, "iterations": 1, "seconds": 1.0 / number}
            for number in range(1, len(losses) + 1)
        ]
        scores = [{"iteration": 1, "scores": {"error": losses[0]}}]
        write_lines(folder / timing.FILE_NAME, [start, *stretches, *scores])
    text = write_comparison(compare(*(tmp_path / name for name in courses)))
    read = Page(text)
    for title, lines in (("loss", 3), ("learning rate", 3), ("iterations per second", 3)):
        figure = re.search(rf"<figcaption>{title}<.*?</figure>", text, re.DOTALL)
        assert figure is not None, title
        paths = re.findall(r'<path class="line l(\d)" d="M(.*?)"', figure[0])
        assert [int(number) for number, _ in paths] == list(range(lines))
        # A point for each iteration, and the same scale for all.
        assert [path.count("L") + 1 for _, path in paths] == [3, 4, 2]
    assert "&lt;c&gt;</li>" in text
    assert read.words.count("learning rate") == 1
    figure = re.search(r"<figcaption>loss<.*?</figure>", text, re.DOTALL)
    assert figure is not None
    heights = [
        [float(point.split()[1]) for point in path.split("L")]
        for path in re.findall(r'<path class="line l\d" d="M(.*?)"', figure[0])
    ]
    # The first loss of b is the largest of all, and so at the top; equal numbers are level.
    assert min(map(min, heights)) == heights[1][0]
    assert heights[0][0] == heights[1][1]


@pytest.mark.shows("P147")
def test_of_many_runs_the_first_ones_are_drawn_and_the_rest_is_said(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{number:02}", {}, scores={}) for number in range(18)]
    text = write_comparison(compare(*runs))
    assert "Drawn are the first 16 of 18 runs." in text
    assert "r15</li>" in text
    assert "r16</li>" not in text
    assert 'class="line l7 dashed"' in text


def _tried(folder: Path, lr: float, scores: Sequence[float], **facts: Mapping[str, Any]) -> Path:
    """Write a run of a sweep, whose best validation has the smallest error."""
    known = {
        "params": {"lr": lr, "data_seed": 7},
        "found": {"optimizer.lr": lr},
        "seeds": {"random_seed": 1},
    }
    hits = [10.0 * number for number in range(len(scores))]
    return write_run(folder, {**known, **facts}, scores={"error": scores, "hits": hits})


@pytest.mark.shows("P126")
def test_runs_with_other_hyper_parameters_are_listed_the_best_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {
        "a": (0.3, [4.0, 0.5, 3.0]),
        "b": (0.1, [2.0, 1.0, 0.25]),
        "c": (0.03, [math.nan, math.inf]),
        "d": (0.01, [0.5, 0.75]),
    }
    runs = [_tried(tmp_path / name, *values) for name, values in table.items()]
    found = compare(*runs)
    assert (found.estimates, found.parts) == ({}, {})
    assert found.sweep is not None
    assert found.sweep.parameters == ["params.lr"]
    assert [(row.run, row.parameters, row.scores) for row in found.sweep.rows] == [
        ("b", ["0.1"], {"error": 0.25, "hits": 20.0}),
        ("a", ["0.3"], {"error": 0.5, "hits": 10.0}),
        ("d", ["0.01"], {"error": 0.5, "hits": 0.0}),
        ("c", ["0.03"], {}),
    ]
    page = tmp_path / "page.html"
    assert main(["compare", *map(str, runs), "--html", str(page)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        ["run", "lr", "error", "hits"],
        ["b", "0.1", "0.25", "20"],
        ["a", "0.3", "0.5", "10"],
    ]
    assert lines[4] == ["c", "0.03", "-", "-"]
    read = Page(page.read_text("utf-8"))
    assert "best validation by error (min), the best run first." in read.words
    assert "95% interval" not in read.words
    assert main(["compare", *map(str, runs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sweep"]["rows"][0]["run"] == "b"


@pytest.mark.shows("P126")
def test_seeds_are_no_hyper_parameters(tmp_path: Path) -> None:
    facts = [
        {
            "params": {"lr": 0.1, "data_seed": seed, "seed": seed, "random_seed": seed},
            "found": {"model.seed": seed, "data.seeds.order": seed},
            "seeds": {"random_seed": seed, "order": seed},
        }
        for seed in (1, 2, 3)
    ]
    runs = [
        _tried(tmp_path / f"{number}", 0.1, [1.0, 0.5], **each) for number, each in enumerate(facts)
    ]
    found = compare(*runs)
    assert found.sweep is None
    assert found.estimates["error (best)"]["all"].interval is not None


@pytest.mark.shows("P126")
def test_groups_are_listed_where_runs_differ_within_them(tmp_path: Path) -> None:
    runs = [
        _tried(
            tmp_path / f"{lr}-{seed}-{size}",
            lr,
            [1.0, lr * seed],
            data={"batch_size": size},
            seeds={"random_seed": seed},
        )
        for lr in (0.1, 0.2)
        for seed in (1, 2)
        for size in (8, 16)
    ]
    alike = [run for run in runs if run.name.endswith("-8")]
    assert compare(*alike, by="params.lr").sweep is None
    assert list(compare(*alike, by="params.lr").groups) == ["0.1", "0.2"]
    found = compare(*runs, by="params.lr").sweep
    assert found is not None
    assert found.parameters == ["params.lr", "data.batch_size"]


@pytest.mark.shows("P126")
def test_runs_without_a_common_best_are_listed_as_given(tmp_path: Path) -> None:
    runs = [_tried(tmp_path / str(lr), lr, [lr, 3.0 - lr]) for lr in (1.0, 2.0, 0.5)]
    path = runs[1] / "timing.jsonl"
    path.write_text(path.read_text().replace('"mode": "min"', '"mode": "max"'))
    found = compare(*runs).sweep
    assert found is not None
    assert found.by is None
    assert [(row.run, row.scores["error"]) for row in found.rows] == [
        ("1.0", 2.0),
        ("2.0", 1.0),
        ("0.5", 2.5),
    ]
