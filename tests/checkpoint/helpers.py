"""Checkpoints to save and load in tests, and a comparison to the bit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from helios.checkpoint import file_names
from helios.checkpoint.store import PendingCheckpoint, RunFolder, Sidecar


def make_payload(epoch: int, iteration: int, **model: Any) -> dict[str, Any]:
    """Return a small payload; tensors depend on the iteration."""
    return {
        "schema": file_names.SCHEMA,
        "version": "3.0.0",
        "training_state": {"global_epoch": epoch, "global_iteration": iteration},
        "cursor": {"epoch": epoch - 1, "batch": iteration},
        "model": {"weight": torch.arange(50.0) * iteration, "seen": {iteration}, **model},
        "rng": {"torch": torch.full((16,), iteration % 251, dtype=torch.uint8)},
        "num_replicas": 1,
    }


def make_sidecar(epoch: int, iteration: int, **changes: Any) -> Sidecar:
    """Return the sidecar that belongs to :func:`make_payload`."""
    return Sidecar(
        **{
            "run_name": "run",
            "num_replicas": 1,
            "epoch": epoch,
            "iteration": iteration,
            "metrics": {"loss": 1 / (1 + iteration)},
            "level": "restart",
            **changes,
        }
    )


def save_payload(
    folder: RunFolder,
    payload: dict[str, Any],
    *,
    stem: str,
    sidecar: Sidecar,
    safe_types: Iterable[Any] = (),
) -> Path:
    """Save a payload as a run does that waits for the disk."""
    pending = PendingCheckpoint(folder.path_of(stem), payload, sidecar, safe_types)
    pending.encode()
    folder.commit(pending)
    return pending.path


def save(folder: RunFolder, epoch: int, iteration: int, **model: Any) -> Path:
    """Save the payload of (epoch, iteration)."""
    return save_payload(
        folder,
        make_payload(epoch, iteration, **model),
        stem=file_names.stem("run", epoch, iteration),
        sidecar=make_sidecar(epoch, iteration),
    )


def is_same(left: Any, right: Any) -> bool:
    """Equal in type and value, tensors on bytes."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.numpy().tobytes() == right.numpy().tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(is_same(left[key], right[key]) for key in left)
    return bool(left == right)


def names(folder: Path) -> list[str]:
    """Return the sorted names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def swap(first: Path, second: Path) -> None:
    """Exchange the contents of two names."""
    other = first.with_name("other")
    first.rename(other)
    second.rename(first)
    other.rename(second)
