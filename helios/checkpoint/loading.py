"""The checks of one checkpoint, and its loading, which is these checks up to the first fault.

A file is damaged only if its bytes are not those that were written: an intact file that cannot be
used here must never be renamed as damaged. Tools run the same checks without reading tensors, and
report what they find: :mod:`helios.checkpoint.status`.
"""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from helios.checkpoint import file_names, schema_upgrades
from helios.checkpoint.contents import Contents, WholeFile, open_contents
from helios.checkpoint.record import Record
from helios.checkpoint.sidecar import Sidecar, check_schema
from helios.counters import TrainingState
from helios.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompatibleCheckpointError,
)
from helios.storage.local_paths import as_local_path

if TYPE_CHECKING:
    from helios.core.sharded_tensors import RowShare

_LOGGER = logging.getLogger(__name__)

# Packages with functions but no types of users: torch refuses most of them, too.
_NEVER_TYPES = frozenset(("builtins", "nt", "os", "posix", "runpy", "subprocess", "sys"))


class Condition(Enum):
    """What a file means to a start of ``fit``."""

    GOOD = "good"
    DAMAGED = "damaged"
    UNMIGRATED = "unmigrated"
    NEWER = "newer"
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"
    ASIDE = "put aside"


class Checked(Enum):
    """How far the bytes of a file were compared with what was written."""

    NOTHING = "nothing"
    CONTAINER = "container"
    STRUCTURE = "structure"
    SUMS = "sums"
    DIGEST = "digest"


class Depth(IntEnum):
    """What of a file is read; each level includes those before it.

    A glance reads names, the sidecar and the header, which is the directory of the container, and
    the structure only if there is no sidecar. Reading the structure takes a second for some ten
    thousand tensors.
    """

    NAMES = 1
    SIDECAR = 2
    HEADER = 3
    STRUCTURE = 4
    BYTES = 5

    GLANCE = HEADER


@dataclasses.dataclass(frozen=True)
class Check:
    """A check of a file.

    Attributes:
        reads: what of the file it reads.
        run: raises if it finds a fault.
        when_incompatible: what a file is that cannot be used for another reason than damage.
        shows_content: whether tools run it after a fault, too, for what can be shown of the file.
    """

    reads: Depth
    run: Callable[[], None]
    when_incompatible: Condition = Condition.FOREIGN
    shows_content: bool = False

    def condition(self, error: Exception) -> Condition:
        """Return what the file is in which this check has found a fault."""
        if isinstance(error, DamagedCheckpointError):
            return Condition.DAMAGED
        is_incompatible = isinstance(error, IncompatibleCheckpointError)
        # Intact bytes that look damaged here.
        if not is_incompatible or isinstance(error.__cause__, DamagedCheckpointError):
            return Condition.UNREADABLE
        return self.when_incompatible


class FileChecks(ABC):
    """The checks of one file, and the facts that they have found.

    Args:
        path: the ``.pth`` file or ``.ckpt`` folder; its sidecar is expected beside it.
        share: what is read of sharded tensors; ``None`` for everything.
        watch: called with numbers of bytes while all of them are read.

    Attributes:
        path: as given.
        size: the size of the file in bytes.
        sidecar: its sidecar, if there is one and it can be read.
        checked: how far its bytes were compared.
        tree: its content; ``None`` until it is read.
        names: types in it that loading builds only if ``types_for_safe_load`` returns them.
    """

    def __init__(
        self,
        path: Path,
        share: RowShare | None = None,
        watch: Callable[[int], object] | None = None,
    ) -> None:
        self.path = path
        self.size = 0
        self.sidecar: Sidecar | None = None
        self.checked = Checked.NOTHING
        self.tree: Any = None
        self.names: list[str] = []
        self._share = share
        self._watch = watch
        self._contents: Contents = WholeFile(path)

    def __iter__(self) -> Iterator[Check]:
        """Yield all checks in their order; each may rely on those before it."""
        yield Check(Depth.SIDECAR, self._read_sidecar, Condition.NEWER)
        yield Check(Depth.NAMES, self._find_files, shows_content=True)
        yield Check(Depth.HEADER, self._check_header)
        yield Check(Depth.BYTES, self._compare_bytes, Condition.UNMIGRATED)
        yield Check(Depth.STRUCTURE, self._read_content, shows_content=True)
        yield Check(Depth.STRUCTURE, self._refuse_functions)
        yield Check(Depth.STRUCTURE, self._refuse_old_objects, Condition.UNMIGRATED)
        yield Check(Depth.STRUCTURE, self._refuse_unmigrated, Condition.UNMIGRATED)
        yield Check(Depth.STRUCTURE, self._refuse_foreign)
        yield Check(Depth.STRUCTURE, self._check_format, Condition.NEWER)
        yield Check(Depth.STRUCTURE, self._check_keys)
        yield Check(Depth.STRUCTURE, self._check_numbers)
        yield Check(Depth.STRUCTURE, self._check_agreement)

    @abstractmethod
    def _read(self, contents: Contents) -> tuple[Any, list[str]]:
        """Return the content, and the names of types in it that loading would reject."""

    def _find_files(self) -> None:
        """Check that all files are there, with the sizes that they were written with."""
        self._contents = open_contents(self.path, self.sidecar)
        self._contents.watch = self._watch
        self.size = self._contents.size

    def _read_sidecar(self) -> None:
        self.sidecar = read_sidecar(self.path)

    def _check_header(self) -> None:
        """Check the directory of the container, and that name and sidecar agree."""
        self._contents.check_container()
        self.checked = Checked.CONTAINER
        if (sidecar := self.sidecar) is not None:
            state = {"global_epoch": sidecar.epoch, "global_iteration": sidecar.iteration}
            said = {
                file_names.KEY_TRAINING_STATE: state,
                file_names.KEY_NUM_REPLICAS: sidecar.num_replicas,
            }
            check_agreement(self.path.name, said, sidecar)

    def _compare_bytes(self) -> None:
        """Compare every byte with the digest, or the records with the container's checksums."""
        is_verified = self._contents.compare_bytes(self.sidecar, self._share)
        self.checked = Checked.DIGEST if is_verified else Checked.SUMS

    def _read_content(self) -> None:
        try:
            self.tree, self.names = self._read(self._contents)
        except DamagedCheckpointError as error:
            if self.checked is not Checked.DIGEST:
                raise
            # The cause is something else, such as an older PyTorch: if it were renamed as damaged,
            # every good checkpoint of the run would be lost.
            raise IncompatibleCheckpointError(
                f"{self._contents.record_path} holds the bytes that were written, but cannot be "
                f"read here: {error} It may have been written with another version of PyTorch. "
                "Nothing was renamed."
            ) from error
        if self.checked is Checked.CONTAINER:
            self.checked = Checked.STRUCTURE

    def _refuse_functions(self) -> None:
        found = [name for name in self.names if name.split(".")[0] in _NEVER_TYPES]
        if found:
            raise IncompatibleCheckpointError(
                f"{self.path} refers to {', '.join(found)}, which no checkpoint does. None of it "
                "was called; do not load the file unless you know who wrote it."
            )

    def _refuse_old_objects(self) -> None:
        # A user's own object may contain a path, as the files of helios-ml do.
        is_ours = isinstance(self.tree, Mapping) and file_names.KEY_SCHEMA in self.tree
        schema_upgrades.refuse_old_globals(self.path, [] if is_ours else self.names)

    def _refuse_unmigrated(self) -> None:
        schema_upgrades.refuse_unmigrated(self.path, self.tree)

    def _refuse_foreign(self) -> None:
        schema_upgrades.refuse_foreign(self.path, self.tree)

    def _check_format(self) -> None:
        check_schema(self.tree[file_names.KEY_SCHEMA], name=str(self.path))

    def _check_keys(self) -> None:
        schema_upgrades.refuse_missing_keys(self.path, self.tree)

    def _check_numbers(self) -> None:
        state = self.tree[file_names.KEY_TRAINING_STATE]
        counters = [state[name] for name in ("global_epoch", "global_iteration")]
        if any(type(number) is not int for number in (*counters, self.tree["num_replicas"])):
            raise IncompatibleCheckpointError(
                f"{self.path} is not a checkpoint of Helios: its counters are not integers. Move "
                "it to another folder."
            )

    def _check_agreement(self) -> None:
        check_agreement(self.path.name, self.tree, self.sidecar)


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
        return _Loading(path, list(safe_types), maps=maps, share=share).load()
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


@final
class _Loading(FileChecks):
    """The checks of a file whose tensors are read.

    Args:
        path: the file.
        safe_types: types that may be built.
        maps: whether verified tensors may be mapped from the file.
        share: as in :class:`FileChecks`.
    """

    def __init__(
        self, path: Path, safe_types: list[Any], *, maps: bool, share: RowShare | None
    ) -> None:
        super().__init__(path, share)
        self._types = safe_types
        self._maps = maps

    def load(self) -> Loaded:
        """Run the checks up to the first fault."""
        try:
            for check in self:
                if check.reads is not self._skipped:
                    check.run()
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint {self.path} could not be read: {error}. Nothing was renamed; "
                "check the disk and the permissions, and start again."
            ) from error
        return Loaded(self.path, self.tree, self.sidecar)

    @property
    def _skipped(self) -> Depth:
        """Comparing all bytes includes the header; a run that stores no digest compares none."""
        is_off = self.sidecar is not None and not self.sidecar.digest
        return Depth.BYTES if is_off else Depth.HEADER

    def _read(self, contents: Contents) -> tuple[Any, list[str]]:
        # Commands that only list checkpoints use this module, and need no PyTorch.
        from helios.storage import codec

        if self.sidecar is None:
            _LOGGER.warning(
                "The checkpoint %s has no sidecar: its bytes were not verified against a digest.",
                self.path,
            )
        maps = self._maps and self.checked is Checked.DIGEST
        try:
            return contents.read(self._types, maps=maps, share=self._share), []
        except IncompatibleCheckpointError:
            path = contents.record_path
            schema_upgrades.refuse_old_globals(path, codec.unsafe_globals(path, self._types))
            raise

    def _check_format(self) -> None:
        super()._check_format()
        self.tree = schema_upgrades.upgrade(self.tree, schema_upgrades.STEPS)


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
    from helios.checkpoint.frozen import require_whole

    payload = load(as_local_path("load_checkpoint(path=...)", path), safe_types).payload
    require_whole(payload[file_names.KEY_MODEL], path)
    state = TrainingState(**payload[file_names.KEY_TRAINING_STATE])
    return payload | {file_names.KEY_TRAINING_STATE: state}
