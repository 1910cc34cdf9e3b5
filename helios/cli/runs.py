"""``helios diff``, ``replay``, ``report``, ``compare`` and ``send``: whole runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helios.checkpoint import file_names
from helios.cli import output
from helios.cli.output import Answer, Column, Command, argument
from helios.errors import (
    ArgumentError,
    DamagedCheckpointError,
    HeliosError,
    UsageError,
)
from helios.ledger.differences import Difference, LineComparison, diff
from helios.ledger.run_facts import find_run, read_run
from helios.storage import files
from helios.storage.local_paths import as_local_path
from helios.text import number_text, with_step

if TYPE_CHECKING:
    from helios.checkpoint.comparison import CheckpointDifference
    from helios.ledger.differences import Replay
    from helios.reports.run_comparison import RunComparison
    from helios.startup.trainer_call import ReplayRequest


_MOST_TENSORS = 20
_MOST_SHOWN = 20


def compare_two(namespace: argparse.Namespace) -> Answer:
    """Compare the ledgers of two runs line by line, and the scores where both have
    validated. Show the first iteration that differs, what differs in it and
    possible causes; what was not compared is named. Or compare the tensors of two
    checkpoints bit for bit.

    Exit code 0: both are equal. 1: they differ. 2: wrong usage, or one of them
    cannot be read.
    """
    paths = [as_local_path("RUN|FILE", each) for each in (namespace.first, namespace.second)]
    suffixes = (file_names.SUFFIX, file_names.FOLDER_SUFFIX)
    are_checkpoints = [path.suffix in suffixes for path in paths]
    if are_checkpoints[0] != are_checkpoints[1]:
        raise UsageError(
            f"A run cannot be compared with a checkpoint, got {paths[0]} and {paths[1]}. Pass two "
            "checkpoints, or the folders of two runs."
        )
    if all(are_checkpoints):
        tensors = _compare_checkpoints(paths)
        return _equal_or_not(_show_tensors(tensors), tensors)
    lines = diff(*paths)
    return _equal_or_not(_show_difference(lines), lines)


def _equal_or_not(lines: list[str], found: Difference | Replay | CheckpointDifference) -> Answer:
    return Answer(lines, found.as_dict, lambda: 0 if found.is_equal else 1)


def _compare_checkpoints(paths: list[Path]) -> CheckpointDifference:
    # Ledgers are compared without PyTorch.
    from helios.checkpoint.comparison import compare_checkpoints

    try:
        return compare_checkpoints(*(output.existing_checkpoint(str(path)) for path in paths))
    except DamagedCheckpointError as error:
        raise UsageError(str(error)) from error


def _show_tensors(found: CheckpointDifference) -> list[str]:
    if found.is_equal:
        return [f"equal: {found.num_tensors} tensors"]
    lines = [f"tensors that differ: {len(found.tensors)}, first {found.tensors[0].path}"]
    for each in found.tensors[:_MOST_TENSORS]:
        text = each.what
        if each.what == "values":
            text = f"{each.num_elements} of {each.size} elements"
            text += "" if each.max_ulp is None else f", by at most {each.max_ulp} ulp"
        lines.append(f"  {each.path}: {text}")
    rest = len(found.tensors) - _MOST_TENSORS
    return [*lines, f"  and {rest} more"] if rest > 0 else lines


def _show_difference(found: Difference) -> list[str]:
    lines = []
    if not found.has_same_definition:
        lines.append("The runs have different definitions: options, seed or data differ.")
    end = with_step(found.num_equal, found.steps.get("num_equal"))
    if found.is_equal:
        lines.append(f"equal: iterations {found.begins_after + 1} to {end}")
        return [*lines, *_show_comparison(found)]
    if found.iteration is None and found.lengths[0] == found.lengths[1]:
        text = "but only one of the runs has ended"
        lines.append(f"equal up to iteration {end}, {text}")
        return [*lines, *_show_comparison(found)]
    if found.iteration is None:
        first, second = found.lengths
        return [
            *lines,
            f"equal up to iteration {end}; one has {first} iterations, the other one {second}",
            *_show_comparison(found),
        ]
    lines += _show_first_difference(found)
    return [*lines, *_show_starts(found.starts)]


def _show_starts(differences: Mapping[str, Sequence[Any]]) -> list[str]:
    if not differences:
        return []
    lines = [
        f"  - {name}: {_show_value(one)} | {_show_value(other)}"
        for name, (one, other) in differences.items()
    ]
    return ["the newest starts of both runs differ in:", *lines]


def _show_comparison(found: LineComparison) -> list[str]:
    """Return which scores are equal, and what was not compared, as lines of text."""
    count = found.num_scored
    scored = [f"equal: the scores of {count} validation{'s' if count > 1 else ''}"] if count else []
    return [*scored, *found.not_compared]


def _show_first_difference(found: LineComparison) -> list[str]:
    """Return the first iteration that differs, in what, and possible causes, as lines of text."""
    begin = "they differ at the latest" if found.may_begin_earlier else "different"
    assert found.iteration is not None
    place = with_step(found.iteration, found.steps.get("iteration"))
    lines = [f"{begin} from iteration {place} on, first in: {found.what[0]}"]
    if found.what[1:]:
        lines.append(f"then in: {', '.join(found.what[1:])}")
    lines += [
        f"  {name}: {_show_value(one)} | {_show_value(other)}"
        for name, (one, other) in found.details.items()
    ]
    return [*lines, "possible causes:", *(f"  - {cause}" for cause in found.causes)]


def _show_value(value: Any) -> str:
    if isinstance(value, dict):
        shown = [f"{name} {number!r}" for name, number in islice(value.items(), _MOST_SHOWN)]
        rest = len(value) - len(shown)
        return ", ".join([*shown, f"and {rest} more"] if rest else shown)
    if isinstance(value, list):
        return ", ".join(map(repr, value))
    return "-" if value is None else str(value)


def replay_script(namespace: argparse.Namespace) -> Answer:
    """Run a training script up to its first call of fit. Instead of training, repeat a
    part of its run from a checkpoint, and compare each iteration with the ledger of
    the run, and the scores of its validations. Then end the script. Nothing is
    written into the folder of the run.

    Pass the arguments of the run after --, and -m for a module, as in

        helios replay train.py --start 500 --nproc 1 -- --rate 0.1
        helios replay -m package.train -- --rate 0.1

    Exit code 0: all iterations are equal. 1: one differs. 2: wrong usage, or the
    run cannot be repeated.
    """
    # Only this command needs what trains.
    from helios.startup.replay_range import ReplayOptions
    from helios.startup.trainer_call import ReplayRequest

    if (namespace.script is None) is (namespace.module is None):
        raise UsageError("Pass either the SCRIPT of the run or -m MODULE.")
    if namespace.module is None:
        if Path(namespace.script).is_dir():
            raise UsageError(
                f"{namespace.script} is a folder. Pass the SCRIPT that the run was started with."
            )
        name = str(output.existing_file(namespace.script))
        folder, start = Path(name).resolve().parent, runpy.run_path
    else:
        name = namespace.module
        folder, start = Path.cwd(), partial(runpy.run_module, alter_sys=True)
    request = ReplayRequest(
        ReplayOptions(namespace.start, namespace.stop, namespace.nproc, has_bars=True),
        namespace.save_name,
    )
    try:
        with request.waiting(), _stdout_on_stderr() if namespace.json else nullcontext():
            _run_script(start, name, folder, namespace.rest)
    except HeliosError as error:
        raise UsageError(str(error)) from error
    found = request.result
    if found is None or request.failure is not None:
        raise UsageError(str(request.failure or f"{name} {_describe_lack(request)}"))
    if request.rank != 0:
        return Answer((), None, lambda: 0 if found.is_equal else 1)
    return _equal_or_not(_show_replay(found), found)


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


def _run_script(start: Callable[..., Any], name: str, folder: Path, rest: Sequence[str]) -> None:
    """Run a script or a module as Python does.

    Args:
        start: runs it by name.
        name: the script or the module.
        folder: where it imports from first.
        rest: its arguments.

    Raises:
        UsageError: if it fails.
    """
    found = (sys.argv, sys.path[:])
    sys.argv = [name, *rest]
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


def _describe_lack(request: ReplayRequest) -> str:
    if request.save_name is None:
        return (
            "ended without a call of Trainer.fit. Pass the script of a training, and after -- the "
            "arguments that the run was started with."
        )
    skipped = ", ".join(request.skipped) or "none"
    return (
        f"has no call of fit for a model whose save_name is {request.save_name!r}; its calls were: "
        f"{skipped}. Correct --run."
    )


def _show_replay(found: Replay) -> list[str]:
    begin = "the beginning of the run" if found.checkpoint is None else found.checkpoint.name
    if found.is_equal:
        first, last = (
            found.begins_after + 1,
            with_step(found.num_equal, found.steps.get("num_equal")),
        )
        end = ", with the end of the run" if found.has_ended else ""
        equal = f"equal: iterations {first} to {last}{end}"
        return [f"replayed from {begin}", equal, *_show_comparison(found)]
    return [f"replayed from {begin}", *_show_first_difference(found)]


def write_report(namespace: argparse.Namespace) -> Answer:
    """Write an HTML page about a run: losses, scores with the best one marked,
    learning rates, throughput, starts, and what it ran with. The page needs no
    network, no script and no other file.

    The default file is report.html in the folder of the run; it is overwritten.

    Exit code 0: the file is written. 2: wrong usage, or the run has no files.
    """
    folder = _find_run(namespace.run_place)
    target = Path(folder, "report.html")
    if namespace.out is not None:
        target = as_local_path("FILE", namespace.out)
    if target.suffix not in (".html", ".htm"):
        raise ArgumentError(f"--out takes a file that ends in .html, got {target}.")
    with _needing_matplotlib(target):
        from helios.reports.run_report import report_run
    facts, page = report_run(read_run(folder))
    files.write_text_durably(target, page)
    return Answer([f"Wrote {target}."], lambda: {"path": str(target), **facts})


@contextlib.contextmanager
def _needing_matplotlib(target: Path) -> Iterator[None]:
    """Say how to install what is missing, or that there is no folder for a file."""
    if not target.parent.is_dir():
        raise ArgumentError(f"No such folder: {target.parent}.")
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "matplotlib"):
            raise
        raise UsageError(
            f"{error.name} is not installed: pip install 'helios-trainer[report]'"
        ) from error


def _find_run(place: str) -> Path:
    """Return the folder of a run, also of one whose checkpoint is named."""
    path = as_local_path("RUN", place)
    is_checkpoint = file_names.is_checkpoint(path) and path.exists()
    return find_run(path.parent if is_checkpoint else place)


def compare_results(namespace: argparse.Namespace) -> Answer:
    """List runs, the best one first: what differs between them, and the scores of each
    run's best validation. Below, mean and standard deviation of runs that differ in
    their seeds only.

    --plot draws their losses, scores, learning rates and throughput over each
    other; the end of the file's name says the format: .png, .svg or .pdf.

    Exit code 0: compared. 2: wrong usage, or a run has no files.
    """
    from helios.reports.run_comparison import compare_runs, plot_runs, read_runs

    runs = read_runs(namespace.folders)
    found = compare_runs(runs)
    lines = [*_show_rows(found), *_show_groups(found)]
    if namespace.plot is not None:
        target = as_local_path("FILE", namespace.plot)
        with _needing_matplotlib(target):
            plot_runs(runs, target)
        lines.append(f"Wrote {target}.")
    return Answer(lines, found.as_dict)


def _show_rows(found: RunComparison) -> Iterator[str]:
    names = (*found.settings, *found.scores)
    columns = [Column("run"), *(Column(name, is_right=True) for name in names)]
    texts = [
        [row.run, *row.settings.values(), *(_score_text(row.scores, x) for x in found.scores)]
        for row in found.rows
    ]
    yield from output.table(columns, texts)
    yield f"The scores are those of each run's {found.shown}."


def _show_groups(found: RunComparison) -> Iterator[str]:
    if not found.groups:
        return
    names = ("runs", *found.groups[0].settings, *found.scores)
    columns = [Column(name, is_right=True) for name in names]
    texts = [
        [
            str(len(group.runs)),
            *group.settings.values(),
            *(
                f"{number_text(group.means[x])} ± {number_text(group.deviations[x])}"
                if x in group.means
                else "-"
                for x in found.scores
            ),
        ]
        for group in found.groups
    ]
    yield from ["", "mean ± standard deviation over seeds:", *output.table(columns, texts)]


def _score_text(scores: Mapping[str, float], name: str) -> str:
    return number_text(scores[name]) if name in scores else "-"


_RUN = argument(
    "run_place", metavar="RUN", help="the folder of a run, its ledger, or a checkpoint in it"
)
_EITHER = {"metavar": "RUN|FILE", "help": "the folder of a run, its ledger, or a checkpoint"}

COMMANDS = {
    "diff": Command(
        compare_two,
        argument("first", **_EITHER),
        argument("second", **_EITHER),
    ),
    "replay": Command(
        replay_script,
        argument("script", metavar="SCRIPT", nargs="?", help="the script of the run"),
        argument(
            "-m",
            metavar="MODULE",
            dest="module",
            help="run a module instead of a script, as python -m does",
        ),
        argument(
            "--start",
            metavar="N",
            type=int,
            help="begin at the newest checkpoint at or before iteration N; 0: at the "
            "beginning (default: oldest)",
        ),
        argument(
            "--stop",
            metavar="N",
            type=int,
            help="the last iteration to compare (default: that of the ledger)",
        ),
        argument(
            "--run",
            metavar="NAME",
            dest="save_name",
            help="replay the call of fit for the model with this save_name, and skip calls "
            "before it",
        ),
        argument(
            "--nproc",
            metavar="K",
            type=int,
            help="number of processes, in place of the nproc of the script",
        ),
        usage="helios replay [-h] [--start N] [--stop N] [--run NAME] [--nproc K]\n"
        "                     [--json] (SCRIPT | -m MODULE) [-- ARGS ...]",
    ),
    "report": Command(
        write_report,
        _RUN,
        argument("--out", metavar="FILE", help="the file to write"),
    ),
    "compare": Command(
        compare_results,
        argument("folders", nargs="+", metavar="RUN", help="the folders of the runs"),
        argument("--plot", metavar="FILE", help="also draw their curves over each other"),
        # Versions of Python write several arguments of one name in different ways.
        usage="%(prog)s RUN RUN [RUN ...] [options]",
    ),
}
