"""Saves and loads the parts of an experiment, for scripts without a trainer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helios.engines import experiment_parts
from helios.engines.process_member import ProcessMember
from helios.storage import codec


class ExperimentState(ProcessMember):
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
        table = dict(zip(experiment_parts.PARTS, parts, strict=True))
        return experiment_parts.pack(table, extra, self._scaler_state())

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
        table = dict(zip(experiment_parts.PARTS, parts, strict=True))
        experiment_parts.unpack(table, checkpoint, strict=strict)
        self._load_scaler(checkpoint)

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: Path | str) -> None:
        """Write a checkpoint atomically, on the master process only.

        Other processes return at once: call :meth:`barrier` before they read it.
        """
        if self.is_master_process:
            experiment_parts.save(checkpoint, Path(path))

    def load_checkpoint(self, path: Path | str) -> Any:
        """Return the checkpoint in a file, with tensors on the CPU, without executing its code."""
        return codec.read(Path(path))
