"""Sharded checkpoints without processes: the rows of all ranks are written one after the other."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helios.checkpoint import file_names
from helios.checkpoint.store import PendingCheckpoint, RunFolder
from helios.core.sharded_tensors import OwnRows, RowShare
from helios.storage import files
from helios.storage.dcp_folder import RowPlanner, RowWriter
from helios.storage.files import FileFacts
from helios.storage.type_converters import ShardedValue
from tests.checkpoint.helpers import make_payload, make_sidecar

FORMS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "model.objects.net.weight": ((7, 5), torch.float32),
    "model.objects.net.bias": ((3,), torch.bfloat16),
    "model.objects.net.scale": ((1,), torch.float64),
    "model.objects.net.large": ((9, 70_000), torch.float32),
    "plugins.ema.weight": ((7, 5), torch.float32),
}
"""Names, shapes and types; no number of rows can be divided by the number of ranks, and some have
fewer. One tensor spans several blocks of its file."""


def tensor_of(name: str, iteration: int) -> Tensor:
    """Return the whole of a tensor."""
    shape, dtype = FORMS[name]
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + iteration)
    return torch.randn(shape, generator=generator).to(dtype)


def rows_of(iteration: int, rank: int, num_ranks: int) -> dict[str, OwnRows]:
    """Return what a rank holds of all tensors."""
    found = {}
    for name, (shape, _) in FORMS.items():
        first, end = RowShare(rank, num_ranks).rows(shape[0])
        found[name] = OwnRows(tensor_of(name, iteration)[first:end], first, shape)
    return found


def make_sharded_payload(epoch: int, iteration: int) -> dict[str, Any]:
    """Return a payload with references to the sharded tensors."""
    net = {
        name.rpartition(".")[2]: ShardedValue(name) for name in FORMS if name.startswith("model")
    }
    payload = make_payload(epoch, iteration, objects={"net": net}, flags={"net": {}}, parameters={})
    return payload | {"plugins": {"ema": {"weight": ShardedValue("plugins.ema.weight")}}}


def write_rows(
    folder: Path, rows: list[dict[str, OwnRows]], *, hashes: bool = True
) -> dict[str, FileFacts]:
    """Write the rows of all ranks, as ``save_rows`` does with processes; returns the files."""
    planners = [RowPlanner(each) for each in rows]
    writers = [RowWriter(folder, each, hashes=hashes) for each in rows]
    for rank, (planner, writer) in enumerate(zip(planners, writers, strict=True)):
        planner.set_up_planner({}, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
    local = [
        writer.prepare_local_plan(planner.create_local_plan())
        for planner, writer in zip(planners, writers, strict=True)
    ]
    plans, metadata = planners[0].create_global_plan(local)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for planner, writer, plan in zip(planners, writers, plans, strict=True)
    ]
    writers[0].finish(metadata, results)
    return writers[0].written


def commit(folder: RunFolder, payload: dict[str, Any], rows: list[dict[str, OwnRows]]) -> Path:
    """Commit a checkpoint of any payload, as rank 0 does."""
    state = payload["training_state"]
    epoch, iteration = state["global_epoch"], state["global_iteration"]
    path = folder.path_of(file_names.stem("run", epoch, iteration), is_sharded=True)
    pending = PendingCheckpoint(path, payload, make_sidecar(epoch, iteration))
    draft = files.temporary_path(path)
    pending.rows = write_rows(draft, rows, hashes=folder.options.digest)
    pending.encode()
    folder.commit(pending)
    return path


def save_sharded(folder: RunFolder, epoch: int, iteration: int, num_ranks: int = 3) -> Path:
    """Save a sharded checkpoint; returns its folder."""
    rows = [rows_of(iteration, rank, num_ranks) for rank in range(num_ranks)]
    return commit(folder, make_sharded_payload(epoch, iteration), rows)


def save_network(
    folder: RunFolder,
    state: Mapping[str, Tensor],
    averages: Mapping[str, Tensor] | None = None,
    *,
    num_ranks: int = 3,
) -> Path:
    """Save the state of a network sharded, as the run's iteration 4; returns its folder.

    Scalars are in the record. Tensors that are one are written once.
    """
    trees = {"model.objects.net": state, "plugins.ema.averages.net": averages or {}}
    named = {f"{root}.{name}": part for root, tree in trees.items() for name, part in tree.items()}
    places = {name: _place(part) for name, part in named.items() if part.dim()}
    ranks = []
    for rank in range(num_ranks):
        rows: dict[Any, OwnRows] = {}
        for name, place in places.items():
            first, end = RowShare(rank, num_ranks).rows(len(named[name]))
            shape = tuple(named[name].shape)
            rows.setdefault(place, OwnRows(named[name][first:end], first, shape))
        ranks.append({name: rows[place] for name, place in places.items()})
    net, means = (
        {
            name: ShardedValue(f"{root}.{name}") if part.dim() else part
            for name, part in tree.items()
        }
        for root, tree in trees.items()
    )
    payload = make_payload(1, 4, objects={"net": net}, flags={"net": {}}, parameters={})
    payload |= {"plugins": {"ema": {"averages": {"net": means}}}}
    return commit(folder, payload, ranks)


def _place(tensor: Tensor) -> Any:
    # Empty tensors have no place.
    return (tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride(), tensor.dtype)


def is_whole(payload: dict[str, Any], iteration: int) -> bool:
    """Return whether a payload that was loaded holds all tensors of an iteration, to the bit."""
    net = payload["model"]["objects"]["net"]
    found = {f"model.objects.net.{name}": part for name, part in net.items()}
    found["plugins.ema.weight"] = payload["plugins"]["ema"]["weight"]
    return found.keys() == FORMS.keys() and all(
        part.dtype == FORMS[name][1] and part.equal(tensor_of(name, iteration))
        for name, part in found.items()
    )
