"""What a process runs on: versions, installed packages, processor, GPUs, environment variables.

Everything is a plain value, and what is unknown is left out.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import deterministic

from helios.ledger.scrubbing import scrub
from helios.ledger.source_files import hash_package
from helios.version import __version__

# Variables that may change the bits of arithmetic, or the order of what a program does.
_PREFIXES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "VECLIB_", "ONEDNN_", "DNNL_"),
    *("ATEN_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "CUDA_", "CUBLAS_", "CUDNN_"),
    *("NVIDIA_TF32", "NUMEXPR_"),
)
_NAMES = ("PYTHONHASHSEED", "PYTHONOPTIMIZE", "LD_PRELOAD", "NCCL_ALGO", "NCCL_PROTO")
_ADDRESSES = re.compile(r"_(?:ADDR|HOST|HOSTID|PORT|DIR|PATH|HOME|FILE|KEY|TOKEN|ID|IFNAME)$")
_FLAGS = re.compile(r"(?:avx|amx|fma|f16c|sse4|bmi|asimd|sve|bf16|fphp)\w*")
_DRIVER = Path("/proc/driver/nvidia/version")
_DISTRIBUTION = re.compile(r"(.+?)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info")


def describe_environment(modules: Mapping[str, Any]) -> dict[str, Any]:
    """Return by topic what can be read without a training, and stays as it is meanwhile.

    Args:
        modules: the imported modules by name.
    """
    folders = tuple(sys.path)
    return {
        "versions": _describe_versions(),
        "libraries": find_distributions(folders),
        "imported": find_imported(folders, modules),
        "system": _describe_system(),
        "gpu": _describe_gpus(),
    }


def describe_switches() -> dict[str, Any]:
    """Return the settings of PyTorch that change bits, as this thread has them now.

    PyTorch refuses to read a setting by its old name once the new one was used: then it is left
    out, and the new one is there.
    """
    found = {}
    for name, read in _SWITCHES.items():
        with contextlib.suppress(RuntimeError, AttributeError):
            found[name] = read()
    return found


_SWITCHES: Mapping[str, Callable[[], Any]] = {
    "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "fill_uninitialized_memory": lambda: bool(deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
    "cudnn_deterministic": lambda: torch.backends.cudnn.deterministic,
    "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "matmul_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "fp32_precision": lambda: torch.backends.fp32_precision,  # type: ignore[attr-defined]
    "matmul_fp32_precision": lambda: torch.backends.cuda.matmul.fp32_precision,
    "cudnn_conv_fp32_precision": lambda: torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
    "cudnn_rnn_fp32_precision": lambda: torch.backends.cudnn.rnn.fp32_precision,  # type: ignore[attr-defined]
    "onednn_matmul_fp32_precision": lambda: torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
    "fp16_reduced_precision": lambda: bool(
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "bf16_reduced_precision": lambda: bool(
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "matmul_precision": torch.get_float32_matmul_precision,
    "onednn": lambda: bool(torch.backends.mkldnn.enabled),
    "flush_denormal": lambda: bool(
        (torch.tensor(1e-40, dtype=torch.float32, device="cpu") * 1.0).item() == 0.0
    ),
    "default_dtype": lambda: str(torch.get_default_dtype()),
    "threads": torch.get_num_threads,
    "interop_threads": torch.get_num_interop_threads,
}


def _describe_versions() -> dict[str, str]:
    build = torch.__config__.show()
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "python_build": f"{platform.python_implementation()} {platform.python_version()}",
        "helios": __version__,
        "helios_files": hash_package(),
        "torch": str(torch.__version__),
        "torch_build": hashlib.sha256(build.encode()).hexdigest()[:16],
        "numpy": np.__version__,
    }


def find_distributions(folders: tuple[str, ...]) -> dict[str, str]:
    """Return the version of each installed distribution, by its normalized name.

    Args:
        folders: where they are; the first one of a name counts.
    """
    found: dict[str, str] = {}
    for match, _ in _find_distributions(folders):
        found.setdefault(_normalize(match[1]), match[2])
    return dict(sorted(found.items()))


def _find_distributions(folders: tuple[str, ...]) -> Iterator[tuple[re.Match[str], Path]]:
    for folder in folders:
        yield from _list_distributions(Path(folder).absolute())


# By folder, because scripts add folders of their own to sys.path.
@functools.lru_cache(maxsize=64)
def _list_distributions(folder: Path) -> list[tuple[re.Match[str], Path]]:
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    matches = ((_DISTRIBUTION.fullmatch(path.name), path) for path in paths)
    return [(match, path) for match, path in matches if match is not None]


def find_imported(folders: tuple[str, ...], modules: Iterable[str]) -> list[str]:
    """Return the normalized names of the distributions that some modules belong to."""
    present = _find_packages(tuple(modules))
    owners: dict[str, frozenset[str]] = {}
    for match, path in _find_distributions(folders):
        owners.setdefault(_normalize(match[1]), _find_modules(path))
    return sorted(name for name, modules in owners.items() if not present.isdisjoint(modules))


# Thousands of names, which stay from start to start.
@functools.lru_cache(maxsize=1)
def _find_packages(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name.partition(".")[0] for name in names)


@functools.cache
def _find_modules(info: Path) -> frozenset[str]:
    """Return the top-level modules of a distribution."""
    return frozenset(_read_modules(info))


def _read_modules(info: Path) -> Iterator[str]:
    try:
        yield from (info / "top_level.txt").read_text().split()
    except OSError:
        with contextlib.suppress(OSError):
            for line in (info / "RECORD").read_text().splitlines():
                yield line.partition(",")[0].partition("/")[0].partition(".")[0]


@functools.lru_cache(maxsize=4096)
def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _describe_system() -> dict[str, Any]:
    found: dict[str, Any] = {
        "os": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
    }
    facts = _read_processor()
    if "model name" in facts:
        found["cpu"] = facts["model name"]
    flags = facts.get("flags", facts.get("Features", ""))
    if flags:
        found["cpu_flags"] = " ".join(sorted(set(_FLAGS.findall(flags))))
    return found


@functools.cache
def _read_processor() -> dict[str, str]:
    """Return what the system says of the first processor; empty if it says nothing."""
    try:
        text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _describe_gpus() -> dict[str, Any]:
    """Return the GPUs and what drives them; empty if this process uses none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    count = torch.cuda.device_count()
    found: dict[str, Any] = {
        "devices": [torch.cuda.get_device_name(index) for index in range(count)],
        "capability": [list(torch.cuda.get_device_capability(index)) for index in range(count)],
        **dict(_find_gpu_versions()),
    }
    return found


def _find_gpu_versions() -> Iterator[tuple[str, str]]:
    if torch.version.cuda is not None:
        yield "cuda", str(torch.version.cuda)
    if torch.version.hip is not None:
        yield "hip", str(torch.version.hip)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if cudnn is not None:
        yield "cudnn", str(cudnn)
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        yield "nccl", ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    with contextlib.suppress(OSError):
        yield "driver", driver_version(_DRIVER.read_text())


def driver_version(text: str) -> str:
    """Return the number in what NVIDIA's driver says of itself; its first line without one."""
    number = re.search(r"\b\d+\.\d+(\.\d+)*\b", text)
    return number[0] if number else text.strip().partition("\n")[0]


def describe_variables() -> dict[str, str]:
    """Return the environment variables that may change numbers, as they are now."""
    return {
        name: scrub(value)
        for name, value in sorted(os.environ.items())
        if name in _NAMES or (name.startswith(_PREFIXES) and not _ADDRESSES.search(name))
    }
