"""The checks of one checkpoint, a file or a folder, and its loading: all up to the first fault.

A sharded checkpoint is a folder: ``record.pth`` is the record without sharded tensors; these are in
the format of ``torch.distributed.checkpoint`` beside it. The sidecar has the digests of the files.
Tensors are read whole, or each process reads its rows only.

A checkpoint is damaged only if its bytes are not those that were written: an intact one that cannot
be used here must never be renamed as damaged. Tools run the same checks without reading tensors,
and report what they find: :mod:`helios.checkpoint.status`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, IntEnum
from functools import cached_property
from pathlib import Path, PosixPath, WindowsPath
from typing import TYPE_CHECKING, Any, TypeAlias, final

from helios.checkpoint import file_names
from helios.checkpoint.record import REQUIRED, Record
from helios.checkpoint.sidecar import Sidecar, check_schema
from helios.counters import TrainingState
from helios.errors import CheckpointError, DamagedCheckpointError, IncompatibleCheckpointError
from helios.storage.container_checks import check_container, check_directory
from helios.storage.files import FileFacts, as_local_path, digest_file

if TYPE_CHECKING:
    from torch import Tensor

    from helios.core.sharded_tensors import RowShare
    from helios.storage.dcp_folder import TensorFolder

_LOGGER = logging.getLogger(__name__)

# Modules whose objects the released versions of helios-ml pickled; Helios writes none of them.
_OLD_MODULES = ("helios.", "pathlib.")
_COUNTERS = ("global_epoch", "global_iteration")


RECORD_NAME = "record.pth"
METADATA_NAME = ".metadata"
INDEX_NAME = "index.pth"
_ROWS = ".distcp"


def join_digests(facts: Mapping[str, FileFacts]) -> str:
    """Return the digest of a sharded checkpoint, by the digests of its files."""
    table = {name: each.digest for name, each in facts.items()}
    text = json.dumps(table, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def unmigrated(path: Path) -> IncompatibleCheckpointError:
    """Return the error for a file of helios-ml, with the way to migrate it."""
    return IncompatibleCheckpointError(
        f"{path} was written by helios-ml, the earlier package, in a format that is no longer "
        f"read. Migrate it with: python -m chkpt_migrator {path.parent}"
    )


# ---- the checks of a checkpoint


class Condition(Enum):
    """What a start of ``fit`` can do with a file."""

    GOOD = "good"
    DAMAGED = "damaged"
    UNMIGRATED = "unmigrated"
    NEWER = "newer"
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"
    ASIDE = "put aside"


class Checked(Enum):
    """How far the bytes of a file were verified."""

    NOTHING = "nothing"
    SUMS = "sums"
    DIGEST = "digest"


class Depth(IntEnum):
    """How much of a file is read besides its sidecar; each level includes those before it.

    The header is the directory of the container. Without a sidecar, the structure is read with it,
    which takes a second for some ten thousand tensors.
    """

    HEADER = 1
    STRUCTURE = 2
    BYTES = 3


Check: TypeAlias = tuple[Callable[[], None], Condition]
"""A check, and the condition of a file that fails it without being damaged."""


class FileChecks:
    """The checks of one checkpoint, in the order of its methods, and their results.

    Args:
        path: the ``.pth`` file or ``.ckpt`` folder; its sidecar is expected beside it.
        share: what is read of sharded tensors; ``None`` for everything.
        watch: called with numbers of bytes while all of them are read.

    Attributes:
        path: as given.
        record_path: the file of the record.
        size: the size of all files in bytes.
        sidecar: its sidecar, if there is one and it can be read.
        checked: how its bytes were compared.
        tree: its content; ``None`` until it is read.
        names: types and functions that it refers to but a checkpoint never does.
    """

    def __init__(
        self,
        path: Path,
        share: RowShare | None = None,
        watch: Callable[[int], object] | None = None,
    ) -> None:
        self.path = self.record_path = path
        self.size = 0
        self.sidecar: Sidecar | None = None
        self.checked = Checked.NOTHING
        self.tree: Any = None
        self.names: list[str] = []
        self._share = share
        self._watch = watch

    def read_sidecar(self) -> None:
        """Read the sidecar, if there is one."""
        self.sidecar = read_sidecar(self.path)

    def find_files(self) -> None:
        """Check that all files are there, with the sizes that they were written with.

        Raises:
            DamagedCheckpointError: if a file of a folder is missing, or has another size.
            OSError: if the file system cannot read a file.
        """
        with self.path.open("rb") as handle:
            self.size = os.fstat(handle.fileno()).st_size

    def check_header(self) -> None:
        """Check the directory of the container, and that name and sidecar agree."""
        check_directory(self.record_path)
        if (sidecar := self.sidecar) is not None:
            state = {"global_epoch": sidecar.epoch, "global_iteration": sidecar.iteration}
            said = {
                file_names.KEY_TRAINING_STATE: state,
                file_names.KEY_NUM_REPLICAS: sidecar.num_replicas,
            }
            check_agreement(self.path.name, said, sidecar)

    def compare_bytes(self) -> None:
        """Compare every byte with the digest, or the records with the container's checksums.

        Raises:
            DamagedCheckpointError: if the bytes differ.
            IncompatibleCheckpointError: if they are those of the old file that it was migrated
                from.
            OSError: if the file system cannot read a file.
        """
        self.checked = Checked.DIGEST if self._verify() else Checked.SUMS

    def _verify(self) -> bool:
        """Return whether every byte of the record was compared with a digest."""
        path, sidecar = self.path, self.sidecar
        if sidecar is None or not sidecar.digest:
            check_container(path, self._watch)
            return False
        found = digest_file(path, self._watch)
        if found == sidecar.digest:
            return True
        if found == sidecar.source_digest:
            # The old file was put back: it is intact, and must not be renamed.
            raise unmigrated(path)
        raise DamagedCheckpointError(
            f"{path} is damaged: its bytes do not match the digest in its sidecar. "
            "Remove it, or use another checkpoint."
        )

    def read_structure(self) -> None:
        """Read the content without its tensors, and the names of types that loading rejects."""
        from helios.storage import codec

        with self._reading():
            find = self._find_sharded(("",))
            self.tree, self.names = codec.read_structure(self.record_path, find)

    def read(self, safe_types: list[Any], *, maps: bool) -> None:
        """Read the content, with tensors on the CPU."""
        from helios.storage import codec

        maps = maps and self.checked is Checked.DIGEST
        with self._reading():
            find = self._find_sharded(() if self._share is None else self._share.prefixes)
            self.tree = codec.read(self.record_path, safe_types, maps=maps, find_sharded=find)

    def _find_sharded(self, deferred: tuple[str, ...]) -> Callable[[str], Tensor] | None:
        """Return what finds sharded tensors by name; those with a prefix are not read yet."""
        return None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except DamagedCheckpointError as error:
            if self.checked is not Checked.DIGEST:
                raise
            # The cause is something else, such as an older PyTorch: if it were renamed as damaged,
            # every good checkpoint of the run would be lost.
            raise IncompatibleCheckpointError(
                f"{self.record_path} holds the bytes that were written, but cannot be read here: "
                f"{error} It may have been written with another version of PyTorch. Nothing was "
                "renamed."
            ) from error

    def of_content(self) -> tuple[Check, ...]:
        """Return the checks of the content; each may rely on those before it."""
        return (
            (self._refuse_unmigrated, Condition.UNMIGRATED),
            (self._refuse_names, Condition.FOREIGN),
            (self._refuse_foreign, Condition.FOREIGN),
            (self._check_format, Condition.NEWER),
            (self._check_keys, Condition.FOREIGN),
            (lambda: check_agreement(self.path.name, self.tree, self.sidecar), Condition.FOREIGN),
        )

    def _refuse_unmigrated(self) -> None:
        keys = self.tree if isinstance(self.tree, Mapping) else {}
        # A user's own object may contain a path, as the files of helios-ml do.
        if file_names.KEY_SCHEMA not in keys:
            refuse_old_globals(self.path, self.names)
            if file_names.KEY_TRAINING_STATE in keys:
                raise unmigrated(self.path)

    def _refuse_names(self) -> None:
        if self.names:
            raise IncompatibleCheckpointError(
                f"{self.path} refers to {', '.join(self.names)}, which no checkpoint does. None of "
                "it was called; do not load the file unless you know who wrote it."
            )

    def _refuse_foreign(self) -> None:
        if not isinstance(self.tree, Mapping) or file_names.KEY_SCHEMA not in self.tree:
            kind = type(self.tree).__name__
            raise self._foreign(f"it holds a {kind} without {file_names.KEY_SCHEMA!r}")

    def _check_format(self) -> None:
        check_schema(self.tree[file_names.KEY_SCHEMA], name=str(self.path))

    def _check_keys(self) -> None:
        required = (file_names.KEY_SCHEMA, file_names.KEY_VERSION, *REQUIRED)
        missing = [key for key in required if key not in self.tree]
        state = self.tree.get(file_names.KEY_TRAINING_STATE)
        counters = state if isinstance(state, Mapping) else {}
        missing += [key for key in _COUNTERS if key not in counters]
        if missing:
            raise self._foreign(f"it lacks {', '.join(map(repr, missing))}")
        numbers = [counters[key] for key in _COUNTERS] + [self.tree[file_names.KEY_NUM_REPLICAS]]
        if any(type(number) is not int for number in numbers):
            raise self._foreign("its counters are not integers")

    def _foreign(self, reason: str) -> IncompatibleCheckpointError:
        return IncompatibleCheckpointError(
            f"{self.path} is not a checkpoint of Helios: {reason}. Move it to another folder, or "
            "fix the path."
        )


@final
class FolderChecks(FileChecks):
    """The checks of a sharded checkpoint; a file in it that no save has written is not read."""

    def find_files(self) -> None:
        """Check the files that the sidecar knows; without one, only reading can reveal damage."""
        self._sizes = {each.name: each.stat().st_size for each in sorted(self.path.iterdir())}
        self._facts = {} if self.sidecar is None else self.sidecar.files
        for name, facts in self._facts.items():
            found = self._sizes.get(name)
            if found != facts.size:
                fault = (
                    f"has {found} bytes instead of {facts.size}" if found else "is missing or empty"
                )
                raise DamagedCheckpointError(
                    f"{self.path} is damaged: its file {name} {fault}. Copy it back, or use "
                    "another checkpoint."
                )
        self.size = sum(self._sizes.values())
        self.record_path = self.path / RECORD_NAME

    @cached_property
    def _rows(self) -> TensorFolder:
        from helios.storage.dcp_folder import TensorFolder

        return TensorFolder(self.path)

    def _verify(self) -> bool:
        """Compare the files; the processes of a machine that load together share those of rows."""
        first, step = 0, 1
        if self._share is not None:
            from helios.distributed.collectives import get_dist_info

            info = get_dist_info()
            first, step = info.local_rank, info.local_world_size
        rows = sorted(name for name in self._sizes if name.endswith(_ROWS))[first::step]
        for name in (RECORD_NAME, METADATA_NAME, INDEX_NAME, *rows):
            expected = self._facts[name].digest if name in self._facts else ""
            if expected and digest_file(self.path / name, self._watch) != expected:
                raise DamagedCheckpointError(
                    f"{self.path / name} is damaged: its bytes do not match the digest in the "
                    "sidecar. Remove the checkpoint, or use another one."
                )
        is_verified = bool(self.sidecar is not None and self.sidecar.digest)
        if not is_verified:
            check_container(self.record_path, self._watch)
            self._rows.check(rows, self._watch)
        return is_verified

    def _find_sharded(self, deferred: tuple[str, ...]) -> Callable[[str], Tensor]:
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


def checks_of(
    path: Path, share: RowShare | None = None, watch: Callable[[int], object] | None = None
) -> FileChecks:
    """Return the checks of a file or a folder, as its name says; see :class:`FileChecks`."""
    return (FolderChecks if file_names.is_folder(path) else FileChecks)(path, share, watch)


def refuse_old_globals(path: Path, names: Iterable[str]) -> None:
    """Refuse a file that refers to objects that only helios-ml wrote.

    Raises:
        IncompatibleCheckpointError: with the way to migrate the file.
    """
    if any(name.startswith(_OLD_MODULES) for name in names):
        raise unmigrated(path)


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


def try_sidecar(path: Path) -> Sidecar | None:
    """Return the sidecar of a checkpoint, or ``None`` if there is none that can be read."""
    try:
        return read_sidecar(path)
    except (CheckpointError, OSError):
        return None


def load(
    path: Path, safe_types: Iterable[Any] = (), *, maps: bool = False, share: RowShare | None = None
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
    path: Path, safe_types: Iterable[Any] = (), *, maps: bool = False, share: RowShare | None = None
) -> Loaded:
    """Load a file that a running script may delete at any moment; see :func:`load`.

    Raises:
        FileNotFoundError: if the file was deleted, before or during reading.
    """
    try:
        return _load(checks_of(path, share), list(safe_types), maps=maps)
    except (CheckpointError, OSError) as error:
        # A file that was deleted while it is read may look damaged in any way.
        if file_names.is_gone(path):
            raise FileNotFoundError(gone_text(path)) from error
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"The checkpoint {path} could not be read: {error}. Nothing was renamed; check the "
            "disk and the permissions, and start again."
        ) from error


def _load(file: FileChecks, safe_types: list[Any], *, maps: bool) -> Loaded:
    # Commands that only list checkpoints use this module, and need no PyTorch.
    from helios.storage import codec

    file.read_sidecar()
    file.find_files()
    if file.sidecar is not None and not file.sidecar.digest:
        # A run that stores no digest compares no bytes.
        file.check_header()
    else:
        file.compare_bytes()
    if file.sidecar is None:
        _LOGGER.warning(
            "The checkpoint %s has no sidecar: its bytes were not verified against a digest.",
            file.path,
        )
    try:
        file.read(safe_types, maps=maps)
    except IncompatibleCheckpointError:
        refuse_old_globals(file.record_path, codec.unsafe_globals(file.record_path))
        raise
    for check, _ in file.of_content():
        check()
    return Loaded(file.path, file.tree, file.sidecar)


def gone_text(path: Path) -> str:
    """Return the message for a file that does not exist, or no longer exists."""
    return (
        f"There is no file at {path}. A running script may have deleted it meanwhile, if it "
        "keeps only some checkpoints: use a newer one. Otherwise, fix the path."
    )


def check_agreement(name: str, payload: dict[str, Any], sidecar: Sidecar | None) -> None:
    """Compare the facts in name, sidecar and payload.

    Raises:
        DamagedCheckpointError: if they disagree on (epoch, iteration) or ``num_replicas``, as after
            files were swapped. Files of another program, without a number of replicas, keep its
            names, and are not compared.
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
    from helios.checkpoint.frozen import require_whole

    place = as_local_path("load_checkpoint(path=...)", path)
    if place.is_dir() and not file_names.is_folder(place):
        raise CheckpointError(
            f"load_checkpoint(path=...) must be a checkpoint, got the folder {place}. Pass "
            "find_last_checkpoint(folder) for its newest one."
        )
    payload = load(place, safe_types).payload
    require_whole(payload[file_names.KEY_MODEL], path)
    state = TrainingState(**payload[file_names.KEY_TRAINING_STATE])
    return payload | {file_names.KEY_TRAINING_STATE: state}


def get_trainer_safe_types_for_load() -> list[Any]:
    """Return the types, beside plain ones, that ``weights_only`` must admit for old checkpoints."""
    return [TrainingState, PosixPath, WindowsPath]


def register_trainer_types_for_safe_load() -> None:
    """Register these types with ``torch.serialization.add_safe_globals``."""
    # What only lists checkpoints uses this module, and needs no PyTorch.
    import torch

    torch.serialization.add_safe_globals(get_trainer_safe_types_for_load())
