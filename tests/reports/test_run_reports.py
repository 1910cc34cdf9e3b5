"""Reports: all that the files of a run say, in one file that needs nothing else."""

from __future__ import annotations

import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from helios.cli import main
from helios.errors import LedgerError
from helios.ledger import report, verify
from helios.ledger.line import write_float
from helios.ledger.manifest_file import FILE_NAME as MANIFEST
from helios.ledger.run_facts import read_run
from helios.ledger.timing import FILE_NAME as TIMES
from helios.reports import document as pages
from helios.reports.document import (
    MOST_BYTES,
    Chapter,
    Document,
    read_table,
    write_page,
    write_table,
    write_text,
)
from helios.reports.figures import Curve, read_curves
from helios.reports.run_report import RunReport
from tests.support.runs import Setting, train
from tests.support.synthetic_run import write_ledger, write_lineage, write_lines, write_run

_VOID = {"meta", "link", "br"}
# Whatever makes a browser ask for another file.
_LOADS = re.compile(r"(?:src|srcset|data|poster|action)\s*=|url\(|@import|<script|<iframe|https?:")


class Page(HTMLParser):
    """Reads a page, and fails if its elements are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.paths: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in _VOID and tag != "path":
            self.open.append(tag)
        self.paths += [value or "" for name, value in attrs if tag == "path" and name == "d"]

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two starts."""
    folder = tmp_path_factory.mktemp("reported")
    train(folder, Setting(total_steps=4, chkpt_frequency=2))
    train(folder, Setting(total_steps=6, chkpt_frequency=2))
    return folder / "small"


def _report(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["report", *map(str, words)]) == 0
    return capsys.readouterr().out


def _both(found: RunReport) -> list[str]:
    """Return the words of both forms."""
    plain = re.sub(r"\\(.)", r"\1", found.markdown)
    return [Page(found.html).words, " ".join(plain.split())]


@pytest.mark.shows("P43")
def test_a_report_holds_what_is_known_of_a_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.html"
    assert _report(capsys, run, "--out", target) == f"Wrote {target}.\n"
    page = Page(target.read_text("utf-8"))
    for text in (
        verify(run).hash,
        "6 (the run has ended)",
        "2 (killed: 0)",
        "end: total_steps reached",
        "small_epoch_1_iter_6.pth",
        "options.total_steps",
        "harmless",
        "random_seed 5",
        "iterations per second",
    ):
        assert text in page.words, text
    digests = re.findall(r"sha256:[0-9a-f]{64}", page.words)
    assert len(digests) == 3
    # A loss, a rate, the throughput and a score.
    assert page.tags.count("svg") == 4


@pytest.mark.shows("P43")
def test_markdown_has_the_same_facts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = _report(capsys, run, "--md")
    (path,) = run.glob("*.md")
    assert out == f"Wrote {path}.\n"
    found = report(run)
    page, markdown = _both(found)
    for section in found.document.sections:
        assert section.title in page
        assert section.title in markdown
    assert verify(run).hash in markdown
    path.unlink()


@pytest.mark.shows("P44")
def test_the_page_stands_alone_and_follows_the_reader(run: Path) -> None:
    text = report(run).html
    assert not _LOADS.search(re.sub(r'<link rel="icon" href="data:,">', "", text))
    assert "default-src 'none'" in text
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport"' in text
    assert "max-width:36rem" in text


@pytest.mark.shows("P44")
def test_texts_of_a_run_are_never_markup(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>\"'&`|*_"
    facts = {"options": {bad: bad}, "seeds": {bad: 1}, "command": {"script": bad}}
    write_run(tmp_path / "run", facts, scores={bad: [1.0, 0.5]})
    write_ledger(tmp_path / "run", [1.0, 2.0], names=[bad])
    write_lineage(tmp_path / "run", {"event": "start", "host": bad}, {"event": "end", "cause": bad})
    found = report(tmp_path / "run", [{"name": bad, "state": bad, "metrics": {bad: 1.0}}])
    assert "<script" not in found.html
    assert bad in html.unescape(found.html)
    assert "<script" not in found.markdown.replace("\\<script", "")
    page = Page(found.html)
    assert "script" not in page.tags


@pytest.mark.shows("P44")
@pytest.mark.parametrize(
    "cells",
    [
        ("", ""),
        ("a | b", "|"),
        ("\\", "\\|"),
        ("| a |", " | "),
        ("\\\\ | \\", "---"),
        ("- a", "### b"),
        ("&lt;b&gt;", "<b>"),
        ("`$x$`", "~~#_*_~~"),
        ("x" + chr(0x2028) + "y", "a\nb"),
    ],
    ids=ascii,
)
def test_html_shows_every_text_as_it_was_written_to_markdown(cells: tuple[str, str]) -> None:
    table = write_table(("one", "two"), [cells, ("next", "row")])
    plain = [" ".join(cell.split()) for cell in cells]
    assert read_table(table) == (["one", "two"], [plain, ["next", "row"]])
    page = Page(
        write_page(
            Document(
                cells[0],
                "kind",
                [
                    Chapter(cells[1], [write_text(cells[0]), table]),
                ],
            )
        )
    )
    assert page.tags.count("table") == 1
    for cell in plain:
        assert cell in page.words


@pytest.mark.shows("P43")
def test_missing_parts_are_named(run: Path, tmp_path: Path) -> None:
    write_ledger(tmp_path / "run", [1.0])
    for words in _both(report(tmp_path / "run")):
        assert "There is no manifest, so command, options and environment are unknown." in words
        assert "There is no lineage, so starts, kills and saves are unknown." in words
        assert "There are no times, so throughput and scores are unknown." in words
    other = tmp_path / "other"
    other.mkdir()
    for name in (MANIFEST, TIMES):
        (other / name).write_bytes((run / name).read_bytes())
    for words in _both(report(other)):
        assert "There is no ledger, so the losses are unknown." in words


@pytest.mark.shows("P43")
def test_a_start_without_an_end_was_killed(tmp_path: Path) -> None:
    write_ledger(tmp_path, [1.0] * 9)
    write_lineage(
        tmp_path,
        {"event": "start", "iteration": 0},
        {"event": "save", "checkpoint": "a"},
        {"event": "fallback", "checkpoint": "b", "cause": "the file is damaged"},
        {"event": "resume", "iteration": 4},
        {"event": "interruption", "cause": "SIGTERM"},
        {"event": "resume", "iteration": 6},
    )
    found = report(tmp_path)
    words = Page(found.html).words
    assert "3 (killed: 1)" in words
    assert "run.json has" not in words
    assert words.count("killed (no end was recorded)") == 1
    assert "interruption: SIGTERM" in words
    assert "no end recorded so far" in words
    assert "the file is damaged" in words
    # A damaged file is noticed by the start that passes it over.
    kinds = [[each["event"] for each in attempt.events] for attempt in read_run(tmp_path).attempts]
    assert kinds == [["save"], ["fallback", "interruption"], []]
    assert found.html.count('class="killed"') == found.html.count('class="resumed"') == 2


@pytest.mark.shows("P43")
def test_a_start_that_began_anew_is_no_resume_in_a_chart(tmp_path: Path) -> None:
    write_ledger(tmp_path, [1.0] * 9)
    write_lineage(tmp_path, *[{"event": "start", "iteration": 0}] * 2)
    found = report(tmp_path)
    words = Page(found.html).words
    assert "2 (killed: 1)" in words
    assert 'class="killed"' not in found.html
    assert "2026-01-02 03:04:05" in words


@pytest.mark.shows("P43")
def test_from_and_to_are_the_first_and_the_last_number(tmp_path: Path) -> None:
    """Also where the line merges thousands of numbers into one point."""
    write_run(
        tmp_path,
        {},
        scores={"accuracy": [0.5, 0.25, 0.99996]},
        losses=[3.0, 9.0, *[1.0] * 4_000, 2.0],
    )
    words = report(tmp_path).markdown
    assert "loss: from 3 to 2, between 1 and 9." in words
    assert "accuracy: from 0.5 to 0.99996, between 0.25 and 0.99996." in words


@pytest.mark.shows("P43")
def test_a_throughput_of_an_earlier_version_has_its_validations(tmp_path: Path) -> None:
    start = {"iteration": 0, "host": "here", "processes": 1}
    stretch = {"iteration": 8, "iterations": 8, "seconds": 4.0}
    write_lines(tmp_path / TIMES, [start, stretch])
    words = report(tmp_path).markdown
    assert "On average 2 iterations per second, with validations and saves." in words
    write_lines(tmp_path / TIMES, [{**start, "run": "0"}, {**stretch, "paused": 2.0}])
    words = report(tmp_path).markdown
    assert "On average 4 iterations per second, with saves, without validations." in words


def test_a_start_that_is_not_in_the_manifest_is_no_lack_of_changes(
    run: Path, tmp_path: Path
) -> None:
    for name in (MANIFEST, TIMES):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    starts = [{"event": "start", "iteration": 0}, *[{"event": "resume", "iteration": 2}] * 2]
    write_lineage(tmp_path, *starts)
    words = Page(report(tmp_path).html).words
    assert "run.json has 2 of 3 starts." in words
    assert "without the last seconds before each kill" in words
    words = Page(report(run).html).words
    assert "run.json has 2 of" not in words
    assert "before each kill" not in words


def test_a_folder_without_evidence_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "Pass the folder of a run." in capsys.readouterr().err
    with pytest.raises(LedgerError, match="no run"):
        report(tmp_path)
    for name in ("one", "two"):
        write_ledger(tmp_path / name, [1.0])
    assert main(["report", str(tmp_path)]) == 2
    assert "several runs: one, two" in capsys.readouterr().err


def test_no_file_of_a_run_is_overwritten(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "ledger.jsonl").read_bytes()
    assert main(["report", str(run), "--out", str(run / "ledger.jsonl")]) == 2
    assert "must end in .html or .htm" in capsys.readouterr().err
    assert (run / "ledger.jsonl").read_bytes() == before


def test_json_has_the_facts(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(_report(capsys, run, "--out", tmp_path / "a.html", "--json"))
    assert document["path"] == str(tmp_path / "a.html")
    assert document["summary"]["Iterations"] == "6 (the run has ended)"
    assert document["name"] == "small"
    assert [each["event"] for each in document["starts"]] == ["start", "resume"]
    assert document["manifest"]["seeds"] == {"random_seed": 5}
    assert [each["name"] for each in document["checkpoints"]][-1] == "small_epoch_1_iter_6.pth"
    [loss] = document["curves"]["Losses"].values()
    assert (loss["iteration"], loss["num_infinite"]) == (6, 0)
    assert loss["least"] <= min(loss["first"], loss["last"])
    assert loss["largest"] >= max(loss["first"], loss["last"])


@pytest.mark.parametrize(
    "length", [30_000, pytest.param(1_000_000, marks=pytest.mark.full)], ids=str
)
def test_a_report_of_many_iterations_stays_small(length: int, tmp_path: Path) -> None:
    names = ["loss"] if length > 100_000 else [f"loss {number}" for number in range(3)]
    losses = [math.sin(number) + 2 for number in range(length)]
    write_ledger(tmp_path, losses, names=names)
    write_lineage(tmp_path, *({"event": "resume", "iteration": 7 * n} for n in range(3_000)))
    found = report(tmp_path)
    assert 20_000 < len(found.html.encode()) <= MOST_BYTES
    assert f"{length:,} (the run has ended)" in found.html


def test_a_page_that_is_too_large_gets_fewer_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ledger(tmp_path, [math.sin(n) for n in range(900)], names=["a", "b", "c"])
    sizes = [len(path) for path in Page(report(tmp_path).html).paths]
    monkeypatch.setattr(pages, "MOST_BYTES", 30_000)
    page = report(tmp_path).html
    assert len(page.encode()) <= 30_000
    fewer = [len(path) for path in Page(page).paths]
    assert len(fewer) == len(sizes)
    assert max(sizes) / 20 < max(fewer) < max(sizes) / 2


def test_losses_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    write_ledger(tmp_path, [1.0, math.nan, 2.0, math.inf])
    for words in _both(report(tmp_path)):
        assert "2 values are not finite, the first at iteration 2." in words


@pytest.mark.shows("P44")
def test_many_losses_make_no_large_file(tmp_path: Path) -> None:
    names = [f"loss of the part {number}" for number in range(300)]
    write_ledger(tmp_path, [math.sin(n) * 1e5 for n in range(900)], names=names)
    found = report(tmp_path)
    assert len(found.html.encode()) <= MOST_BYTES
    assert "Without a chart, because there are too many: loss of the part 40," in found.html


def test_a_curve_keeps_the_least_and_the_largest_number() -> None:
    curve = Curve()
    numbers = [math.sin(n * 0.37) for n in range(5_000)]
    numbers[3_210] = 7.0
    numbers[17] = math.nan
    for iteration, number in enumerate(numbers, 1):
        curve.add(iteration, number)
    buckets = curve.shrink(100)
    assert 50 < len(buckets) <= 100
    assert max(bucket.high for bucket in buckets) == 7.0
    (peak,) = [bucket for bucket in buckets if bucket.high == 7.0]
    assert abs(peak.place - 3_211) < 5_000 / 100
    finite = [number for number in numbers if math.isfinite(number)]
    assert min(bucket.low for bucket in buckets) == min(finite)
    assert (curve.num_infinite, curve.first_infinite) == (1, 18)
    assert curve.last == (5_000, numbers[-1])


@pytest.mark.shows("P62")
def test_lines_that_are_not_good_are_in_no_chart(tmp_path: Path) -> None:
    write_ledger(tmp_path, [1.0, 2.0, 4.0])
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(write_float(2.0).encode(), b"4" * 16))
    html = report(tmp_path).html
    assert "1 findings, the first: line 3, after iteration 1" in html
    assert "Lines of the ledger that are not good are missing in the charts." in html
    curves, status = read_curves(path)
    assert [part.high for part in curves.losses["loss"].shrink(10)] == [1.0, 4.0]
    assert len(status.findings) == 1


def test_iterations_before_the_first_one_are_counted_with_it() -> None:
    curve = Curve()
    for iteration, number in ((5_000, 1.0), (5_001, 2.0), (3, 8.0)):
        curve.add(iteration, number)
    assert [(part.place, part.high) for part in curve.shrink(10)] == [(5_000, 8.0), (5_001, 2.0)]


@pytest.mark.shows("P44")
@pytest.mark.parametrize(
    "losses",
    [
        [1.0],
        [0.0, 0.0],
        [1e300, -1e300],
        [1.7e308] * 2_000,
        [1e-300, 1e300],
        [math.inf, math.nan],
        [5e-324, 1e-310],
        [1.7e308, 1.7e308, -1.7e308, -1.7e308] * 600,
    ],
    ids=lambda losses: str(losses[:2]),
)
def test_any_numbers_have_a_chart(losses: list[float], tmp_path: Path) -> None:
    write_ledger(tmp_path, losses)
    for path in Page(report(tmp_path).html).paths:
        assert not re.search("nan|inf", path)
        assert all(-1 <= float(x) <= 1001 for x in re.findall(r"-?[\d.]+(?:e-?\d+)?", path))
