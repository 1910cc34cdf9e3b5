"""Processor, threads, GPUs and shared memory: pure functions of what was read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from helios.core.text import size_text
from helios.doctor.diagnosis import Diagnosis, Severity

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


def _gpu(severity: Severity, text: str, remedy: str) -> Diagnosis:
    return Diagnosis("gpu", severity, text, remedy)


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
