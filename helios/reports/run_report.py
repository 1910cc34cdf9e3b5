"""The report of a run: what happened, and with what it ran."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import helios.ledger.lineage as lineage
from helios.ledger.manifest_file import compare_facts
from helios.ledger.run_facts import RunFacts, read_run
from helios.ledger.verification import LedgerStatus
from helios.reports.document import (
    MOST_CHARACTERS,
    MOST_ROWS,
    NO_HEAD,
    Block,
    Chapter,
    Document,
    shorten,
    shorten_rows,
    write_fitting,
    write_markdown,
    write_table,
    write_text,
)
from helios.reports.figures import TOPICS, LedgerCurves, RunCurves
from helios.text import number_text, with_step

_UNSAID = "unknown"
# What Python names instead of a script for -c, for its prompt, and for standard input.
_NO_FILES = ("", "-", "-c")
_KERNELS = ("ipykernel_launcher.py", "colab_kernel_launcher.py", "ipython", "ipython3")


@dataclass
class RunReport:
    """The result of ``helios.ledger.report``.

    Attributes:
        folder: the folder of the run.
        document: what the report says, as Markdown with pictures.
        html: the whole HTML file, at most 2 MB.
        markdown: the Markdown file, with sentences in place of pictures.
        facts: what the report is made of, as plain values.
    """

    folder: Path
    document: Document
    html: str
    markdown: str
    facts: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as plain values, without the points of pictures."""
        return {"folder": str(self.folder), **self.facts}


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
    course = RunCurves.read(facts)
    document, html = write_fitting(partial(_make, course, checkpoints))
    table = _list_facts_of(course, checkpoints)
    return RunReport(facts.folder, document, html, write_markdown(document), table)


def _list_facts_of(
    course: RunCurves, checkpoints: Sequence[Mapping[str, Any]] | None
) -> dict[str, Any]:
    run, best = course.run, course.run.find_best()
    return {
        "name": run.name,
        "summary": dict(_summarize(course)),
        "missing": list(run.missing.values()),
        "curves": {
            topic: {title: curve.summarize() for title, curve in found.items()}
            for topic, found in course.list_curves().items()
        },
        "best": None if best is None else best.as_plain(),
        "starts": [{**each.start, "outcome": each.outcome} for each in run.attempts],
        "checkpoints": None if checkpoints is None else [dict(each) for each in checkpoints],
        "manifest": run.facts,
    }


def _make(
    course: RunCurves, checkpoints: Sequence[Mapping[str, Any]] | None, points: int
) -> Document:
    """Return the document, with at most so many points in each line of a chart."""
    run = course.run
    saved = show_saves(run) if checkpoints is None else show_checkpoints(checkpoints)
    sections = [
        Chapter("Summary", list(_show_summary(course))),
        *(Chapter(topic, list(course.show(topic, points))) for topic in TOPICS),
        Chapter("Lineage", list(show_lineage(run))),
        Chapter("Changes between starts", list(show_changes(run))),
        Chapter("Checkpoints", list(saved)),
        Chapter("Environment", list(show_environment(run))),
        Chapter("Options", list(show_options(run))),
    ]
    return Document(run.name, "Report of a training run", sections)


def _summarize(course: RunCurves) -> Iterator[tuple[str, str]]:
    run = course.run
    if course.curves is not None and course.status is not None:
        yield from _summarize_ledger(course.curves, course.status)
    if run.attempts:
        yield "Starts", f"{len(run.attempts)} (killed: {run.num_kills})"
        yield "Last start", run.attempts[-1].outcome
    yield "Training time", time_text(run) or _UNSAID
    yield "Command", command_text(run.facts) or _UNSAID
    yield "Level", str(run.facts.get("level", {}).get("text", _UNSAID))


def _show_summary(course: RunCurves) -> Iterator[Block]:
    status = course.status
    yield write_table(NO_HEAD, shorten_rows([*_summarize(course)]))
    for text in course.run.missing.values():
        yield write_text(text)
    if status is not None and not status.is_good:
        yield write_text("Lines of the ledger that are not good are missing in the charts.")


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


def find_libraries(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and versions of the packages that the run has imported."""
    libraries = facts.get("libraries", {})
    return [(name, libraries[name]) for name in facts.get("imported", ()) if name in libraries]


def command_text(facts: Mapping[str, Any]) -> str | None:
    """Return the command line; ``None`` if it is unknown, or the code was not in a file."""
    command = facts.get("command", {})
    script = str(command.get("script", ""))
    if "module" in command:
        words = ["-m", str(command["module"])]
    elif script in _NO_FILES or PurePath(script).name in _KERNELS:
        return None
    else:
        words = [script]
    return shlex.join([*_launch_words(facts), *words, *command.get("arguments", ())])


def _launch_words(facts: Mapping[str, Any]) -> list[str]:
    """Return what comes before the script."""
    command = facts.get("command", {})
    count = facts.get("processes", {}).get("number", 1)
    here = command.get("processes_here", count)
    if command.get("launcher") == "torchrun":
        machines = [] if here == count else [f"--nnodes={-(-count // here)}"]
        return ["torchrun", *machines, f"--nproc-per-node={here}"]
    prefix = ["srun", f"--ntasks={count}"] if "launcher" in command else []
    optimize = ["-" + "O" * command["optimize"]] if "optimize" in command else []
    return [*prefix, "python", *optimize]


def time_text(run: RunFacts) -> str | None:
    """Return the time of the training; ``None`` if it is unknown."""
    if not run.times.lines:
        return None
    text = duration_text(run.times.seconds)
    if run.num_kills:
        return f"{text}, with repeated iterations, without the last seconds before each kill"
    return text


def duration_text(seconds: float) -> str:
    """Return a time in hours, minutes and seconds.

    Example:
        >>> duration_text(3725.2)
        '1 h 2 min 5 s'
    """
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    parts = [f"{hours} h" if hours else "", f"{minutes} min" if hours or minutes else ""]
    return " ".join([*filter(None, parts), f"{rest} s"])


def show_lineage(run: RunFacts) -> Iterator[Block]:
    """Yield the starts of a run, and what else happened to it."""
    if not run.attempts:
        yield write_text("There is no lineage, so starts and kills are unknown.")
        return
    rows = []
    for attempt in run.attempts:
        start = attempt.start
        saves = sum(event["event"] == lineage.SAVE for event in attempt.events)
        rows.append(
            (
                _show_time(start),
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
        (_show_time(event), event["event"], str(event.get("checkpoint", "-")), _cause(event))
        for attempt in run.attempts
        for event in attempt.events
        if event["event"] not in known
    ]
    if events:
        head = ("time (UTC)", "event", "checkpoint", "cause")
        yield write_text("What else happened:")
        yield from _limit_rows(head, events, "lineage.jsonl has all")


def _show_time(event: Mapping[str, Any]) -> str:
    """Return the time of an event, which headings say is in UTC."""
    return str(event.get("time", "-")).removesuffix("+00:00").replace("T", " ")


def _cause(event: Mapping[str, Any]) -> str:
    known = ("time", "event", "checkpoint", "cause", "digest")
    rest = {name: value for name, value in event.items() if name not in known}
    return shorten(", ".join([str(event.get("cause", "")), *_list_facts(rest)]).strip(", "))


def show_changes(run: RunFacts) -> Iterator[Block]:
    """Yield what changed between each two starts, and what it may change."""
    if run.manifest is None:
        yield write_text("There is no manifest, so changes between starts are unknown.")
        return
    sections = run.manifest.sections
    rows = [
        (
            _show_time(after.start),
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
        yield write_text(
            f"run.json has {len(sections)} of {len(run.attempts)} starts. It is written some "
            "seconds after a start, so one that was killed before is not in it."
        )
    if len(sections) == len(run.attempts) == 1:
        yield write_text("The run was started once, so nothing has changed.")
    elif not rows:
        yield write_text("No changes are known.")
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
        yield write_text("The lineage names no checkpoint.")
        return
    rows = [(name, _show_time(event), event.get("digest", "-")) for name, event in saves.items()]
    yield from _limit_rows(("saved", "time (UTC)", "digest"), rows, "lineage.jsonl has all")


def show_checkpoints(checkpoints: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    """Yield the checkpoints that are still there; see :func:`helios.ledger.report`."""
    if not checkpoints:
        yield write_text("There is no checkpoint in the folder of the run.")
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
        yield write_text("There is no manifest, so the environment is unknown.")
        return
    rows = []
    for topic in ("versions", "system", "gpu", "environment", "switches", "git", "processes"):
        known = {name: x for name, x in facts.get(topic, {}).items() if name != "patch"}
        rows.append((topic, "; ".join(_list_facts(known)) or "none"))
    libraries = find_libraries(facts)
    rows.append(("imported packages", ", ".join(f"{name} {x}" for name, x in libraries)))
    code = [f"{name} {hashes['text']}" for name, hashes in facts.get("code", {}).items()]
    rows.append(("source files", ", ".join(code)))
    yield write_text("As at the newest start. run.json has all of it.")
    yield write_table(NO_HEAD, shorten_rows(rows, 4 * MOST_CHARACTERS))


def show_options(run: RunFacts) -> Iterator[Block]:
    """Yield the options of the newest start."""
    facts = run.facts
    if not facts:
        yield write_text("There is no manifest, so the options are unknown.")
        return
    rows = [
        (topic, "; ".join(_list_facts(facts[topic])))
        for topic in ("program", "seeds", "data", "parameters")
        if topic in facts
    ]
    rows += [(name, _plain(value)) for name, value in facts.get("options", {}).items()]
    yield write_table(NO_HEAD, shorten_rows(rows))


def _list_facts(table: Mapping[str, Any]) -> list[str]:
    return [f"{name} {_plain(value)}" for name, value in table.items()]


def _plain(value: Any) -> str:
    if value in ("", [], {}):
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _limit_rows(head: Sequence[str], rows: Sequence[Sequence[str]], where: str) -> Iterator[Block]:
    """Yield a table of the newest rows, and a sentence on those that are left out."""
    yield write_table(head, rows[-MOST_ROWS:])
    if len(rows) > MOST_ROWS:
        yield write_text(f"The first {len(rows) - MOST_ROWS:,} are left out; {where}.")
