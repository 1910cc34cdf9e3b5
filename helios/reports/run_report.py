"""The report of a run: what happened, with what it ran, and a checklist for a paper."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import helios.ledger.lineage as lineage
from helios.best import BestValidation
from helios.core.text import number_text, with_step
from helios.ledger.manifest.manifest_changes import compare_facts
from helios.ledger.run_facts import RunFacts, read_run
from helios.ledger.verification import LedgerStatus
from helios.reports.checklist import command_text, find_libraries, make_checklist, time_text
from helios.reports.curves import Curve, LedgerCurves, read_curves
from helios.reports.document import (
    MOST_CHARACTERS,
    MOST_ROWS,
    Block,
    Chapter,
    Chart,
    Document,
    Facts,
    Grid,
    Line,
    Text,
    shorten,
    shorten_rows,
    write_markdown,
)
from helios.reports.page import write_page

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


def report(run: str | Path, checkpoints: Sequence[Mapping[str, Any]] | None = None) -> RunReport:
    """Make the report of a run.

    Args:
        run: the folder of the run, or its ledger.
        checkpoints: facts about each checkpoint that is still there: ``name``, ``state``,
            ``epoch``, ``iteration``, ``level``, ``digest`` and ``metrics``. ``None`` if they were
            not looked at: the report then has those that the lineage names.

    Raises:
        LedgerError: if there is no run, or if one of its files cannot be read.
    """
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
        rows.append(("Training time", time_text(run) or _UNSAID))
        rows.append(("Command", command_text(run.facts) or _UNSAID))
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


_MOST_CHARTS = 40
_MOST_DOTS = 60


@final
class Figures:
    """Draws what was read once, with more or fewer points.

    Args:
        run: what is known of the run.
        curves: those of its ledger; ``None`` without one.
        points: the most points of each line; 0 for charts without lines.
    """

    def __init__(self, run: RunFacts, curves: LedgerCurves | None, points: int) -> None:
        self._run = run
        self._curves = curves
        self._points = points
        self._marks = [
            (attempt.iteration, before.was_killed)
            for before, attempt in itertools.pairwise(run.attempts)
        ][:MOST_ROWS]

    def show_losses(self) -> Iterator[Block]:
        """Yield the blocks of the losses and of the norm of the gradients."""
        if self._curves is None:
            yield Text("There is no ledger, so the losses are unknown.")
            return
        losses = self._curves.losses
        if not losses:
            yield Text("The run has set no losses (loss_items).")
        if losses:
            yield Text(
                "The line is the mean of each group of iterations, the area around it their least "
                "and largest loss. Vertical lines mark starts that resumed; those in red follow a "
                "kill."
            )
        for name, curve in list(losses.items())[:_MOST_CHARTS]:
            yield self._draw(name, curve)
        if len(losses) > _MOST_CHARTS:
            rest = ", ".join(list(losses)[_MOST_CHARTS:])
            yield Text(shorten(f"Without a chart, because there are too many: {rest}."))
        if self._curves.norm is not None:
            yield self._draw("gradient norm before clipping", self._curves.norm)
        else:
            yield Text("No gradient norm: the training does not clip by norm (clip_norm).")

    def show_rates(self) -> Iterator[Block]:
        """Yield the blocks of the learning rates."""
        if self._curves is None:
            yield Text("There is no ledger, so the learning rates are unknown.")
            return
        rates = self._curves.rates
        if not rates:
            yield Text("The run has no optimizer with a learning rate.")
        elif not self._curves.has_used_rates:
            yield Text(
                "Some of these rates are those at the end of an iteration, because the run has not "
                "recorded which ones its updates have used: with a scheduler that steps after each "
                "update, they are those of the next one."
            )
        for number, curve in enumerate(rates[:_MOST_CHARTS]):
            name = "learning rate" if len(rates) == 1 else f"learning rate, group {number + 1}"
            yield self._draw(name, curve)
        if len(rates) > _MOST_CHARTS:
            yield Text(f"{len(rates) - _MOST_CHARTS} further groups have no chart here.")

    def _draw(self, name: str, curve: Curve) -> Chart:
        assert self._curves is not None
        buckets = curve.shrink(self._points)
        note = ""
        if curve.last is not None:
            iteration, number = curve.last
            note = (
                f"Last: {number_text(number)} at iteration {with_step(iteration, curve.last_step)}."
            )
        if curve.first_infinite is not None:
            place = with_step(curve.first_infinite, curve.first_infinite_step)
            note += (
                f" {curve.num_infinite:,} values are not finite, the first at iteration {place}."
            )
        has_band = any(bucket.low < bucket.high for bucket in buckets)
        line = Line(
            [(bucket.place, bucket.mean) for bucket in buckets],
            [(bucket.place, bucket.low, bucket.high) for bucket in buckets] if has_band else (),
        )
        return Chart(shorten(name), line, self._span, self._marks, note.strip(), curve.ends)

    @property
    def _span(self) -> tuple[float, float]:
        if self._curves is not None:
            return self._curves.begin, self._curves.end
        places = [line["iteration"] for line in (*self._run.times.lines, *self._run.times.scores)]
        return 1.0, max(places, default=1)

    def show_throughput(self) -> Iterator[Block]:
        """Yield the blocks of the throughput."""
        lines = [line for line in self._run.times.lines if _own_seconds(line) > 0]
        if not lines:
            yield Text("There are no times, so the throughput is unknown.")
            return
        curve = Curve()
        for line in lines:
            curve.add(line["iteration"], line["iterations"] / _own_seconds(line))
        mean = sum(line["iterations"] for line in lines) / sum(map(_own_seconds, lines))
        yield self._draw_points("iterations per second", curve)
        # Earlier versions did not note how long validations took.
        knows_pauses = all("run" in start for start in self._run.times.starts)
        what = "with saves, without validations" if knows_pauses else "with validations and saves"
        yield Text(
            f"On average {number_text(mean)} iterations per second, {what}. "
            "Vertical lines mark starts that resumed; those in red follow a kill."
        )

    def _draw_points(self, name: str, curve: Curve) -> Chart:
        found = [(bucket.place, bucket.mean) for bucket in curve.shrink(self._points)]
        line = Line(found, has_dots=len(found) <= _MOST_DOTS)
        return Chart(shorten(name), line, self._span, self._marks, ends=curve.ends)

    def show_scores(self) -> Iterator[Block]:
        """Yield the blocks of the scores of validations."""
        scores, best = self._run.find_scores(), self._run.find_best()
        if not scores:
            yield Text("The run has recorded no scores of validations.")
            return
        rows, steps = [], self._run.find_steps()
        for name, values in scores.items():
            iteration, last = values[-1]
            place = with_step(iteration, steps.get(iteration))
            row = [shorten(name), f"{number_text(last)} (iteration {place})"]
            if best is not None:
                score = best.scores.get(name)
                at = f" (iteration {with_step(best.iteration, best.step)})"
                row.append("-" if score is None else number_text(score) + at)
            rows.append(row)
        head = ["score", "last validation"]
        yield Grid(head if best is None else [*head, "best validation"], rows[:MOST_ROWS])
        if best is not None:
            yield Text(_explain(best))
        for name, values in list(scores.items())[:_MOST_CHARTS]:
            curve = Curve()
            for iteration, score in values:
                curve.add(iteration, score)
            yield self._draw_points(name, curve)


def _explain(best: BestValidation) -> str:
    """Return what decides which validation is the best."""
    if best.metric is None:
        text = "The best one is the last for which have_metrics_improved returned True"
    else:
        side = "smallest" if best.mode == "min" else "largest"
        text = f"The best one has the {side} finite {best.metric}, the earlier one at a tie"
    rest = f"; those until iteration {best.since} are unknown" if best.since else ""
    return f"{text}{rest}."


def _own_seconds(line: Mapping[str, Any]) -> float:
    """Return the time of the iterations of a stretch, without what paused them."""
    return float(line["seconds"] - line.get("paused", 0.0))


def show_lineage(run: RunFacts) -> Iterator[Block]:
    """Yield the starts of a run, and what else happened to it."""
    if not run.attempts:
        yield Text("There is no lineage, so starts and kills are unknown.")
        return
    rows = []
    for attempt in run.attempts:
        start = attempt.start
        saves = sum(event["event"] == lineage.SAVE for event in attempt.events)
        rows.append(
            (
                start.get("time", "-"),
                start.get("event", "-"),
                f"{attempt.iteration:,}",
                str(start.get("checkpoint", "-")),
                f"{start.get('host', '-')}, {start.get('processes', '-')}",
                str(saves),
                shorten(attempt.outcome),
            )
        )
    heads = ("time (UTC)", "start", "after iteration", "checkpoint", "host, processes", "saves")
    yield from _limit_rows((*heads, "end"), rows, "lineage.jsonl has all")
    known = (lineage.SAVE, lineage.END, lineage.INTERRUPTION)
    events = [
        (event["time"], event["event"], str(event.get("checkpoint", "-")), _cause(event))
        for attempt in run.attempts
        for event in attempt.events
        if event["event"] not in known
    ]
    if events:
        head = ("time (UTC)", "event", "checkpoint", "cause")
        yield Text("What else happened:")
        yield from _limit_rows(head, events, "lineage.jsonl has all")


def _cause(event: Mapping[str, Any]) -> str:
    known = ("time", "event", "checkpoint", "cause", "digest")
    rest = {name: value for name, value in event.items() if name not in known}
    return shorten(", ".join([str(event.get("cause", "")), *_list_facts(rest)]).strip(", "))


def show_changes(run: RunFacts) -> Iterator[Block]:
    """Yield what changed between each two starts, and what it may change."""
    if run.manifest is None:
        yield Text("There is no manifest, so changes between starts are unknown.")
        return
    sections = run.manifest.sections
    rows = [
        (
            after.start.get("time", "-"),
            change.name,
            "-" if change.before is None else shorten(_plain(change.before)),
            "-" if change.after is None else shorten(_plain(change.after)),
            change.effect.value,
            change.reason,
        )
        for before, after in itertools.pairwise(sections)
        for change in compare_facts(before.facts, after.facts)
    ]
    if len(sections) < len(run.attempts):
        yield Text(
            f"run.json has {len(sections)} of {len(run.attempts)} starts. It is written some "
            "seconds after a start, so one that was killed before is not in it."
        )
    if len(sections) == len(run.attempts) == 1:
        yield Text("The run was started once, so nothing has changed.")
    elif not rows:
        yield Text("No changes are known.")
    else:
        head = ("start (UTC)", "what", "before", "after", "effect", "reason")
        yield from _limit_rows(head, rows, "run.json has all")


def show_saves(run: RunFacts) -> Iterator[Block]:
    """Yield the checkpoints that were saved, which need not be there any more."""
    saves = {
        str(event.get("checkpoint")): event
        for attempt in run.attempts
        for event in attempt.events
        if event["event"] == lineage.SAVE
    }
    if not saves:
        yield Text("The lineage names no checkpoint.")
        return
    rows = [(name, event["time"], event.get("digest", "-")) for name, event in saves.items()]
    yield from _limit_rows(("saved", "time (UTC)", "digest"), rows, "lineage.jsonl has all")


def show_checkpoints(checkpoints: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    """Yield the checkpoints that are still there; see :func:`helios.ledger.report`."""
    if not checkpoints:
        yield Text("There is no checkpoint in the folder of the run.")
        return
    head = ("checkpoint", "epoch", "iteration", "state", "level", "scores", "digest")
    rows = [_describe_checkpoint(each) for each in checkpoints]
    yield from _limit_rows(head, rows, "`helios ls` lists all")


def _describe_checkpoint(facts: Mapping[str, Any]) -> tuple[str, ...]:
    metrics = facts.get("metrics") or {}
    return (
        str(facts["name"]),
        str(facts.get("epoch", "-")),
        "-" if facts.get("iteration") is None else with_step(facts["iteration"], facts.get("step")),
        str(facts.get("state", "-")),
        str(facts.get("level") or "-"),
        shorten(", ".join(f"{name} {number_text(score)}" for name, score in metrics.items()))
        or "-",
        str(facts.get("digest") or "-"),
    )


def show_environment(run: RunFacts) -> Iterator[Block]:
    """Yield what the newest start ran on."""
    facts = run.facts
    if not facts:
        yield Text("There is no manifest, so the environment is unknown.")
        return
    rows = []
    for topic in ("versions", "system", "gpu", "environment", "switches", "git", "processes"):
        known = {name: x for name, x in facts.get(topic, {}).items() if name != "patch"}
        rows.append((topic, "; ".join(_list_facts(known)) or "none"))
    libraries = find_libraries(facts)
    rows.append(("imported packages", ", ".join(f"{name} {x}" for name, x in libraries)))
    code = [f"{name} {hashes['text']}" for name, hashes in facts.get("code", {}).items()]
    rows.append(("source files", ", ".join(code)))
    yield Text("As at the newest start. run.json has all of it.")
    yield Facts(shorten_rows(rows, 4 * MOST_CHARACTERS))


def show_options(run: RunFacts) -> Iterator[Block]:
    """Yield the options of the newest start."""
    facts = run.facts
    if not facts:
        yield Text("There is no manifest, so the options are unknown.")
        return
    rows = [
        (topic, "; ".join(_list_facts(facts[topic])))
        for topic in ("program", "seeds", "data", "parameters")
        if topic in facts
    ]
    rows += [(name, _plain(value)) for name, value in facts.get("options", {}).items()]
    yield Facts(shorten_rows(rows))


def _list_facts(table: Mapping[str, Any]) -> list[str]:
    return [f"{name} {_plain(value)}" for name, value in table.items()]


def _plain(value: Any) -> str:
    if value in ("", [], {}):
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _limit_rows(head: Sequence[str], rows: Sequence[Sequence[str]], where: str) -> Iterator[Block]:
    """Yield a table of the newest rows, and a sentence on those that are left out."""
    yield Grid(head, rows[-MOST_ROWS:])
    if len(rows) > MOST_ROWS:
        yield Text(f"The first {len(rows) - MOST_ROWS:,} are left out; {where}.")
