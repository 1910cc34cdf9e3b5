"""The two forms of a checkpoint, a file or a folder: how each is verified and read.

A sharded checkpoint is a folder: ``record.pth`` is the record without sharded tensors; these are in
the format of ``torch.distributed.checkpoint`` beside it. The sidecar has the digests of the files.
Tensors are read whole, or each process reads its rows only.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from helios.checkpoint import file_names
from helios.checkpoint.sidecar import Sidecar
from helios.errors import DamagedCheckpointError, IncompatibleCheckpointError
from helios.storage.container_checks import check_container, check_directory
from helios.storage.files import FileFacts, digest_file

if TYPE_CHECKING:
    from torch import Tensor

    from helios.core.sharded_tensors import RowShare
    from helios.storage.dcp_folder import TensorFolder

RECORD_NAME = "record.pth"
METADATA_NAME = ".metadata"
INDEX_NAME = "index.pth"
_ROWS = ".distcp"


class Contents(ABC):
    """The content of a checkpoint.

    Args:
        path: the ``.pth`` file or ``.ckpt`` folder.

    Attributes:
        path: as given.
        record_path: the file of the record.
        watch: called with numbers of bytes while they are compared; ``None`` for none.
    """

    def __init__(self, path: Path, record_path: Path) -> None:
        self.path = path
        self.record_path = record_path
        self.watch: Callable[[int], object] | None = None

    @property
    @abstractmethod
    def size(self) -> int:
        """The size of all files in bytes."""

    @abstractmethod
    def compare_bytes(self, sidecar: Sidecar | None, share: RowShare | None = None) -> bool:
        """Compare the bytes with those that were written.

        Args:
            sidecar: holds the digest; without one, the checksums of the container's records are
                used.
            share: compare only what one process needs of sharded tensors.

        Returns:
            Whether every byte of the record was compared with a digest.

        Raises:
            DamagedCheckpointError: if the bytes differ.
            IncompatibleCheckpointError: if they are those of the old file that it was migrated
                from.
            OSError: if the file system cannot read a file.
        """

    @abstractmethod
    def read(self, safe_types: list[Any], *, maps: bool, share: RowShare | None) -> Any:
        """Read the record; its tensors are on the CPU.

        Args:
            safe_types: types that may be created.
            maps: whether tensors of the record may be mapped from the file.
            share: what this process holds of the networks: their sharded tensors are deferred
                then, and others are whole.

        Raises:
            Exception: as :func:`helios.storage.codec.read`.
        """

    @abstractmethod
    def read_structure(self) -> tuple[Any, list[str]]:
        """Return the tree of the record with deferred tensors, and the rejected names.

        Raises:
            Exception: as :func:`helios.storage.codec.read_structure`.
        """

    def check_container(self) -> None:
        """Check the container of the record; raises as :func:`check_directory`."""
        check_directory(self.record_path)


@final
class WholeFile(Contents):
    """A checkpoint that is one file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, path)

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        with self.path.open("rb") as handle:
            return os.fstat(handle.fileno()).st_size

    def compare_bytes(self, sidecar: Sidecar | None, share: RowShare | None = None) -> bool:
        """Compare the file with its digest; see the base."""
        path = self.path
        if sidecar is not None and sidecar.digest:
            found = digest_file(path, self.watch)
            if found != sidecar.digest:
                if found == sidecar.source_digest:
                    # The old file was put back: it is intact, and must not be renamed.
                    raise unmigrated(path)
                raise DamagedCheckpointError(
                    f"{path} is damaged: its bytes do not match the digest in its sidecar. "
                    "Remove it, or use another checkpoint."
                )
            return True
        check_container(path, self.watch)
        return False

    def read(self, safe_types: list[Any], *, maps: bool, share: RowShare | None) -> Any:
        """Read the file; see the base."""
        from helios.storage import codec

        return codec.read(self.path, safe_types, maps=maps)

    def read_structure(self) -> tuple[Any, list[str]]:
        """Return the tree of the file; see the base."""
        from helios.storage import codec

        return codec.read_structure(self.path)


@final
class ShardedFolder(Contents):
    """A checkpoint that is a folder; a file in it that no save has written is not read.

    Args:
        path: the folder.
        sidecar: knows its files; without one, only reading them can reveal damage.

    Raises:
        DamagedCheckpointError: if a file is missing, or has another size than when it was written.
        OSError: if the file system cannot read it.
    """

    def __init__(self, path: Path, sidecar: Sidecar | None) -> None:
        super().__init__(path, path / RECORD_NAME)
        self._facts = {} if sidecar is None else sidecar.files
        self._sizes = {each.name: each.stat().st_size for each in sorted(path.iterdir())}
        for name, facts in self._facts.items():
            found = self._sizes.get(name)
            if found != facts.size:
                fault = (
                    f"has {found} bytes instead of {facts.size}" if found else "is missing or empty"
                )
                raise DamagedCheckpointError(
                    f"{path} is damaged: its file {name} {fault}. Copy it back, or use another "
                    "checkpoint."
                )

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(self._sizes.values())

    @cached_property
    def _rows(self) -> TensorFolder:
        from helios.storage.dcp_folder import TensorFolder

        return TensorFolder(self.path)

    def compare_bytes(self, sidecar: Sidecar | None, share: RowShare | None = None) -> bool:
        """Compare the files with their digests; see the base.

        The processes of a machine that load together share the files with rows.
        """
        first, step = 0, 1
        if share is not None:
            from helios.distributed.collectives import get_dist_info

            info = get_dist_info()
            first, step = info.local_rank, info.local_world_size
        rows = sorted(name for name in self._sizes if name.endswith(_ROWS))[first::step]
        for name in (RECORD_NAME, METADATA_NAME, INDEX_NAME, *rows):
            expected = self._facts[name].digest if name in self._facts else ""
            if expected and digest_file(self.path / name, self.watch) != expected:
                raise DamagedCheckpointError(
                    f"{self.path / name} is damaged: its bytes do not match the digest in the "
                    "sidecar. Remove the checkpoint, or use another one."
                )
        is_verified = bool(sidecar is not None and sidecar.digest)
        if not is_verified:
            check_container(self.record_path, self.watch)
            self._rows.check(rows, self.watch)
        return is_verified

    def read(self, safe_types: list[Any], *, maps: bool, share: RowShare | None) -> Any:
        """Read the record, and sharded tensors in full or deferred; see the base."""
        from helios.storage import codec

        find = self._make_finder(() if share is None else share.prefixes)
        return codec.read(self.record_path, safe_types, maps=maps, find_sharded=find)

    def read_structure(self) -> tuple[Any, list[str]]:
        """Return the tree of the record with deferred tensors; see the base."""
        from helios.storage import codec

        return codec.read_structure(self.record_path, self._make_finder(("",)))

    def _make_finder(self, deferred: tuple[str, ...]) -> Callable[[str], Tensor]:
        """Return what finds sharded tensors by name; those with a prefix are not read yet."""
        from helios.core.sharded_tensors import make_deferred_tensor, value_of

        tensors = self._rows.tensors
        found: dict[Any, Tensor] = {}

        def find(name: str) -> Tensor:
            if name not in tensors:
                raise DamagedCheckpointError(
                    f"{self.path} is damaged: it lacks the tensor {name}. Remove the checkpoint, "
                    "or use another one."
                )
            stored, is_deferred = tensors[name], name.startswith(deferred)
            # Tied tensors are one tensor.
            place = stored.place, is_deferred
            if place not in found:
                tensor = make_deferred_tensor(stored.shape, stored.dtype, stored)
                found[place] = tensor if is_deferred else value_of(tensor)
            return found[place]

        return find


def join_digests(facts: Mapping[str, FileFacts]) -> str:
    """Return the digest of a sharded checkpoint, by the digests of its files."""
    table = {name: each.digest for name, each in facts.items()}
    text = json.dumps(table, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def open_contents(path: Path, sidecar: Sidecar | None = None) -> Contents:
    """Return the contents of a checkpoint, by its name.

    Args:
        path: the file or folder.
        sidecar: that of the checkpoint; ``None`` without one.

    Raises:
        CheckpointError: as :class:`ShardedFolder`.
        OSError: if the file system cannot read it.
    """
    return ShardedFolder(path, sidecar) if file_names.is_folder(path) else WholeFile(path)


def unmigrated(path: Path) -> IncompatibleCheckpointError:
    """Return the error for a file of helios-ml, with the way to migrate it."""
    return IncompatibleCheckpointError(
        f"{path} was written by helios-ml, the earlier package, in a format that is no longer "
        f"read. Migrate it with: python -m chkpt_migrator {path.parent}"
    )
