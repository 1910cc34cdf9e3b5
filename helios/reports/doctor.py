"""What of a machine matters to reproducibility, and what is wrong with it.

Facts are those that the manifest of a run holds; most checks are pure functions of them.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from helios.storage import files
from helios.text import size_text

_SHARED = Path("/dev/shm")
_DRIVER = Path("/proc/driver/nvidia/version")
# No file of Helios can be older than this.
_EARLIEST = datetime(2026, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Examination:
    """What is known of a machine.

    Attributes:
        facts: by topic, as in the manifest of a run; besides ``switches``, ``blas``, ``folder``
            and ``shared_memory``; empty if PyTorch cannot be imported.
        findings: what is to be said of it, the most serious first.
    """

    facts: dict[str, Any]
    findings: list[Diagnosis]

    @property
    def exit_code(self) -> int:
        """0 if nothing is wrong, 1 if something is, 2 if Helios cannot be used."""
        return max((each.severity.exit_code for each in self.findings), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Return the examination as plain values."""
        findings = [each.as_dict() for each in self.findings]
        return {"is_good": self.exit_code == 0, "findings": findings, **self.facts}


def examine_machine(folder: Path) -> Examination:
    """Examine the machine, and a folder for runs.

    Args:
        folder: the folder of a run, or ``chkpt_root``; need not exist.
    """
    try:
        import torch

        from helios.ledger.environment import (
            describe_environment,
            describe_switches,
            describe_variables,
        )
    except (ImportError, OSError) as error:
        text = f"PyTorch or NumPy cannot be imported: {error}."
        remedy = "Install it for this Python, as pytorch.org says."
        return Examination({}, [Diagnosis("versions", Severity.UNUSABLE, text, remedy)])
    failure = _initialize_gpus()
    now = datetime.now(timezone.utc)
    place, found = examine_run_folder(folder.absolute(), now)
    shared = shutil.disk_usage(_SHARED).total if _SHARED.is_dir() else None
    facts = {
        **describe_environment(sys.modules),
        "environment": describe_variables(),
        "switches": describe_switches(),
        "blas": _find_blas(torch.__config__.show()),
        "shared_memory": shared,
        "folder": place,
    }
    findings = [
        *check_versions(facts["versions"]),
        *check_variables(facts["environment"], has_gpu=bool(facts["gpu"])),
        *check_cpu(facts["system"], facts["switches"]),
        *check_gpus(facts["gpu"], facts["switches"], has_driver=_DRIVER.is_file(), failure=failure),
        *check_shared_memory(shared),
        *check_clock(now),
        *found,
    ]
    findings.sort(key=lambda each: -each.severity.exit_code)
    return Examination(facts, findings)


def check_clock(now: datetime) -> Iterator[Diagnosis]:
    """Check that the clock is set.

    Args:
        now: the time of the system's clock.
    """
    if now < _EARLIEST:
        yield Diagnosis(
            "clock",
            Severity.WRONG,
            f"The clock says {now:%Y-%m-%d}, which cannot be.",
            "Set it, or start a time service: logs and lineages hold its times.",
        )


def _initialize_gpus() -> str:
    """Initialize the GPUs, without which nothing is known of them; returns why that failed."""
    import torch

    if not torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error).partition("\n")[0].rstrip(".")
    return ""


def _find_blas(build: str) -> str:
    """Return the library for linear algebra, from the text of PyTorch's build."""
    found = re.search(r"BLAS_INFO=(\w+)", build)
    return found.group(1) if found is not None else ""


class Severity(Enum):
    """What a finding means to a training; the most serious comes last."""

    NOTE = "note"
    WRONG = "wrong"
    UNUSABLE = "unusable"

    @property
    def exit_code(self) -> int:
        """The exit code of a command that has found nothing more serious."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Diagnosis:
    """One thing that was found.

    Attributes:
        topic: what it belongs to, such as ``"gpu"``.
        severity: how serious it is.
        text: what it is, in a sentence.
        remedy: what to do, in a sentence.
    """

    topic: str
    severity: Severity
    text: str
    remedy: str

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as plain values."""
        return {**vars(self), "severity": self.severity.value}


def _variable(severity: Severity, text: str, remedy: str) -> Diagnosis:
    return Diagnosis("environment", severity, text, remedy)


def _gpu(severity: Severity, text: str, remedy: str) -> Diagnosis:
    return Diagnosis("gpu", severity, text, remedy)


def _folder(severity: Severity, text: str, remedy: str) -> Diagnosis:
    return Diagnosis("folder", severity, text, remedy)


OLDEST_TORCH, NEWEST_TORCH = "2.6", "2.13"
"""The versions of PyTorch that the tests ran with: the oldest and the newest."""

_YES = frozenset(("1", "true", "yes", "on"))
_CUBLAS_VALUES = (":4096:8", ":16:8")
# Variables that change numbers whatever a script sets, each with what it does.
_FORCES_TF32 = {
    "NVIDIA_TF32_OVERRIDE": "matrix products and convolutions",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "matrix products",
}
_CHOOSES_KERNELS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def check_versions(versions: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Check whether the tests ran with this version of PyTorch.

    Args:
        versions: the topic ``versions`` of a manifest.
    """
    text = versions["torch"]
    try:
        release = Version(text).release[:2]
    except InvalidVersion:
        release = ()
    if release and release < Version(OLDEST_TORCH).release:
        yield Diagnosis(
            "versions",
            Severity.UNUSABLE,
            f"PyTorch {text} is older than {OLDEST_TORCH}, which Helios needs.",
            f'Install a newer one: pip install "torch>={OLDEST_TORCH}".',
        )
    elif not release or release > Version(NEWEST_TORCH).release:
        yield Diagnosis(
            "versions",
            Severity.WRONG,
            f"Helios was not tested with PyTorch {text}, but up to {NEWEST_TORCH}.",
            "Repeat a part of a run with `helios replay` before you rely on equal bits, or "
            f'install a tested version: pip install "torch=={NEWEST_TORCH}.*".',
        )


def check_variables(variables: Mapping[str, str], *, has_gpu: bool) -> Iterator[Diagnosis]:
    """Check the environment variables that change numbers.

    Args:
        variables: the topic ``environment`` of a manifest.
        has_gpu: whether there is a GPU.
    """
    for name, what in _FORCES_TF32.items():
        if has_gpu and _is_on(variables, name):
            yield _variable(
                Severity.WRONG,
                f"{name}={variables[name]} forces TF32 in {what}, whatever the script sets.",
                f"Unset {name}, and choose TF32 in the script if you want it.",
            )
    if _is_on(variables, "OMP_DYNAMIC"):
        yield _variable(
            Severity.WRONG,
            "OMP_DYNAMIC lets the number of threads change during a run, which changes bits.",
            "Unset OMP_DYNAMIC.",
        )
    workspace = variables.get("CUBLAS_WORKSPACE_CONFIG")
    if workspace is not None and workspace not in _CUBLAS_VALUES:
        yield _variable(
            Severity.WRONG,
            f"CUBLAS_WORKSPACE_CONFIG={workspace} does not make cuBLAS deterministic.",
            f"Set it to {' or '.join(_CUBLAS_VALUES)}, or unset it: Helios then sets it itself.",
        )
    yield from _note_variables(variables)


def _note_variables(variables: Mapping[str, str]) -> Iterator[Diagnosis]:
    for name in _CHOOSES_KERNELS:
        if name in variables:
            yield _variable(
                Severity.NOTE,
                f"{name}={variables[name]} chooses the kernels of the processor.",
                "Set it to the same value at each start of a run: other kernels give other bits.",
            )
    if variables.get("PYTHONHASHSEED", "random") == "random":
        yield _variable(
            Severity.NOTE,
            "PYTHONHASHSEED is not set, so sets of strings have another order at each start.",
            "Sort them where your code iterates over one, or set PYTHONHASHSEED=0.",
        )
    if "PYTHONOPTIMIZE" in variables:
        yield _variable(
            Severity.NOTE,
            f"PYTHONOPTIMIZE={variables['PYTHONOPTIMIZE']} removes the assertions of your code.",
            "Unset it, unless you mean it.",
        )


def _is_on(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "").lower() in _YES


_SHARED_BYTES = 1 << 29
# From compute capability 8.0 on, GPUs have TF32.
_FIRST_WITH_TF32 = 8
_BUILD = (
    "Install a build of PyTorch for CUDA that the driver supports, and check CUDA_VISIBLE_DEVICES "
    "and the output of nvidia-smi."
)


def check_cpu(system: Mapping[str, Any], switches: Mapping[str, Any]) -> Iterator[Diagnosis]:
    """Check the processor and the number of threads.

    Args:
        system: the topic ``system`` of a manifest.
        switches: the settings of PyTorch.
    """
    threads, cores = switches.get("threads", 1), system["cores"]
    if threads > cores:
        yield Diagnosis(
            "threads",
            Severity.WRONG,
            f"PyTorch uses {threads} threads, but this process may use {cores} cores: they wait "
            "for each other.",
            f"Set OMP_NUM_THREADS={cores}. A run keeps the number of its first start.",
        )
    flags = system.get("cpu_flags", "").split()
    if system["architecture"] == "x86_64" and flags and "avx2" not in flags:
        yield Diagnosis(
            "processor",
            Severity.NOTE,
            "The processor has no AVX2, which nearly all others have: runs have other bits here.",
            "Do not move a run between this machine and others.",
        )
    if switches.get("flush_denormal"):
        yield Diagnosis(
            "processor",
            Severity.NOTE,
            "Denormal numbers are flushed to zero from the start of the process.",
            "Find what sets it, such as a library compiled with -ffast-math: pip list.",
        )


def check_gpus(
    gpu: Mapping[str, Any], switches: Mapping[str, Any], *, has_driver: bool, failure: str
) -> Iterator[Diagnosis]:
    """Check the GPUs.

    Args:
        gpu: the topic ``gpu`` of a manifest; empty without GPUs.
        switches: the settings of PyTorch.
        has_driver: whether a driver for GPUs is loaded.
        failure: why PyTorch cannot use them; empty if it can, or if there is none.
    """
    if not gpu:
        if failure:
            yield _gpu(Severity.WRONG, f"PyTorch cannot use the GPU: {failure}.", _BUILD)
        elif has_driver:
            text = "There is a driver for GPUs, but PyTorch finds none, and trains on the CPU."
            yield _gpu(Severity.NOTE, text, f"If this is not meant: {_BUILD}")
        return
    kinds = sorted(set(gpu["devices"]))
    if len(kinds) > 1:
        yield _gpu(
            Severity.WRONG,
            f"The GPUs differ ({', '.join(kinds)}), and give different bits.",
            "Choose GPUs of one kind with CUDA_VISIBLE_DEVICES or Trainer(gpus=...).",
        )
    if len(gpu["devices"]) > 1 and "nccl" not in gpu and "hip" not in gpu:
        yield _gpu(
            Severity.WRONG,
            "PyTorch was built without NCCL, so processes with a GPU each cannot exchange tensors.",
            "Install a build of PyTorch with NCCL.",
        )
    if "cudnn" not in gpu:
        yield _gpu(
            Severity.NOTE,
            "There is no cuDNN: convolutions are slower, and have other bits than with it.",
            "Install a build of PyTorch with cuDNN.",
        )
    yield from _check_tf32(gpu, switches)


def _check_tf32(gpu: Mapping[str, Any], switches: Mapping[str, Any]) -> Iterator[Diagnosis]:
    if max(major for major, _ in gpu["capability"]) < _FIRST_WITH_TF32:
        return
    places = {"cudnn_tf32": "convolutions", "matmul_tf32": "matrix products"}
    used = [what for name, what in places.items() if switches.get(name)]
    if used:
        yield _gpu(
            Severity.NOTE,
            f"Unless the script changes it, {' and '.join(used)} in float32 use TF32, which older "
            "GPUs and the CPU do not have: bits and precision differ from theirs.",
            'For full precision, set torch.backends.cudnn.conv.fp32_precision = "ieee" and '
            'torch.backends.cuda.matmul.fp32_precision = "ieee".',
        )


def check_shared_memory(total: int | None) -> Iterator[Diagnosis]:
    """Check the memory through which loader workers send batches.

    Args:
        total: the bytes of ``/dev/shm``; ``None`` where the system has none.
    """
    if total is not None and total < _SHARED_BYTES:
        yield Diagnosis(
            "shared memory",
            Severity.WRONG,
            f"/dev/shm has {size_text(total)}, and loader workers send their batches through it: "
            "they may end with a bus error.",
            "Start the container with --shm-size=8g (Docker) or an emptyDir of medium Memory "
            "(Kubernetes), or use DataLoaderParams(num_workers=0).",
        )


_FREE_BYTES = 1 << 30
_MOST_SKEW_SECONDS = 5.0
_LOCKED = 3
_TRY_LOCK = f"""
import fcntl, sys
try:
    fcntl.lockf(open(sys.argv[1], "r+b"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit({_LOCKED})
"""
# What is gone when the machine or the container ends, and what ends it.
_FLEETING = {
    "tmpfs": "memory: a restart of the machine",
    "ramfs": "memory: a restart of the machine",
    "overlay": "the container: removing it",
}


def examine_run_folder(folder: Path, now: datetime) -> tuple[dict[str, Any], list[Diagnosis]]:
    """Try in a folder, or in the nearest one that exists, what a run does there.

    Everything happens in a new folder inside it, which is removed.

    Args:
        folder: the folder of a run, or ``chkpt_root``.
        now: the time of the system's clock.

    Returns:
        The folder, its file system and its free space, as plain values; what is to be said of it.
    """
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    kind = _find_file_system(place)
    free = shutil.disk_usage(place).free
    findings = [*_check_kind(place, kind), *_check_space(place, free)]
    try:
        with tempfile.TemporaryDirectory(prefix=".helios-doctor-", dir=place) as scratch:
            findings += _try_files(Path(scratch), place, now)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        findings.append(
            _folder(
                Severity.WRONG if is_full else Severity.UNUSABLE,
                f"Files in {place} cannot be written, synced and renamed: {error.strerror}.",
                "Make room." if is_full else "Check the permissions, or use another chkpt_root.",
            )
        )
    return {"path": str(folder), "file_system": kind, "free": free}, findings


def _find_file_system(place: Path) -> str:
    """Return the type of the file system that a folder is on; empty if unknown."""
    try:
        lines = [line.split() for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    except (OSError, ValueError):
        return ""
    path, kind = place.resolve(), ""
    longest = -1
    for _, mount, name, *_ in lines:
        point = Path(mount.replace("\\040", " "))
        # Of two mounts at one place, the later one hides the earlier one.
        if path.is_relative_to(point) and len(point.parts) >= longest:
            longest, kind = len(point.parts), name
    return kind


def _check_kind(place: Path, kind: str) -> Iterator[Diagnosis]:
    if kind in _FLEETING:
        what, _, end = _FLEETING[kind].partition(": ")
        yield _folder(
            Severity.NOTE,
            f"{place} is in {what} ({kind}): {end} deletes the checkpoints.",
            "Use a disk or a volume for chkpt_root if a run is to outlive that.",
        )


def _check_space(place: Path, free: int) -> Iterator[Diagnosis]:
    if free < _FREE_BYTES:
        yield _folder(
            Severity.WRONG,
            f"{place} has only {size_text(free)} free.",
            "Make room, or use another chkpt_root. A run warns if its checkpoints will not fit.",
        )


def _try_files(scratch: Path, place: Path, now: datetime) -> Iterator[Diagnosis]:
    for content in (b"old", b"new"):
        partial = scratch / "partial"
        with files.create(partial) as handle:
            files.write(handle, content)
            files.fsync(handle)
        files.replace(partial, scratch / "file")
        files.fsync_folder(scratch)
    if (scratch / "file").read_bytes() != b"new":
        yield _folder(
            Severity.UNUSABLE,
            f"In {place}, renaming a file does not replace the old one.",
            "Use another chkpt_root: checkpoints would not be complete after a kill.",
        )
    skew = (scratch / "file").stat().st_mtime - now.timestamp()
    if abs(skew) > _MOST_SKEW_SECONDS:
        yield Diagnosis(
            "clock",
            Severity.WRONG,
            f"The clock of the file system of {place} differs by {skew:.0f} s from this machine's.",
            "Synchronize both with a time server. Helios orders nothing by time, but times in "
            "logs and lineages will mislead you.",
        )
    yield from _try_lock(scratch / "file", place)


def _try_lock(path: Path, place: Path) -> Iterator[Diagnosis]:
    """Lock a file here, and try to lock it in another process, which must fail."""
    advice = "Never start a second run in the folder of one that is running."
    if sys.platform == "win32":
        yield _folder(Severity.NOTE, "Windows does not lock the folder of a run.", advice)
        return
    import fcntl

    with path.open("r+b") as handle:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            other = [sys.executable, "-I", "-S", "-c", _TRY_LOCK, os.fspath(path)]
            works = subprocess.run(other, check=False).returncode == _LOCKED
        except OSError:
            works = False
    if not works:
        yield _folder(
            Severity.WRONG,
            f"The file system of {place} does not lock files, so a second run in the same folder "
            "is not refused.",
            f"Mount it with locks (NFS: without nolock), or use another chkpt_root. {advice}",
        )
