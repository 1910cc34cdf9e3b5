"""Exports the weights of a checkpoint, under the names that plain PyTorch uses.

This does not need the model, because the file identifies networks. Optimizers, counters and random
number generators are not exported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helios.checkpoint import file_names
from helios.checkpoint.frozen import require_whole
from helios.core.sharded_tensors import is_deferred, value_of
from helios.core.wrappers import clean_names
from helios.errors import ArgumentError, CheckpointError
from helios.storage import codec, files
from helios.storage.codes import TAG

_OPTIMIZER_KEYS = {"state", "param_groups"}


@dataclass
class Weights:
    """Tensors by name, to be written to a separate file.

    Attributes:
        tensors: by name; they may share memory, be mapped from the checkpoint, or be deferred:
            :meth:`read` returns their values.
        left_out: names of entries of a network's state that are not tensors.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Total number of bytes of the tensors; shared ones count each time."""
        return sum(part.numel() * part.element_size() for part in self.tensors.values())

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return tensors with their values; deferred ones are read, and tied ones stay tied.

        Args:
            names: which ones; ``None`` for all.

        Raises:
            DamagedCheckpointError: if their bytes have changed since they were written.
        """
        chosen = {name: self.tensors[name] for name in (self.tensors if names is None else names)}
        unique = {id(part): part for part in chosen.values()}
        values = {number: value_of(part) for number, part in unique.items()}
        return {name: values[id(part)] for name, part in chosen.items()}

    def add(self, prefix: str, state: Mapping[str, Any]) -> None:
        """Add the state of one network, under names that begin with ``prefix``."""
        for name, value in state.items():
            if isinstance(value, Tensor):
                self.tensors[prefix + name] = value
            else:
                self.left_out.append(prefix + name)


def select_weights(
    tree: Mapping[str, Any],
    *,
    network: str | None = None,
    average: str | None = None,
    is_trained: bool = False,
) -> Weights:
    """Return the weights in a checkpoint.

    The names are those inside the network if there is only one, or if one is named; those of
    several begin with the attribute of the model (``encoder.layer.weight``). If the model overrides
    ``state_dict``, all tensors outside optimizers are exported, under the keys that lead to them.

    Args:
        tree: the content of a checkpoint, from :func:`helios.storage.codec.read_structure`.
        network: the attribute of the model to export; ``None`` for all networks.
        average: id of a plugin whose averages replace the weights; ``None`` for none.
        is_trained: leave out parameters that are frozen, or that no optimizer updates.

    Raises:
        ArgumentError: if the checkpoint has no such network or average, or does not say what is
            trained.
        CheckpointError: if there are no weights in it.
    """
    state = tree[file_names.KEY_MODEL]
    if is_trained:
        state = _leave_out_frozen(state)
    require_whole(state, "The checkpoint")
    networks = networks_of(state)
    if networks is None:
        weights = _select_from_own_state(state, network=network, average=average)
    else:
        if network is not None and network not in networks:
            raise ArgumentError(
                f"The network must be one of {sorted(networks)}, got {network!r}. Pass the name of "
                "the model's attribute that holds it."
            )
        averages = _averages_of(tree, average)
        chosen = networks if network is None else {network: networks[network]}
        loose = state["parameters"] if network is None else {}
        weights = Weights()
        for path, part in chosen.items():
            is_alone = len(chosen) == 1 and not loose
            prefix = "" if is_alone else f"{path}."
            known = averages.get(path, {})
            if is_trained:
                known = {name: tensor for name, tensor in known.items() if name in part}
            weights.add(prefix, _averaged(part, known, path))
        weights.add("", loose)
    if not weights.tensors:
        raise CheckpointError("The checkpoint holds no weights: its model has no network.")
    return weights


def networks_of(state: Any) -> dict[str, Mapping[str, Any]] | None:
    """Return the networks in a discovered state; ``None`` for a state of another form."""
    if not isinstance(state, Mapping) or not state.keys() >= {"objects", "flags", "parameters"}:
        return None
    return {path: part for path, part in state["objects"].items() if path in state["flags"]}


def _leave_out_frozen(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a model without frozen parameters; buffers may have changed."""
    networks = networks_of(state)
    if networks is None:
        raise ArgumentError(
            "--trained must be omitted for a model that overrides state_dict, which does not say "
            "what is trained. Name a part with --network."
        )
    tensors = dict(state["parameters"])
    for path, part in networks.items():
        tensors |= {f"{path}.{name}": each for name, each in part.items()}
    groups = [group for optimizer in state["members"].values() for group in optimizer]
    updated = {name for group in groups for name in group if state["flags"].get(name)}
    if not updated:
        raise CheckpointError(
            "The checkpoint has no parameters that an optimizer updates. Omit --trained."
        )
    # A tensor with several names may be listed under one of them only.
    trained = {_place(tensors[name]) for name in updated & tensors.keys()}
    frozen = {_place(tensors[name]) for name in state["flags"].keys() & tensors.keys()} - trained

    def keep(part: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: each
            for name, each in part.items()
            if not (isinstance(each, Tensor) and _place(each) in frozen)
        }

    kept = {path: keep(part) for path, part in networks.items()}
    return {"objects": kept, "flags": state["flags"], "parameters": keep(state["parameters"])}


def _averages_of(tree: Mapping[str, Any], average: str | None) -> Mapping[str, Any]:
    if average is None:
        return {}
    plugins = tree.get(file_names.KEY_PLUGINS)
    found: dict[str, Mapping[str, Any]] = {
        name: part["averages"]
        for name, part in (plugins.items() if isinstance(plugins, Mapping) else ())
        if isinstance(part, Mapping) and isinstance(part.get("averages"), Mapping)
    }
    if not found.get(average):
        known = sorted(name for name, averages in found.items() if averages)
        raise ArgumentError(
            f"The average must be that of a plugin with averages, of which the checkpoint has "
            f"{known}, got {average!r}. Omit it for the network's own weights."
        )
    return found[average]


def _averaged(
    state: Mapping[str, Any], averages: Mapping[str, Any], path: str
) -> Mapping[str, Any]:
    """Return a network's state with averages instead of its own values, in their types."""
    if unknown := sorted(averages.keys() - state.keys()):
        raise CheckpointError(
            f"The average does not match the network {path}: it has {', '.join(unknown[:3])}, "
            "which the network does not have. Export the network's own weights."
        )
    # An average has one name for a tensor that the network has under several names.
    by_place = {_place(state[name]): average for name, average in averages.items()}
    replaced = dict(state)
    for name, own in state.items():
        average = by_place.get(_place(own)) if isinstance(own, Tensor) else None
        if average is not None:
            is_alike = average.dtype == own.dtype
            replaced[name] = average if is_alike else value_of(average).to(own.dtype)
    return replaced


def _place(tensor: Tensor) -> tuple[Any, ...]:
    if is_deferred(tensor):
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _select_from_own_state(state: Any, *, network: str | None, average: str | None) -> Weights:
    if average is not None:
        raise ArgumentError(
            "An average can be exported only if Helios discovers the model's state, but this model "
            "overrides state_dict. Copy the average into the model before it is saved."
        )
    if network is not None:
        if not isinstance(state, Mapping) or not isinstance(state.get(network), Mapping):
            keys = sorted(map(str, state)) if isinstance(state, Mapping) else []
            raise ArgumentError(
                f"The network must be one of the keys {keys} of the model's own state_dict, got "
                f"{network!r}. Name one that holds a network's state."
            )
        state = state[network]
    weights = Weights()
    _gather(weights, "", state)
    return weights


def _gather(weights: Weights, prefix: str, state: Any) -> None:
    if isinstance(state, list | tuple):
        state = {str(number): part for number, part in enumerate(state)}
    if not isinstance(state, Mapping) or TAG in state or state.keys() >= _OPTIMIZER_KEYS:
        return
    named = {str(key): part for key, part in state.items()}
    tensors = {key: part for key, part in named.items() if isinstance(part, Tensor)}
    # Without the prefixes of torch.compile and data parallelism; what Helios discovers has none.
    names = clean_names(tensors)
    weights.add(prefix, {names[key]: part for key, part in tensors.items()})
    for key, part in named.items():
        _gather(weights, f"{prefix}{key}.", part)


# ---- to a file, or to the folder that ``from_pretrained`` loads

_MAX_BYTES = 5 * 10**9
_Writer = Callable[[Path, Mapping[str, Tensor]], None]


def write_weights(
    path: Path, weights: Weights, *, kind: str, metadata: Mapping[str, str], replaces: bool = False
) -> None:
    """Write weights to a file, durably and atomically.

    Args:
        path: the file.
        weights: the tensors.
        kind: ``"safetensors"``, or ``"pt"`` for a file that ``torch.load`` reads.
        metadata: header of a safetensors file that describes its origin; ``"pt"`` has none.
        replaces: whether an existing file may be overwritten.

    Raises:
        ArgumentError: if the file exists, or is named like a checkpoint.
        ModuleNotFoundError: if safetensors is requested and not installed.
        CheckpointError: if the format cannot hold a tensor.
        OSError: if the disk fails.
    """
    _refuse_checkpoint_name(path)
    if path.exists() and not replaces:
        raise ArgumentError(
            f"{path} exists already. Choose another name, or overwrite it with --force."
        )
    write = _safetensors_writer(metadata) if kind == "safetensors" else None
    with files.replacing(path) as partial:
        if write is None:
            codec.write_file(
                partial, {name: part.detach() for name, part in weights.read().items()}
            )
        else:
            write(partial, weights.read())


def write_folder(
    path: Path, weights: Weights, *, metadata: Mapping[str, str], max_bytes: int = _MAX_BYTES
) -> list[str]:
    """Write weights to a folder that ``from_pretrained`` of transformers loads, durably.

    This needs memory for the tensors of one file. After a kill, there is the complete folder, or
    nothing under this name.

    Args:
        path: the folder, which must not exist.
        weights: the tensors.
        metadata: header of each file that describes its origin.
        max_bytes: the size of a file; one tensor that is larger gets a file of its own.

    Returns:
        The names of its files.

    Raises:
        ArgumentError: if the path exists, or is named like a checkpoint.
        ModuleNotFoundError: if safetensors is not installed.
        CheckpointError: if the format cannot hold a tensor.
        OSError: if the disk fails.
    """
    _refuse_checkpoint_name(path)
    if path.exists():
        raise ArgumentError(f"{path} exists already. Choose another name, or remove it.")
    write = _safetensors_writer(metadata)
    draft = files.temporary_path(path.with_name(f"{path.name}.export"))
    # What a kill has left.
    files.remove_folder(draft)
    files.make_folder(draft)
    try:
        _write_pretrained(draft, weights, write, max_bytes)
        files.fsync_folder(draft)
        files.replace(draft, path)
    except BaseException:
        files.remove_folder(draft)
        raise
    files.fsync_folder(path.parent)
    return sorted(each.name for each in path.iterdir())


def _write_pretrained(folder: Path, weights: Weights, write: _Writer, max_bytes: int) -> None:
    groups = list(_groups(weights, max_bytes))
    names = [f"model-{number:05d}-of-{len(groups):05d}" for number in range(1, len(groups) + 1)]
    named = {
        f"{name if len(groups) > 1 else 'model'}.safetensors": group
        for name, group in zip(names, groups, strict=True)
    }
    for file, group in named.items():
        write(folder / file, weights.read(group))
    if len(groups) > 1:
        table: dict[str, Any] = {
            "metadata": {"total_size": weights.num_bytes},
            "weight_map": {name: file for file, group in named.items() for name in group},
        }
        index = folder / "model.safetensors.index.json"
        files.write_text_durably(index, json.dumps(table, indent=2))


def _groups(weights: Weights, max_bytes: int) -> Iterator[list[str]]:
    """Yield the names for each file: as many as fit, in their order."""
    group: list[str] = []
    size = 0
    for name, tensor in weights.tensors.items():
        added = tensor.numel() * tensor.element_size()
        if group and size + added > max_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += added
    yield group


def _refuse_checkpoint_name(path: Path) -> None:
    """Refuse a name that a run would take for a checkpoint, or for a part of one."""
    if any(map(file_names.is_checkpoint, (path, *path.absolute().parents))):
        raise ArgumentError(
            f"Exported weights must not be named like a checkpoint or be in the folder of one, got "
            f"{path}: a run would load them. Choose another name."
        )


def _safetensors_writer(metadata: Mapping[str, str]) -> _Writer:
    import safetensors.torch

    def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
        for name, part in tensors.items():
            if part.layout is not torch.strided:
                raise CheckpointError(
                    f"safetensors cannot hold {name}, {part.layout}. Use --to pt."
                )
        try:
            # Each has memory of its own, and its values without a lazy sign or conjugation.
            apart = {
                name: part.detach().resolve_conj().resolve_neg().contiguous().clone()
                for name, part in tensors.items()
            }
            safetensors.torch.save_file(apart, path, metadata=dict(metadata))
        except Exception as error:
            raise CheckpointError(
                f"{path} was not written: safetensors reports {error}. Check the disk; types that "
                "safetensors does not support can be exported to pt."
            ) from error
        with path.open("r+b") as handle:
            files.fsync(handle)

    return write
