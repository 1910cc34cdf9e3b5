"""``helios replay``: whether a script repeats a part of its run bit for bit."""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from helios.cli import output
from helios.core.text import with_step
from helios.errors import HeliosError, UsageError
from helios.ledger.replaying import Replay
from helios.startup.launching.replay_request import ReplayRequest
from helios.startup.options.replay_options import ReplayOptions

DESCRIPTION = """\
Run a training script up to its first call of fit. Instead of training, repeat a
part of its run from a checkpoint, and compare each iteration with the ledger of
the run, and the scores of its validations. Then end the script. Nothing is
written into the folder of the run.

Pass the arguments of the run after --, and -m for a module, as in

    helios replay train.py --start 500 --nproc 1 -- --rate 0.1
    helios replay -m package.train -- --rate 0.1

Exit code 0: all iterations are equal. 1: one differs. 2: wrong usage, or the
run cannot be repeated.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.usage = (
        "helios replay [-h] [--start N] [--stop N] [--run NAME] [--nproc K]\n"
        "                     [--json] (SCRIPT | -m MODULE) [-- ARGS ...]"
    )
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="the script of the run")
    text = "run a module instead of a script, as python -m does"
    parser.add_argument("-m", metavar="MODULE", dest="module", help=text)
    text = "begin at the newest checkpoint at or before iteration N; 0: at the beginning"
    parser.add_argument("--start", metavar="N", type=int, help=f"{text} (default: oldest)")
    text = "the last iteration to compare (default: that of the ledger)"
    parser.add_argument("--stop", metavar="N", type=int, help=text)
    text = "replay the call of fit for the model with this save_name, and skip calls before it"
    parser.add_argument("--run", metavar="NAME", dest="save_name", help=text)
    text = "number of processes, in place of the nproc of the script"
    parser.add_argument("--nproc", metavar="K", type=int, help=text)
    output.add_json_option(parser)


def run(namespace: argparse.Namespace) -> int:
    """Replay; 0 if all iterations are equal, 1 if one differs.

    Raises:
        UsageError: if nothing could be compared.
    """
    if (namespace.script is None) is (namespace.module is None):
        raise UsageError("Pass either the SCRIPT of the run or -m MODULE.")
    if namespace.module is None:
        name = str(output.existing_file(namespace.script))
        folder, start = Path(name).resolve().parent, runpy.run_path
    else:
        name = namespace.module
        folder, start = Path.cwd(), partial(runpy.run_module, alter_sys=True)
    request = ReplayRequest(
        ReplayOptions(namespace.start, namespace.stop, namespace.nproc), namespace.save_name
    )
    try:
        with request.waiting(), _stdout_on_stderr() if namespace.json else nullcontext():
            _run(start, name, folder, namespace.rest)
    except HeliosError as error:
        raise UsageError(str(error)) from error
    found = request.result
    if found is None or request.failure is not None:
        raise UsageError(str(request.failure or f"{name} {_describe_lack(request)}"))
    if request.rank == 0:
        if namespace.json:
            output.print_json(found.as_dict())
        else:
            output.print_lines(*_lines(found))
    return 0 if found.is_equal else 1


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


def _run(start: Callable[..., Any], name: str, folder: Path, rest: Sequence[str]) -> None:
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


def _lines(found: Replay) -> list[str]:
    begin = "the beginning of the run" if found.checkpoint is None else found.checkpoint.name
    if found.is_equal:
        first, last = (
            found.begins_after + 1,
            with_step(found.num_equal, found.steps.get("num_equal")),
        )
        end = ", with the end of the run" if found.has_ended else ""
        equal = f"equal: iterations {first} to {last}{end}"
        return [f"replayed from {begin}", equal, *output.comparison_lines(found)]
    return [f"replayed from {begin}", *output.difference_lines(found)]
