"""The report of a run: what happened, with what it ran, and a checklist for a paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helios.ledger.summary import checklist
from helios.ledger.summary.checklist import make_checklist
from helios.ledger.summary.curves import LedgerCurves, read_curves
from helios.ledger.summary.document import Block, Chapter, Document, Facts, Text, shorten_rows
from helios.ledger.summary.figures import Figures
from helios.ledger.summary.markdown import write_markdown
from helios.ledger.summary.page import write_page
from helios.ledger.summary.run_facts import RunFacts, read_run
from helios.ledger.summary.tables import (
    show_changes,
    show_checkpoints,
    show_environment,
    show_lineage,
    show_options,
    show_saves,
)
from helios.ledger.verification import LedgerStatus

MOST_BYTES = 2_000_000
"""The largest size of a report."""
_POINTS = (800, 400, 200, 100, 50)
_UNSAID = "unknown"


@dataclass
class RunReport:
    """The result of ``helios.ledger.report``.

    Attributes:
        folder: the folder of the run.
        document: its content.
        html: the whole HTML file, at most 2 MB.
        markdown: the same facts as Markdown.
    """

    folder: Path
    document: Document
    html: str
    markdown: str

    def as_dict(self) -> dict[str, Any]:
        """Return the content as plain values, without the points of charts."""
        return {"folder": str(self.folder), **self.document.as_dict()}


def make_report(run: str | Path, checkpoints: Sequence[Mapping[str, Any]] | None) -> RunReport:
    """Make the report of a run; see ``helios.ledger.report``."""
    facts = read_run(run)
    maker = _Maker(facts, checkpoints)
    for points in _POINTS:
        document = maker.make(points)
        page = _encode(write_page(document))
        if len(page) <= MOST_BYTES:
            break
    else:
        document = maker.make(0)
        page = _encode(write_page(document))
    markdown = _encode(write_markdown(document))
    return RunReport(facts.folder, document, page.decode(), markdown.decode())


def _encode(text: str) -> bytes:
    # Names of files may hold bytes that are no text.
    return text.encode("utf-8", "replace")


class _Maker:
    """Makes the document from what was read once, with more or fewer points."""

    def __init__(self, run: RunFacts, checkpoints: Sequence[Mapping[str, Any]] | None) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._curves: LedgerCurves | None = None
        self._status: LedgerStatus | None = None
        if run.ledger is not None:
            self._curves, self._status = read_curves(run.ledger, run.times.rates)

    def make(self, points: int) -> Document:
        """Return the document, with at most so many points in each line of a chart."""
        run = self._run
        fingerprint = None if self._status is None else self._status.hash
        figures = Figures(run, self._curves, points)
        checkpoints = self._checkpoints
        sections = [
            Chapter("Summary", list(self._summarize())),
            Chapter("Losses", list(figures.show_losses())),
            Chapter("Learning rate", list(figures.show_rates())),
            Chapter("Throughput", list(figures.show_throughput())),
            Chapter("Scores", list(figures.show_scores())),
            Chapter("Lineage", list(show_lineage(run))),
            Chapter("Changes between starts", list(show_changes(run))),
            Chapter(
                "Checkpoints",
                list(show_saves(run) if checkpoints is None else show_checkpoints(checkpoints)),
            ),
            Chapter("Environment", list(show_environment(run))),
            Chapter("Options", list(show_options(run))),
            Chapter("Reproducibility checklist", list(_show_checklist(run, fingerprint))),
        ]
        return Document(run.name, "Report of a training run", sections)

    def _summarize(self) -> Iterator[Block]:
        run = self._run
        rows: list[tuple[str, str]] = []
        if self._curves is not None and self._status is not None:
            rows += _summarize_ledger(self._curves, self._status)
        if run.attempts:
            rows.append(("Starts", f"{len(run.attempts)} (killed: {run.num_kills})"))
            rows.append(("Last start", run.attempts[-1].outcome))
        rows.append(("Training time", checklist.time_text(run) or _UNSAID))
        rows.append(("Command", checklist.command_text(run.facts) or _UNSAID))
        rows.append(("Level", str(run.facts.get("level", {}).get("text", _UNSAID))))
        yield Facts(shorten_rows(rows))
        for text in run.missing.values():
            yield Text(text)
        if self._status is not None and not self._status.is_good:
            yield Text("Lines of the ledger that are not good are missing in the charts.")


def _summarize_ledger(curves: LedgerCurves, status: LedgerStatus) -> Iterator[tuple[str, str]]:
    state = "the run has ended" if status.has_ended else "the run has not ended"
    begin = f", from {curves.begin:,} on" if curves.begin > 1 else ""
    yield "Iterations", f"{curves.end:,}{begin} ({state})"
    yield "Epoch and step", f"{curves.epoch:,} and {curves.step:,}"
    if curves.num_skipped:
        yield "Steps without an update", f"{curves.num_skipped:,}"
    good = "good: every line follows from the one before it"
    bad = f"{len(status.findings)} findings, the first: {(status.findings or ['-'])[0]}"
    yield "Ledger", good if status.is_good else bad
    yield "Final fingerprint", f"{status.hash} (hash of the last line, which covers all lines)"
    if curves.digests is not None:
        place, weights, optimizers = curves.digests
        yield "Hash of the weights", f"{weights} (iteration {place})"
        yield "Hash of the optimizers", f"{optimizers} (iteration {place})"


def _show_checklist(run: RunFacts, fingerprint: str | None) -> Iterator[Block]:
    yield Text(
        "Filled in as far as the files of the run say. Empty lines are for the author, because "
        "Helios cannot know the answer."
    )
    yield make_checklist(run, fingerprint=fingerprint)
