"""What a test may not leave behind: a snapshot of the process, and how two of them differ.

Reading a snapshot costs about a tenth of a millisecond, so it is taken around every test.
Threads and processes may need a moment to end; only where some are left over is that waited for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Hashable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import torch

_GRACE_SECONDS = 30.0
_PAUSE_SECONDS = 0.005
# Set by pytest itself, and by libraries when they are imported for the first time.
_FREE_VARIABLES = ("PYTEST_", "KMP_", "COVERAGE_", "TF_", "TF2_", "TORCHINDUCTOR_")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TASKS = Path("/proc/self/task")


def _environment() -> Hashable:
    return frozenset(v for v in os.environ.items() if not v[0].startswith(_FREE_VARIABLES))


def _threads() -> Hashable:
    return frozenset(thread for thread in threading.enumerate() if thread.name != "TMonitor")


def _child_processes() -> Hashable:
    """The children that the kernel knows; multiprocessing's own servers live on by design."""
    if not _TASKS.is_dir():
        return frozenset()
    servers = (
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(forkserver._forkserver, "_forkserver_pid", None),
    )
    texts = []
    with os.scandir(_TASKS) as tasks:
        for task in tasks:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                texts.append(Path(f"{task.path}/children").read_text())
    return frozenset({int(pid) for text in texts for pid in text.split()}.difference(servers))


def _process_group() -> Hashable:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _torch_settings() -> Hashable:
    return (
        ("num_threads", torch.get_num_threads()),
        ("default_dtype", torch.get_default_dtype()),
        ("grad_enabled", torch.is_grad_enabled()),
        ("inference_mode", torch.is_inference_mode_enabled()),
        ("deterministic", torch.are_deterministic_algorithms_enabled()),
        ("warn_only", torch.is_deterministic_algorithms_warn_only_enabled()),
        ("cudnn.benchmark", torch.backends.cudnn.benchmark),
        ("cudnn.deterministic", torch.backends.cudnn.deterministic),
        ("matmul_precision", torch.get_float32_matmul_precision()),
    )


def _loggers() -> Hashable:
    logger = logging.getLogger("helios")
    return (
        ("handlers", tuple(logger.handlers)),
        ("level", logger.level),
        ("propagate", logger.propagate),
        ("disabled", logger.disabled),
        ("warnings captured", getattr(logging, "_warnings_showwarning", None) is not None),
    )


def _signal_handlers() -> Hashable:
    return tuple((number.name, signal.getsignal(number)) for number in _SIGNALS)


def _folder() -> Hashable:
    return str(Path.cwd())


_PARTS: dict[str, Callable[[], Hashable]] = {
    "environment variables": _environment,
    "threads": _threads,
    "child processes": _child_processes,
    "process group": _process_group,
    "torch settings": _torch_settings,
    "loggers": _loggers,
    "signal handlers": _signal_handlers,
    "working folder": _folder,
}
_SLOW_TO_END = ("threads", "child processes")


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of the process in which a test runs."""

    parts: dict[str, Any]

    def leaks(self) -> list[str]:
        """Name everything that is other now than in this snapshot.

        Threads and child processes that are merely gone are no leak.
        """
        found = [self._describe(name, read()) for name, read in _PARTS.items()]
        return [text for text in found if text]

    def _describe(self, name: str, now: Any) -> str:
        before = self.parts[name]
        if now == before:
            return ""
        if name in _SLOW_TO_END:
            left = _wait_for_end(name, before)
            return f"{name} left over: {sorted(map(str, left))}" if left else ""
        if isinstance(now, (frozenset, tuple)):
            changed = sorted(map(str, frozenset(before) ^ frozenset(now)))
            return f"{name} changed: {changed}"
        return f"{name} changed: {before!r} -> {now!r}"


def take_snapshot() -> Snapshot:
    """Read what a test may not change."""
    return Snapshot({name: read() for name, read in _PARTS.items()})


def _wait_for_end(name: str, before: Any) -> frozenset[Any]:
    """Return what is still there after garbage was collected and a grace time has passed."""
    gc.collect()
    deadline = time.monotonic() + _GRACE_SECONDS
    pause = threading.Event()
    while (left := frozenset(_PARTS[name]()) - before) and time.monotonic() < deadline:
        pause.wait(_PAUSE_SECONDS)
    return left


def forget_interruptions() -> None:
    """Let calls begin that an interruption of an earlier test would end at once."""
    if policy := sys.modules.get("helios.start.signals"):
        policy.Interruptions.found.clear()


def reset_generators() -> None:
    """Begin every test on the same random numbers, and without the package's NumPy generator."""
    # The numbers of seed 0; every start without random_seed would name a seed below 2**32.
    torch.default_generator.manual_seed(1 << 40)
    random.seed(0)
    np.random.seed(0)
    if rng := sys.modules.get("helios.core.rng"):
        rng._Default.numpy = None
