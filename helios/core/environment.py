"""Versions, devices, settings and code that results depend on besides the run's definition."""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from helios.version import __version__

_GIT_SECONDS = 2.0


def get_env_info_str() -> str:
    """Return a banner with the versions, devices and settings that a run's bits may depend on."""
    facts = describe_process()
    width = max(map(len, facts))
    lines = [f"  {name:<{width}}  {value}" for name, value in facts.items()]
    rule = "=" * max(map(len, lines))
    return "\n".join([rule, *lines, rule])


def describe_process() -> dict[str, str]:
    """Return the settings that affect results in this process, by name."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return {"helios": __version__, "system": platform.platform(), **describe_machine(device)}


def describe_machine(device: torch.device) -> dict[str, str]:
    """Return the settings that affect arithmetic on a device, as this thread has them now."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": _name_processor(),
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
    }
    if device.type == "cuda":
        found |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda or torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "matmul_precision": torch.backends.cuda.matmul.fp32_precision,
            "cudnn_precision": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        }
    return {name: str(value) for name, value in found.items()}


@functools.cache
def _name_processor() -> str:
    """Return the model of the processor and the kernels that PyTorch uses on it."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        pairs = (line.partition(":") for line in info.read_text().splitlines())
        name = next((x.strip() for key, _, x in pairs if key.strip() == "model name"), name)
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


@functools.cache
def describe_git() -> dict[str, Any]:
    """Return the commit of the script's repository, and whether files that it tracks differ.

    Empty without a repository, without git, or if git does not answer in time.
    """
    main = sys.modules.get("__main__")
    script = vars(main).get("__file__") if isinstance(main, ModuleType) else None
    folder = Path.cwd() if script is None else Path(script).absolute().parent
    git = shutil.which("git")
    if git is None:
        return {}
    # No file is locked, and no program runs that a repository configures.
    options = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=")
    command = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        found = subprocess.check_output(
            [git, "-C", str(folder), *options, *command],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_GIT_SECONDS,
            text=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    commit, dirty, _ = found.strip().partition("-dirty")
    return {"commit": commit, "is_dirty": bool(dirty)}
