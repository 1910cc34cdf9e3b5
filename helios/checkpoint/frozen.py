"""Weights that checkpoints refer to, instead of holding them: ``CheckpointStore(frozen=...)``.

Weights that are frozen and unchanged since ``setup`` are left out of a checkpoint, which has their
digest. A start that loads the checkpoint checks with it that its own ``setup`` made the same
weights.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from helios.core.utils import parameters_of
from helios.core.wrappers import BareNames
from helios.errors import CheckpointError, RunMismatchError, UsageError
from helios.model.model import Model
from helios.state.networks import Network, is_odd
from helios.state.values import is_dense
from helios.storage.content_hash import tensor_sum
from helios.text import some_text

_KEY = "frozen"
"""The entry of a model's state with the digests of what is left out."""

_MUST_REPEAT = (
    'CheckpointStore(frozen="reference") leaves them out of checkpoints, so each start must make '
    "the same: load the same file, and draw random numbers from torch only."
)


def references_of(state: object) -> Mapping[str, str] | None:
    """Return the digests of weights that a model's state refers to, or ``None``."""
    # A state of the user's own may have a key of this name.
    if not isinstance(state, Mapping) or not state.keys() >= {"objects", "flags", _KEY}:
        return None
    found: Mapping[str, str] = state[_KEY]
    return found


@final
class FrozenWeights:
    """The frozen weights of ``setup`` that checkpoints may refer to.

    A tensor that is unfrozen or changed is saved from then on.

    Args:
        model: the model, after its setup and before anything is loaded.
        before: the digests from an earlier call of its setup; ``None`` without one.

    Attributes:
        digests: those of what is frozen, by name.

    Raises:
        UsageError: for a model with a ``state_dict`` of its own, or a setup that makes something
            else each time.
    """

    def __init__(self, model: Model, before: Mapping[str, str] | None = None) -> None:
        if type(model).state_dict is not Model.state_dict:
            raise UsageError(
                f'CheckpointStore(frozen="reference") must be omitted with {type(model).__name__}, '
                "whose own state_dict says what is saved. Leave the frozen weights out there."
            )
        self._model = model
        self._sums: dict[str, int] = {}
        self.digests: dict[str, str] = {}
        for _, _, name, tensor in _frozen_tensors(model):
            self._sums[name], self.digests[name] = tensor_sum(tensor), digest_of(tensor)
        items = set() if before is None else before.items() ^ self.digests.items()
        if items:
            raise UsageError(
                f"setup() of {type(model).__name__} makes different frozen weights each time: "
                f"{some_text(sorted({name for name, _ in items}))}. {_MUST_REPEAT}"
            )

    def keep(self, names: Mapping[str, str] | None) -> None:
        """Save the weights that a checkpoint holds in the next ones, too.

        Args:
            names: the digests in that checkpoint; ``None`` if it holds everything.
        """
        if names is not None:
            self.digests = {x: digest for x, digest in self.digests.items() if x in names}

    def leave_out(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state of the model without frozen and unchanged weights."""
        objects, kept = dict(state["objects"]), dict[str, str]()
        for path, key, name, tensor in _frozen_tensors(self._model):
            if name in self.digests and tensor_sum(tensor) == self._sums[name]:
                if objects[path] is state["objects"][path]:
                    # With the versions of its modules.
                    objects[path] = copy.copy(objects[path])
                del objects[path][key]
                kept[name] = self.digests[name]
        self.digests = kept
        return {**state, "objects": objects, _KEY: dict(kept)}


def _frozen_tensors(model: Model) -> Iterator[tuple[str, str, str, Tensor]]:
    """Yield path, key, name and tensor of what no optimizer updates, in plain networks."""
    discovery = model.discovery
    updated = {
        id(tensor) for each in discovery.optimizers().values() for tensor in parameters_of(each)
    }
    for path, key, tensor in _tensors_of(model):
        if not (tensor.requires_grad and id(tensor) in updated):
            yield path, key, f"{path}.{key}", tensor


def _tensors_of(model: Model) -> Iterator[tuple[str, str, Tensor]]:
    for path, module in model.discovery.saved_modules().items():
        if is_odd(Network(module)):
            continue
        # Under all names of a module that several share.
        for key, tensor in BareNames(module).strip(module.state_dict(keep_vars=True)).items():
            if isinstance(tensor, Tensor) and not is_lazy(tensor) and is_dense(tensor):
                yield path, key, tensor


def digest_of(tensor: Tensor) -> str:
    """Return the SHA-256 digest of a tensor: of its type, its shape and its elements."""
    content = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content.update(flat.view(torch.uint8).numpy().data)
    return f"sha256:{content.hexdigest()}"


def complete(state: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return a state with the weights that it refers to, from the ``setup`` of this start.

    Args:
        state: the state of a model in a checkpoint.
        model: the model, after its setup.

    Raises:
        RunMismatchError: if ``setup`` makes other weights, or lacks them.
    """
    digests = references_of(state)
    if not digests:
        return state
    objects = {path: copy.copy(part) for path, part in state["objects"].items()}
    found = {f"{path}.{key}": (path, key, tensor) for path, key, tensor in _tensors_of(model)}
    lacking = [name for name in digests if name not in found]
    other = [name for name in digests.keys() & found if digest_of(found[name][2]) != digests[name]]
    if lacking or other:
        what = "does not make" if lacking else "makes with other values"
        raise RunMismatchError(
            f"The checkpoint refers to frozen weights that setup() of {type(model).__name__} "
            f"{what}: {some_text(lacking or sorted(other))}. {_MUST_REPEAT}"
        )
    for name in digests:
        path, key, tensor = found[name]
        objects[path][key] = tensor.detach().clone()
    return {**state, "objects": objects}


def require_whole(state: object, place: object) -> None:
    """Refuse a checkpoint that does not hold all weights, if there is no model to make them.

    Raises:
        CheckpointError: naming the weights that it refers to.
    """
    digests = references_of(state)
    if digests:
        raise CheckpointError(
            f"{place} refers to frozen weights, which it does not hold: {some_text(digests)}. "
            "Only fit, validate, test and predict can use it, with the model whose setup() makes "
            "them. helios export --trained writes the rest. Train a step without "
            'CheckpointStore(frozen="reference") to save everything.'
        )
