"""Exports the weights of a checkpoint, under the names that plain PyTorch uses.

The model that wrote the checkpoint is not needed, because the file identifies networks. Optimizers,
counters and random number generators are not exported.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helios.checkpoint import file_names
from helios.core.sharded_tensors import is_deferred, read_deferred
from helios.core.wrappers import clean_names
from helios.errors import ArgumentError, CheckpointError, UsageError
from helios.storage import codec, files
from helios.storage.weights_only import TAG

FORMATS = ("safetensors", "pt")

_OPTIMIZER_KEYS = {"state", "param_groups"}
_MAX_DEPTH = 50


@dataclass
class Weights:
    """Tensors by name, to be written to a separate file.

    Attributes:
        tensors: by name; they may share memory, and may be mapped from the checkpoint.
        versions: versions of the classes of a network, with which torch migrates its state.
        left_out: names of entries of a network's state that are not tensors.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Total number of bytes of the tensors; shared ones count each time."""
        return sum(part.numel() * part.element_size() for part in self.tensors.values())

    def add(self, prefix: str, state: Mapping[str, Any]) -> None:
        """Add the state of one network, under names that begin with ``prefix``."""
        for name, value in state.items():
            if isinstance(value, Tensor):
                self.tensors[prefix + name] = value
            else:
                self.left_out.append(prefix + name)
        versions = vars(state).get("_metadata") if isinstance(state, OrderedDict) else None
        for name, version in (versions or {}).items():
            self.versions[(prefix + name).removesuffix(".")] = version


def select_weights(
    tree: Mapping[str, Any], *, network: str | None = None, average: str | None = None
) -> Weights:
    """Return the weights in a checkpoint.

    The names are those inside the network if there is only one, or if one is named; those of
    several begin with the attribute of the model (``encoder.layer.weight``). If the model overrides
    ``state_dict``, all tensors outside optimizers are exported, under the keys that lead to them.

    Args:
        tree: the content of a checkpoint, from :func:`helios.storage.codec.read_structure`.
        network: the attribute of the model to export; ``None`` for all networks.
        average: id of a plugin whose averages replace the weights; ``None`` for none.

    Raises:
        ArgumentError: if the checkpoint has no such network or average.
        CheckpointError: if there are no weights in it.
    """
    state = tree[file_names.KEY_MODEL]
    networks = _networks_of(state)
    if networks is None:
        weights = _select_from_own_state(state, network=network, average=average)
    else:
        averages = _averages_of(tree, average)
        chosen = _choose(networks, network)
        loose = state["parameters"] if network is None else {}
        weights = Weights()
        for path, part in chosen.items():
            is_alone = len(chosen) == 1 and not loose
            prefix = "" if is_alone else f"{path}."
            own, means = _read_all(part), _read_all(averages.get(path, {}))
            weights.add(prefix, _averaged(own, means, path))
        weights.add("", loose)
    if not weights.tensors:
        raise CheckpointError("The checkpoint holds no weights: its model has no network.")
    return weights


def _networks_of(state: Any) -> dict[str, Mapping[str, Any]] | None:
    """Return the networks in a discovered state; ``None`` for a state of another form."""
    keys = ("objects", "flags", "parameters")
    if not isinstance(state, Mapping) or not all(
        isinstance(state.get(key), Mapping) for key in keys
    ):
        return None
    return {path: part for path, part in state["objects"].items() if path in state["flags"]}


def _choose(
    networks: dict[str, Mapping[str, Any]], network: str | None
) -> dict[str, Mapping[str, Any]]:
    if network is None:
        return networks
    if network not in networks:
        raise ArgumentError(
            f"The network must be one of {sorted(networks)}, got {network!r}. Pass the name of the "
            "model's attribute that holds it."
        )
    return {network: networks[network]}


def _read_all(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of a network with the sharded tensors that were not read yet."""
    found = {name: part for name, part in state.items() if is_deferred(part)}
    if not found:
        return state
    # Tied tensors stay tied.
    whole = {id(part): read_deferred(part) for part in found.values()}
    result = copy.copy(state)
    assert isinstance(result, dict)
    result.update((name, whole[id(part)]) for name, part in found.items())
    return result


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
    replaced = OrderedDict(state)
    for name, own in state.items():
        if isinstance(own, Tensor) and _place(own) in by_place:
            replaced[name] = by_place[_place(own)].to(own.dtype)
    if isinstance(state, OrderedDict):
        vars(replaced).update(vars(state))
    return replaced


def _place(tensor: Tensor) -> tuple[Any, ...]:
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
    _gather(weights, "", state, depth=0)
    return weights


def _gather(weights: Weights, prefix: str, state: Any, depth: int) -> None:
    if isinstance(state, list | tuple):
        state = {str(number): part for number, part in enumerate(state)}
    if not isinstance(state, Mapping) or TAG in state or depth > _MAX_DEPTH:
        return
    if state.keys() >= _OPTIMIZER_KEYS:
        return
    named = {str(key): part for key, part in state.items()}
    tensors = {key: part for key, part in _read_all(named).items() if isinstance(part, Tensor)}
    weights.add(prefix, _clean(tensors))
    for key, part in named.items():
        _gather(weights, f"{prefix}{key}.", part, depth + 1)


def _clean(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without the name prefixes of ``torch.compile`` and data parallelism.

    The names that Helios discovers have none.
    """
    names = clean_names(tensors)
    return {names[name]: part for name, part in tensors.items()}


def write_weights(
    path: Path, weights: Weights, *, kind: str, metadata: Mapping[str, str], replaces: bool = False
) -> None:
    """Write weights to a file, durably; a kill leaves the old file or the new one.

    Args:
        path: the file.
        weights: the tensors.
        kind: ``"safetensors"``, or ``"pt"`` for a file that ``torch.load`` reads.
        metadata: header of a safetensors file that describes its origin; ``"pt"`` has none.
        replaces: whether an existing file may be overwritten.

    Raises:
        ArgumentError: if the file exists, or would be taken for a checkpoint.
        UsageError: if safetensors is requested and not installed.
        CheckpointError: if the format cannot hold a tensor.
        OSError: if the disk fails.
    """
    if file_names.is_checkpoint(path):
        raise ArgumentError(
            f"The file of exported weights must not be named like a checkpoint, got {path}: a "
            "training would load it. Choose another name."
        )
    if path.exists() and not replaces:
        raise ArgumentError(f"{path} exists already. Choose another name, or allow overwriting.")
    write = _safetensors_writer(metadata) if kind == "safetensors" else _write_pt
    with files.replacing(path) as partial:
        write(partial, weights)


def _write_pt(path: Path, weights: Weights) -> None:
    state = OrderedDict((name, part.detach()) for name, part in weights.tensors.items())
    if weights.versions:
        vars(state)["_metadata"] = OrderedDict(weights.versions)
    codec.write_file(path, state)


def _safetensors_writer(metadata: Mapping[str, str]) -> Callable[[Path, Weights], None]:
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError(
            "Exporting to safetensors needs the package safetensors, which is not installed. "
            'Install it with: pip install "helios-trainer[safetensors]", or export to pt.'
        ) from error

    def write(path: Path, weights: Weights) -> None:
        tensors = _apart(weights.tensors)
        try:
            safetensors.torch.save_file(tensors, path, metadata=dict(metadata))
        except Exception as error:
            raise CheckpointError(
                f"{path} was not written: safetensors reports {error}. Check the disk; types that "
                "safetensors does not support can be exported to pt."
            ) from error
        with path.open("r+b") as handle:
            files.fsync(handle)

    return write


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that share no memory, as safetensors requires."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise CheckpointError(
                f"{name} is {tensor.layout}, {tensor.dtype}, which safetensors cannot hold. Export "
                "to pt."
            )
        part = tensor.detach().resolve_conj().resolve_neg().contiguous()
        storage = part.untyped_storage()
        size = part.numel() * part.element_size()
        if storage.data_ptr() in seen or storage.nbytes() != size:
            part = part.clone()
        seen.add(part.untyped_storage().data_ptr())
        result[name] = part
    return result
