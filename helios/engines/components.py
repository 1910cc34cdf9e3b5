"""Builds the components of an experiment, and saves and loads their states, without a trainer.

The names in a state do not depend on the engine, so any engine can unpack it.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from helios.core.wrappers import BareNames, bare_state_dict
from helios.engines.process_member import ProcessMember
from helios.errors import ArgumentError, StateError
from helios.protocols import Stateful
from helios.storage import codec, files
from helios.storage.local_paths import as_local_path

_LOGGER = logging.getLogger(__name__)

_PARTS = ("model", "criterion", "optimizer", "scheduler")

Maker = Callable[..., Any] | None


def build_model(make: Maker, prepare: Callable[[nn.Module], nn.Module]) -> tuple[Any, Any]:
    """Return a model, or a dict of models, as it was built, and prepared for training.

    Raises:
        ArgumentError: if it is neither a module nor a dict of modules.
    """
    if make is None:
        return None, None
    if isinstance(make, nn.Module):
        raise ArgumentError(
            "init_components(model_fn=...) must be a function that returns the model, got the "
            f"module {type(make).__name__}. Pass lambda: model."
        )
    made = make()
    members = made.values() if isinstance(made, dict) else [made]
    if not all(isinstance(member, nn.Module) for member in members):
        raise ArgumentError(
            "init_components(model_fn=...) must return a module or a dict of modules, got "
            f"{made!r}. Return the model to train."
        )
    if isinstance(made, dict):
        return made, {name: prepare(member) for name, member in made.items()}
    return made, prepare(made)


class ComponentState(ProcessMember):
    """Packs the states of parts and of the precision, and writes and reads checkpoints of them."""

    @abstractmethod
    def _scaler_state(self) -> dict[str, Any]:
        """Return the scaler's state, if the precision has a scaler."""

    @abstractmethod
    def _load_scaler(self, state: Mapping[str, Any]) -> None:
        """Restore the scaler's state, if there is one."""

    def pack_checkpoint(
        self,
        model: Any = None,
        criterion: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        **extra: Any,
    ) -> dict[str, Any]:
        """Return the states of parts as one dict, whose names do not depend on the engine.

        A part gives ``"<part>_state_dict"``, a dict of parts ``"<part>_<key>_state_dict"``, and
        the scaler of fp16 ``"scaler"``. ``None`` is skipped.

        Args:
            model: an object with a state, or a dict of such; the same for the next three.
            criterion: as ``model``.
            optimizer: as ``model``.
            scheduler: as ``model``.
            **extra: is added unchanged.

        Raises:
            ArgumentError: if a part has no state, or a name is taken.
        """
        parts = (model, criterion, optimizer, scheduler)
        table = _flatten(dict(zip(_PARTS, parts, strict=True)))
        packed = {key: _state_of(key, part) for key, part in table} | self._scaler_state()
        taken = sorted(packed.keys() & extra.keys())
        if taken:
            raise ArgumentError(
                f"pack_checkpoint({taken[0]}=...) must have another name, because a part already "
                "uses this one. Rename it."
            )
        return {**packed, **extra}

    def unpack_checkpoint(
        self,
        checkpoint: Mapping[str, Any],
        model: Any = None,
        criterion: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        strict: bool = False,
    ) -> None:
        """Load the states of parts, whichever engine has packed them.

        Args:
            checkpoint: what :meth:`pack_checkpoint` has returned.
            model: an object, or a dict of such; the same for the next three.
            criterion: as ``model``.
            optimizer: as ``model``.
            scheduler: as ``model``.
            strict: raise an error instead of a warning if a part has no state in the checkpoint.

        Raises:
            StateError: if ``strict`` and the state of a part is missing.
        """
        parts = (model, criterion, optimizer, scheduler)
        found = list(_flatten(dict(zip(_PARTS, parts, strict=True))))
        missing = [key for key, _ in found if key not in checkpoint]
        if missing:
            text = f"The checkpoint has no {', '.join(missing)} (only {', '.join(checkpoint)})."
            if strict:
                raise StateError(f"{text} Omit those parts, or pass strict=False.")
            _LOGGER.warning("%s Those parts are not changed.", text)
        for key, part in found:
            if key in checkpoint:
                _load_state(part, checkpoint[key])
        self._load_scaler(checkpoint)

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: Path | str) -> None:
        """Write a checkpoint atomically, on the master process only.

        Other processes return at once: call :meth:`barrier` before they read it.

        Raises:
            StateError: if a value could not be loaded again; the message names it.
            OSError: what the file system raises.
        """
        if not self.is_master_process:
            return
        target = as_local_path("save_checkpoint(path=...)", path)
        tree = codec.encode(dict(checkpoint), where="checkpoint")
        files.make_folder(target.parent)
        with files.replacing(target) as partial:
            codec.write_file(partial, tree)

    def load_checkpoint(self, path: Path | str) -> Any:
        """Return the checkpoint in a file, with tensors on the CPU, without executing its code."""
        return codec.read(as_local_path("load_checkpoint(path=...)", path))


def _flatten(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the key of each state and the object that has it."""
    for name, part in parts.items():
        if isinstance(part, dict):
            yield from ((f"{name}_{key}_state_dict", member) for key, member in part.items())
        elif part is not None:
            yield f"{name}_state_dict", part


def _state_of(key: str, part: Any) -> dict[str, Any]:
    if not isinstance(part, Stateful):
        name = key.removesuffix("_state_dict")
        raise ArgumentError(
            f"pack_checkpoint({name}=...) must have state_dict() and load_state_dict(), got "
            f"{part!r}. Omit it."
        )
    return bare_state_dict(part)


def _load_state(part: Any, state: dict[str, Any]) -> None:
    if not isinstance(part, nn.Module):
        part.load_state_dict(state)
        return
    names = BareNames(part)
    bare = names.strip(state)
    present = {names.of(name): name for name in part.state_dict()}
    part.load_state_dict({present.get(name, name): value for name, value in bare.items()})
