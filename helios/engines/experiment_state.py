"""What a script without a trainer saves of its parts, and how it gets that back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helios.engines import experiment_parts
from helios.engines.process_member import ProcessMember
from helios.storage import codec


class ExperimentState(ProcessMember):
    """Packs the states of parts, with that of the precision; writes and reads what it packed."""

    @abstractmethod
    def _scaler_state(self) -> dict[str, Any]:
        """Return what the precision has to save."""

    @abstractmethod
    def _load_scaler(self, state: Mapping[str, Any]) -> None:
        """Take that back, if it is there."""

    def pack_checkpoint(
        self,
        model: Any = None,
        criterion: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        **extra: Any,
    ) -> dict[str, Any]:
        """Return the states of parts as one dict, without a trace of the engine in names (E33).

        A part gives ``"<part>_state_dict"``, a dict of parts ``"<part>_<key>_state_dict"``, and
        the scaler of fp16 ``"scaler"``. What is ``None`` is left out.

        Args:
            model: an object with a state, or a dict of such; the same for the next three.
            criterion: likewise.
            optimizer: likewise.
            scheduler: likewise.
            **extra: is taken over as it is.

        Raises:
            ArgumentError: for a part without a state, and for a name that is taken.
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
        """Give parts their states back, whichever engine has packed them (E35, E36).

        Args:
            checkpoint: what :meth:`pack_checkpoint` has returned.
            model: an object, or a dict of such; the same for the next three.
            criterion: likewise.
            optimizer: likewise.
            scheduler: likewise.
            strict: whether a part without a state is an error, not a warning.

        Raises:
            StateError: for a part without a state, if ``strict``.
        """
        parts = (model, criterion, optimizer, scheduler)
        table = dict(zip(experiment_parts.PARTS, parts, strict=True))
        experiment_parts.unpack(table, checkpoint, strict=strict)
        self._load_scaler(checkpoint)

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: Path | str) -> None:
        """Write a checkpoint, whole or not at all; the master process only (E37).

        Others return at once: call :meth:`barrier` before they read it.
        """
        if self.is_master_process:
            experiment_parts.save(checkpoint, Path(path))

    def load_checkpoint(self, path: Path | str) -> Any:
        """Return the checkpoint in a file, its tensors on the CPU; nothing in it is executed."""
        return codec.read(Path(path))
