"""The main function of a script in a process of its own, which costs no import of torch.

The process comes from the fork server of the ranks. Where a fresh interpreter is the point, because
of its hash seed, its command line or what it imports, a test starts a real one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from helios.distributed.collectives import TORCHRUN_VARIABLES
from tests.support.ranks import FORKSERVER, die_with_parent


def call(
    main: Callable[[], Any],
    *arguments: Any,
    folder: Path | None = None,
    timeout: float = 240,
    **changed: str,
) -> subprocess.CompletedProcess[str]:
    """Call the main function of a module as ``python script.py arguments`` in a folder would.

    Args:
        changed: variables of its environment.
    """
    line = [main.__code__.co_filename, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as place:
        outputs = [Path(place) / name for name in ("stdout", "stderr")]
        variables = {k: v for k, v in os.environ.items() if k not in TORCHRUN_VARIABLES} | changed
        method = multiprocessing.get_start_method(allow_none=True)
        target = partial(_serve, start_method=method, folder=folder or Path.cwd())
        process = FORKSERVER.Process(target=target, args=(main, line, variables, outputs))
        process.start()
        try:
            process.join(timeout)
            code = process.exitcode
        finally:
            process.kill()
            process.join()
            process.close()
        texts = [path.read_text() if path.exists() else "" for path in outputs]
    if code is None:
        raise subprocess.TimeoutExpired(line, timeout, *texts)
    return subprocess.CompletedProcess(line, code, *texts)


def run_as_python() -> None:
    """Do what ``python`` does with the words of the command line."""
    first, *words = sys.argv[1:]
    if first == "-c":
        sys.argv = ["-c", *words[1:]]
        exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *words]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


def _serve(
    main: Callable[[], Any],
    line: list[str],
    variables: dict[str, str],
    outputs: list[Path],
    *,
    start_method: str | None,
    folder: Path,
) -> None:
    die_with_parent()
    multiprocessing.set_start_method(start_method, force=True)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    torch.set_num_threads(1)
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    sys.argv = line
    try:
        main()
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
