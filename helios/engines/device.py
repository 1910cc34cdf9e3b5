"""Selects the device of a run, makes it the current one, and moves batches to it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from helios.core.utils import map_container
from helios.errors import ArgumentError, UsageError


def select_gpus(
    use_cpu: bool | None, gpus: list[int] | None, *, caller: str = "Trainer"
) -> list[int]:
    """Return the ids of the GPUs to use, or an empty list for the CPU.

    Args:
        use_cpu: True for the CPU; False to require a GPU; ``None`` for GPUs if there are any.
        gpus: the ids; ``None`` for all GPUs.
        caller: the function whose arguments these are, for messages.

    Raises:
        ArgumentError: if the arguments contradict each other, or an id does not exist.
        UsageError: if ``use_cpu=False`` and there is no GPU.
    """
    if use_cpu:
        if gpus is not None:
            raise ArgumentError(
                f"{caller}(gpus=...) must be None with use_cpu=True, got {gpus}. Omit one of them."
            )
        return []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus is None:
        if use_cpu is False and count == 0:
            raise UsageError(
                f"{caller}(use_cpu=False) must find a GPU, but CUDA is not available. "
                "Omit use_cpu to train on the available devices."
            )
        return list(range(count))
    is_list = isinstance(gpus, list) and all(type(gpu) is int for gpu in gpus)
    if not is_list or not gpus or len(set(gpus)) != len(gpus):
        raise ArgumentError(
            f"{caller}(gpus=...) must be a list of different GPU ids, got {gpus!r}. "
            "Pass e.g. gpus=[0], or use_cpu=True for the CPU."
        )
    missing = [gpu for gpu in gpus if not 0 <= gpu < count]
    if missing:
        raise ArgumentError(
            f"{caller}(gpus=...) must name GPUs of this machine (it has {count}), got {gpus}. "
            "Pass ids below that, or omit gpus to train on the available devices."
        )
    return list(gpus)


def device_of_rank(gpus: list[int], local_rank: int) -> torch.device:
    """Return the device of a process: its own GPU of those selected, or the CPU.

    Args:
        gpus: what :func:`select_gpus` returned.
        local_rank: number of the process on its machine, from 0.

    Raises:
        UsageError: if there are more processes than GPUs.
    """
    if not gpus:
        return torch.device("cpu")
    if len(gpus) == 1:  # Launchers may show each process only its own GPU.
        return torch.device("cuda", gpus[0])
    if local_rank >= len(gpus):
        raise UsageError(
            f"Process {local_rank} of this machine (from 0) has no GPU of its own: there are "
            f"{len(gpus)}, {gpus}. Start at most one process per GPU, or train on the CPU."
        )
    return torch.device("cuda", gpus[local_rank])


def as_current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is the current one, for code without a device number.

    Examples are ``torch.zeros(1, device="cuda")``, custom kernels, events and streams. The first
    GPU is the current one anyway, so CUDA is not started for it.
    """
    is_by_default = not device.index and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if device.type != "cuda" or device.index is None or is_by_default:
        return nullcontext()
    return torch.cuda.device(device)


def sync_to_device(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors, arrays and modules on a device; containers are copied.

    Descends into the same containers as :func:`move_to_device`, moves modules (in place, as torch
    does), and converts numeric NumPy arrays to tensors; a structured array becomes a dict by field.
    Other values, such as optimizers, are returned unchanged.
    """
    if isinstance(value, nn.Module):
        return value.to(device)
    if isinstance(value, np.ndarray):
        if value.dtype.names is not None:
            return {name: sync_to_device(value[name], device) for name in value.dtype.names}
        is_number = value.dtype.kind in "biufc"
        return torch.from_numpy(value.copy()).to(device) if is_number else value
    if isinstance(value, torch.Tensor | PackedSequence):
        return move_to_device(value, device)
    return map_container(value, lambda item: sync_to_device(item, device))


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device. The input is not changed.

    Descends into dicts, lists, tuples, named tuples and dataclasses and keeps their types. Other
    values are returned unchanged. Copies from pinned memory are asynchronous.
    """
    if isinstance(batch, torch.Tensor | PackedSequence):
        is_pinned = device.type != "cpu" and batch.is_pinned()
        moved: Any = batch  # PackedSequence's own annotation does not accept a device
        return moved.to(device=device, non_blocking=is_pinned)
    return map_container(batch, lambda item: move_to_device(item, device))
