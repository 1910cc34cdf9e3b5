"""Reads and verifies one checkpoint, and classifies failures.

A file is damaged only if its bytes are not those that were written: an intact file that cannot be
used here must never be renamed as damaged.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helios.checkpoint import file_names, schema_upgrades
from helios.checkpoint.contents import Contents, open_contents
from helios.checkpoint.record import Record
from helios.checkpoint.sidecar import Sidecar, check_schema
from helios.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompatibleCheckpointError,
)
from helios.state import TrainingState
from helios.storage.local_paths import as_local_path

if TYPE_CHECKING:
    from helios.core.sharded_tensors import RowShare

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read.

    Attributes:
        path: the file.
        payload: its content, with tensors on the CPU.
        sidecar: its sidecar, if there is one.
    """

    path: Path
    payload: dict[str, Any]
    sidecar: Sidecar | None

    @property
    def record(self) -> Record:
        """The content, by name."""
        return Record.from_payload(self.payload)


def read_sidecar(path: Path) -> Sidecar | None:
    """Return the sidecar of a checkpoint, or ``None`` if it has none.

    Args:
        path: the ``.pth`` file or ``.ckpt`` folder, or the sidecar itself.

    Raises:
        DamagedCheckpointError: if the sidecar is damaged.
        IncompatibleCheckpointError: if a later version wrote it in another format.
        OSError: if the file system cannot read the file.
    """
    place = file_names.sidecar_path(path)
    try:
        data = place.read_bytes()
    except FileNotFoundError:
        return None
    return Sidecar.from_json(data.decode("utf-8", "replace"), name=str(place))


def read_step(path: Path) -> int | None:
    """Return the optimizer steps of a checkpoint; ``None`` without a sidecar that states them."""
    try:
        sidecar = read_sidecar(path)
    except (CheckpointError, OSError):
        return None
    return None if sidecar is None else sidecar.step


def load(
    path: Path,
    safe_types: Iterable[Any] = (),
    *,
    maps: bool = False,
    share: RowShare | None = None,
) -> Loaded:
    """Verify and read one checkpoint; nothing is renamed, and nothing in it is executed.

    Args:
        path: the ``.pth`` file or ``.ckpt`` folder; its sidecar is expected beside it.
        safe_types: types that may be built (``Model.types_for_safe_load``).
        maps: whether the tensors of a file with a digest may be mapped from the file, for a reader
            that copies what it keeps.
        share: what this process holds of sharded networks: their tensors in a sharded checkpoint
            are deferred then, and only these rows are verified; ``None`` for whole tensors.

    Raises:
        DamagedCheckpointError: if it is damaged.
        IncompatibleCheckpointError: if it is intact, but from a later version or helios-ml, not a
            checkpoint at all, or refers to types that are not allowed.
        CheckpointError: if there is no file, or the file system cannot read it.
        MemoryError: if its tensors do not fit into memory.
    """
    try:
        return load_present(path, safe_types, maps=maps, share=share)
    except FileNotFoundError as error:
        raise CheckpointError(str(error)) from error


def load_present(
    path: Path,
    safe_types: Iterable[Any] = (),
    *,
    maps: bool = False,
    share: RowShare | None = None,
) -> Loaded:
    """Load a file that a running training may delete at any moment.

    Args:
        path: as in :func:`load`.
        safe_types: as in :func:`load`.
        maps: as in :func:`load`.
        share: as in :func:`load`.

    Raises:
        FileNotFoundError: if the file was deleted, before or during reading.
    """
    try:
        return _load(path, list(safe_types), maps=maps, share=share)
    except CheckpointError as error:
        # A file that was deleted while it is read may look damaged in any way.
        if file_names.is_gone(path):
            raise FileNotFoundError(gone_text(path)) from error
        raise


def gone_text(path: Path) -> str:
    """Return the message for a file that does not exist, or no longer."""
    return (
        f"There is no file at {path}. A running training may have deleted it in the meantime, if "
        "it keeps only some checkpoints: use a newer one. Otherwise, correct the path."
    )


def _load(path: Path, safe_types: list[Any], *, maps: bool, share: RowShare | None) -> Loaded:
    try:
        sidecar = read_sidecar(path)
        content = open_contents(path)
        is_verified = content.compare_bytes(sidecar, share)
        if sidecar is None:
            _LOGGER.warning(
                "The checkpoint %s has no sidecar: its bytes were not verified against a digest.",
                path,
            )
        payload = _read(content, safe_types, is_verified=is_verified, maps=maps, share=share)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} could not be read: {error}. Nothing was renamed; check the "
            "disk and the permissions, and start again."
        ) from error
    schema_upgrades.refuse_foreign(path, payload)
    check_schema(payload[file_names.KEY_SCHEMA], name=str(path))
    payload = schema_upgrades.upgrade(payload, schema_upgrades.STEPS)
    schema_upgrades.refuse_missing_keys(path, payload)
    check_agreement(path.name, payload, sidecar)
    return Loaded(path, payload, sidecar)


def _read(
    content: Contents,
    safe_types: list[Any],
    *,
    is_verified: bool,
    maps: bool,
    share: RowShare | None,
) -> Any:
    # Commands that only list checkpoints use this module, and need no PyTorch.
    from helios.storage import codec

    path = content.record_path
    try:
        return content.read(safe_types, maps=maps and is_verified, share=share)
    except IncompatibleCheckpointError:
        schema_upgrades.refuse_old_globals(path, codec.unsafe_globals(path, safe_types))
        raise
    except DamagedCheckpointError as error:
        if not is_verified:
            raise
        # The cause is something else, such as an older PyTorch: if it were renamed as damaged,
        # every good checkpoint of the run would be lost.
        raise IncompatibleCheckpointError(
            f"{path} holds the bytes that were written, but cannot be read here: {error} It may "
            "have been written with another version of PyTorch. Nothing was renamed."
        ) from error


def check_agreement(name: str, payload: dict[str, Any], sidecar: Sidecar | None) -> None:
    """Compare the facts in name, sidecar and payload.

    Raises:
        DamagedCheckpointError: if they disagree on (epoch, iteration) or ``num_replicas``, as
            after files were swapped. Files of another program, which do not say how many replicas
            trained them, keep its names, and are not compared.
    """
    if not payload[file_names.KEY_NUM_REPLICAS] and (sidecar is None or not sidecar.names_run):
        return
    state = payload[file_names.KEY_TRAINING_STATE]
    places = {f"({state['global_epoch']}, {state['global_iteration']})"}
    counts = {str(payload[file_names.KEY_NUM_REPLICAS])}
    if file_names.parse(name) is not None:
        places.add(str(file_names.parse(name)))
    if sidecar is not None:
        places.add(f"({sidecar.epoch}, {sidecar.iteration})")
        counts.add(str(sidecar.num_replicas))
    if len(places) > 1 or len(counts) > 1:
        raise DamagedCheckpointError(
            f"{name} is damaged: its name, its sidecar and its content disagree on (epoch, "
            f"iteration) {' / '.join(sorted(places))} or num_replicas {' / '.join(sorted(counts))}."
            " Remove it, or restore the original names of the files."
        )


def load_checkpoint(path: str | Path, safe_types: Iterable[Any] = ()) -> dict[str, Any]:
    """Return the content of a checkpoint, for scripts and notebooks.

    Args:
        path: the ``.pth`` file or ``.ckpt`` folder.
        safe_types: types that may be built besides tensors and plain values.

    Returns:
        The keys of the file; ``training_state`` as a :class:`~helios.state.TrainingState`, tensors
        on the CPU.

    Raises:
        CheckpointError: if the file is damaged, of another version, or cannot be read.
    """
    payload = load(as_local_path("load_checkpoint(path=...)", path), safe_types).payload
    state = TrainingState(**payload[file_names.KEY_TRAINING_STATE])
    return payload | {file_names.KEY_TRAINING_STATE: state}
