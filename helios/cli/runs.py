"""``helios diff``, ``replay``, ``report`` and ``compare``: whole runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helios.checkpoint import file_names
from helios.cli import output
from helios.cli.output import Answer, value_text
from helios.errors import ArgumentError, HeliosError, UsageError
from helios.ledger.compare import Difference, LineComparison, diff
from helios.ledger.run_file import find_run, read_run
from helios.storage import files
from helios.storage.files import as_local_path
from helios.text import count_text, number_text

if TYPE_CHECKING:
    from helios.checkpoint.outline import CheckpointDifference
    from helios.ledger.compare import Replay
    from helios.reports.run_comparison import RunComparison

_OTHER_DEFINITION = "The runs have different definitions: options, seed or data differ."


def compare_two(namespace: argparse.Namespace) -> Answer:
    """Find the first difference between two runs or two checkpoints.

    The ledgers of two runs are compared line by line, and the scores where both
    have validated. Shows the first iteration that differs, its differences, and
    what was not compared. Tensors of two checkpoints are compared bit for bit.

    Exit code 0: both are equal. 1: they differ. 2: wrong usage, or one of them
    cannot be read.
    """
    paths = [as_local_path("RUN|FILE", each) for each in (namespace.first, namespace.second)]
    suffixes = (file_names.SUFFIX, file_names.FOLDER_SUFFIX)
    checkpoints = [path for path in paths if path.suffix in suffixes]
    if len(checkpoints) == 1:
        raise ArgumentError(
            "The arguments must be two runs or two checkpoints, got one of each: "
            f"{', '.join(map(str, paths))}. Pass the folders of both runs, or a checkpoint of both."
        )
    if checkpoints:
        return _compare_checkpoints(paths)
    found = diff(*paths)
    return _answer(_show_difference(found), found)


def _answer(lines: Iterable[str], found: Difference | Replay | CheckpointDifference) -> Answer:
    return Answer(lines, {**asdict(found), "is_equal": found.is_equal}, found.is_equal)


def _compare_checkpoints(paths: list[Path]) -> Answer:
    # Ledgers are compared without PyTorch.
    from helios.checkpoint.outline import compare_checkpoints

    found = compare_checkpoints(*paths)
    if found.is_equal:
        return _answer([f"equal: {found.num_tensors} tensors"], found)
    shown = [f"  {each}" for each in found.tensors[: output.MOST_SHOWN]]
    return _answer([f"tensors that differ: {len(found.tensors)}, such as", *shown], found)


def _show_difference(found: Difference) -> Iterator[str]:
    if not found.has_same_definition:
        yield _OTHER_DEFINITION
    if found.iteration is None:
        end = found.num_equal
        first, second = found.lengths
        if found.is_equal:
            yield f"equal: iterations {found.begins_after + 1} to {end}"
        elif first == second:
            yield f"equal up to iteration {end}, but only one of the runs has ended"
        else:
            yield f"equal up to iteration {end}; one has {first} iterations, the other one {second}"
        yield from _show_comparison(found)
        return
    yield from _show_first_difference(found)
    if found.starts:
        yield "the newest starts of both runs differ in:"
    yield from _show_pairs(found.starts)


def _show_comparison(found: LineComparison) -> Iterator[str]:
    """Yield which scores are equal, and what was not compared."""
    if found.num_scored:
        yield f"equal: the scores of {count_text(found.num_scored, 'validation')}"
    yield from found.not_compared


def _show_first_difference(found: LineComparison) -> Iterator[str]:
    """Yield the first iteration that differs, and in what."""
    begin = "they differ at the latest" if found.may_begin_earlier else "different"
    yield f"{begin} from iteration {found.iteration} on, first in: {found.what[0]}"
    if found.what[1:]:
        yield f"then in: {', '.join(found.what[1:])}"
    yield from _show_pairs(found.details)


def _show_pairs(pairs: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    for name, (one, other) in pairs.items():
        yield f"  {name}: {value_text(one)} | {value_text(other)}"


def replay_script(namespace: argparse.Namespace) -> Answer:
    """Repeat a part of a run, and compare it with its ledger.

    Runs a training script up to its first call of fit. Instead of training, repeats
    a part of its run from a checkpoint, and compares each iteration with the ledger
    of the run, and the scores of its validations. Then ends the script. Nothing is
    written to the folder of the run.

    Pass the arguments of the run after --, and -m for a module, as in

        helios replay train.py --start 500 --nproc 1 -- --rate 0.1
        helios replay -m package.train -- --rate 0.1

    Exit code 0: all iterations are equal. 1: one differs. 2: wrong usage, or the
    run cannot be repeated.
    """
    # Only this command needs what trains.
    from helios.start.replay import ReplayOptions, ReplayRequest

    options = ReplayOptions(namespace.start, namespace.stop, namespace.nproc, has_bars=True)
    request = ReplayRequest(options, namespace.save_name)
    try:
        with request.waiting(), _stdout_on_stderr():
            name = _run_script(namespace)
    except HeliosError as error:
        raise UsageError(str(error)) from error
    found = request.result
    if found is None or request.failure is not None:
        lack = (
            f"{name} ended without the call of Trainer.fit to replay, after these calls: "
            f"{', '.join(request.skipped) or 'none'}. Check --run and the arguments after --."
        )
        raise UsageError(str(request.failure or lack))
    return _answer(_show_replay(found), found) if request.rank == 0 else Answer((), None)


def _show_replay(found: Replay) -> Iterator[str]:
    yield f"replayed from {found.checkpoint.name if found.checkpoint else 'the first iteration'}"
    if not found.has_same_definition:
        yield _OTHER_DEFINITION
    if found.is_equal:
        end = ", with the end of the run" if found.has_ended else ""
        yield f"equal: iterations {found.begins_after + 1} to {found.num_equal}{end}"
        yield from _show_comparison(found)
    else:
        yield from _show_first_difference(found)


@contextlib.contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Send what the script and its processes print to standard error, for a block."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _run_script(namespace: argparse.Namespace) -> str:
    """Run the script or the module as Python does, and return its name.

    Raises:
        UsageError: if it fails.
    """
    start: Callable[..., Any] = runpy.run_path
    name, folder = str(namespace.script), Path(str(namespace.script)).resolve().parent
    if namespace.module is not None:
        name, folder = str(namespace.module), Path.cwd()
        start = partial(runpy.run_module, alter_sys=True)
    elif namespace.script is None or not Path(name).is_file():
        raise UsageError(
            f"Pass the SCRIPT that the run was started with, or -m MODULE, got {namespace.script}."
        )
    found = (sys.argv, sys.path[:])
    sys.argv = [name, *namespace.rest]
    sys.path.insert(0, str(folder))
    try:
        start(name, run_name="__main__")
    except SystemExit as end:
        # How most scripts end; whether there is a result is seen then.
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except HeliosError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise UsageError(f"{name} failed with {type(error).__name__}: {error}") from error
    finally:
        sys.argv, sys.path[:] = found
    return name


def write_report(namespace: argparse.Namespace) -> Answer:
    """Write an HTML page about a run.

    It shows losses, scores with the best one marked, learning rates, starts and
    settings. The page needs no network, no script and no other file.

    Exit code 0: the file is written. 2: wrong usage, or the run has no files.
    """
    from helios.reports.run_report import report_run

    path = as_local_path("RUN", namespace.path)
    folder = find_run(path.parent if file_names.is_checkpoint(path) else path)
    target = as_local_path("FILE", namespace.out or folder / "report.html")
    if not target.parent.is_dir():
        raise UsageError(f"No such folder: {target.parent}. Create it, or pass another FILE.")
    facts, page = report_run(read_run(folder))
    files.write_text_durably(target, page)
    return Answer([f"Wrote {target}."], {"path": str(target), **facts})


def compare_results(namespace: argparse.Namespace) -> Answer:
    """List runs, or all runs in a folder: their differences and scores.

    If one rule says which validation is the best, the scores are those of each
    run's best validation, and the best run is the first. Below are mean and
    standard deviation of runs that differ in their seeds only.

    Exit code 0: compared. 2: wrong usage, or a run has no files.
    """
    from helios.reports.run_comparison import compare_runs, plot_runs, read_runs

    runs = read_runs(namespace.folders)
    found = compare_runs(runs)
    lines = list(_show_runs(found))
    if namespace.plot is not None:
        target = as_local_path("FILE", namespace.plot)
        plot_runs(runs, target)
        lines.append(f"Wrote {target}.")
    return Answer(lines, asdict(found))


def _show_runs(found: RunComparison) -> Iterator[str]:
    columns = {"run": "<", **dict.fromkeys((*found.settings, *found.scores), ">")}
    yield from output.table(
        columns,
        [
            [row.run, *row.settings.values(), *_cells(found.scores, row.scores)]
            for row in found.rows
        ],
    )
    yield f"The scores are those of each run's {found.shown}."
    if found.groups:
        columns = dict.fromkeys(("runs", *found.groups[0].settings, *found.scores), ">")
        rows = [
            [str(len(x.runs)), *x.settings.values(), *_cells(found.scores, x.means, x.deviations)]
            for x in found.groups
        ]
        yield from ["", "mean ± standard deviation over seeds:", *output.table(columns, rows)]


def _cells(names: Sequence[str], *tables: Mapping[str, float]) -> list[str]:
    """Return the texts of scores: of each name the numbers in all tables."""
    return [
        " ± ".join(number_text(table[name]) for table in tables if name in table) or "-"
        for name in names
    ]


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the parsers of the commands."""
    two = add("diff", compare_two)
    two.add_argument("first", metavar="RUN|FILE", help="the folder of a run, or a checkpoint")
    two.add_argument("second", metavar="RUN|FILE", help="the other one")
    replay = add("replay", replay_script, "helios replay [options] (SCRIPT | -m MODULE) [-- ARGS]")
    replay.add_argument("script", metavar="SCRIPT", nargs="?", help="the script of the run")
    replay.add_argument("-m", metavar="MODULE", dest="module", help="run a module, as python -m")
    replay.add_argument("--start", metavar="N", type=int, help="from the checkpoint at or before N")
    replay.add_argument("--stop", metavar="N", type=int, help="the last iteration to compare")
    replay.add_argument("--run", metavar="NAME", dest="save_name", help="the save_name to replay")
    replay.add_argument("--nproc", metavar="K", type=int, help="the number of processes")
    report = add("report", write_report)
    report.add_argument("path", metavar="RUN", help="the folder of a run, or a checkpoint in it")
    report.add_argument("--out", metavar="FILE", help="instead of report.html in the folder")
    compare = add("compare", compare_results, "helios compare RUN [RUN ...] [options]")
    compare.add_argument(
        "folders", nargs="+", metavar="RUN", help="the folder of a run, or one of several"
    )
    compare.add_argument("--plot", metavar="FILE", help="draw their curves: .png, .svg or .pdf")
