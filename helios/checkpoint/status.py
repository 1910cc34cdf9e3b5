"""Examines checkpoints without loading them, for tools that only read.

The order of the checks, and the names of their results, are those of :mod:`loading`. Tensors are
never loaded, not even to verify every byte, so large files need little memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

from helios.checkpoint import file_names, loading, schema_upgrades
from helios.checkpoint.contents import Contents, WholeFile, open_contents
from helios.checkpoint.sidecar import Sidecar, check_schema
from helios.errors import (
    DamagedCheckpointError,
    IncompatibleCheckpointError,
)

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
class Status:
    """Facts about one file.

    Attributes:
        path: the file.
        condition: what it means to a start of ``fit``.
        reason: why it is not good, in a sentence that names the file; empty if it is.
        size: its size in bytes.
        place: (epoch, iteration) in its name; ``None`` if there is none.
        sidecar: its sidecar, if there is one and it can be read.
        checked: how far its bytes were compared.
        needs: names of types that loading builds only if ``types_for_safe_load`` returns them.
    """

    path: Path
    condition: Condition
    reason: str = ""
    size: int = 0
    place: tuple[int, int] | None = None
    sidecar: Sidecar | None = None
    checked: Checked = Checked.NOTHING
    needs: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether no fault was found."""
        return self.condition is Condition.GOOD

    @property
    def state(self) -> str:
        """The condition in words; "not verified" if no fault was found, but not all was read."""
        is_verified = self.checked in (Checked.DIGEST, Checked.SUMS)
        return "not verified" if self.is_good and not is_verified else self.condition.value

    @property
    def step(self) -> int | None:
        """Optimizer steps at its safe point; ``None`` if unknown."""
        return None if self.sidecar is None else self.sidecar.step


def examine(
    path: Path, depth: Depth = Depth.GLANCE, watch: Callable[[int], object] | None = None
) -> Status:
    """Examine a file; nothing in it is executed, and nothing is renamed.

    Args:
        path: the ``.pth`` file or ``.ckpt`` folder; its sidecar is expected beside it.
        depth: what to read of it.
        watch: called with numbers of bytes while all of them are read.
    """
    return look_into(path, depth, watch)[0]


def look_into(
    path: Path, depth: Depth = Depth.STRUCTURE, watch: Callable[[int], object] | None = None
) -> tuple[Status, Any]:
    """Examine a file, and return its content as far as it can be shown.

    Args:
        path: as in :func:`examine`.
        depth: as in :func:`examine`.
        watch: as in :func:`examine`.

    Returns:
        The status, and the tree of the file from
        :func:`helios.storage.codec.read_structure`; ``None`` if it was not or cannot be read.
    """
    look = _Look(path, watch)
    for check in _CHECKS:
        if check.reads <= look.limit(depth) and (check.shows_content or not look.has_fault):
            look.attempt(check)
    return look.status(), look.tree


class _FaultError(Exception):
    """A fault that a check has found."""

    def __init__(self, condition: Condition, reason: str) -> None:
        super().__init__(reason)
        self.condition = condition


class _Look:
    """The examination of one file: facts, and the first fault that was found."""

    def __init__(self, path: Path, watch: Callable[[int], object] | None) -> None:
        self.path = path
        self.tree: Any = None
        self._watch = watch
        self._names: list[str] = []
        self._size = 0
        self._sidecar: Sidecar | None = None
        self._checked = Checked.NOTHING
        self._fault: tuple[Condition, str] | None = None
        self._contents: Contents = WholeFile(path)

    @property
    def has_fault(self) -> bool:
        return self._fault is not None

    def limit(self, depth: Depth) -> Depth:
        """Return what to read: without a sidecar, only the content says what a file is."""
        is_alone = depth is Depth.HEADER and self._sidecar is None
        return Depth.STRUCTURE if is_alone and self._checked is not Checked.NOTHING else depth

    def status(self) -> Status:
        condition, reason = self._fault or (Condition.GOOD, "")
        return Status(
            self.path,
            condition,
            reason=reason,
            size=self._size,
            place=file_names.parse(self.path),
            sidecar=self._sidecar,
            checked=self._checked,
            needs=tuple(self._names),
        )

    def attempt(self, check: _Check) -> None:
        """Run a check; what it raises is recorded, if it is the first fault."""
        try:
            check.run(self)
        except _FaultError as fault:
            self._note(fault.condition, str(fault))
        except DamagedCheckpointError as error:
            self._note(Condition.DAMAGED, str(error))
        except IncompatibleCheckpointError as error:
            self._note(check.when_incompatible, str(error))
        except (OSError, MemoryError, RecursionError) as error:
            what = str(error) or type(error).__name__
            self._note(Condition.UNREADABLE, f"{self.path} could not be read: {what}.")

    def _note(self, condition: Condition, reason: str) -> None:
        if file_names.is_gone(self.path):
            # A file that was deleted while it is read may look damaged in any way.
            condition, reason = Condition.UNREADABLE, loading.gone_text(self.path)
        self._fault = self._fault or (condition, reason)

    def find_files(self) -> None:
        """Check that all files are there, with the sizes that they were written with."""
        self._contents = open_contents(self.path)
        self._contents.watch = self._watch
        self._size = self._contents.size

    def read_sidecar(self) -> None:
        self._sidecar = loading.read_sidecar(self.path)

    def check_header(self) -> None:
        """Check the directory of the container, and that name and sidecar agree."""
        self._contents.check_container()
        self._checked = Checked.CONTAINER
        if (sidecar := self._sidecar) is not None:
            state = {"global_epoch": sidecar.epoch, "global_iteration": sidecar.iteration}
            said = {
                file_names.KEY_TRAINING_STATE: state,
                file_names.KEY_NUM_REPLICAS: sidecar.num_replicas,
            }
            loading.check_agreement(self.path.name, said, sidecar)

    def compare_bytes(self) -> None:
        """Compare every byte with the digest, or the records with the container's checksums."""
        is_verified = self._contents.compare_bytes(self._sidecar)
        self._checked = Checked.DIGEST if is_verified else Checked.SUMS

    def read_structure(self) -> None:
        try:
            self.tree, self._names = self._contents.read_structure()
        except DamagedCheckpointError as error:
            if self._checked is not Checked.DIGEST:
                raise
            raise _FaultError(
                Condition.UNREADABLE,
                f"{self.path} holds the bytes that were written, but cannot be read here: {error} "
                "It may have been written with another version of PyTorch.",
            ) from error
        if self._checked is Checked.CONTAINER:
            self._checked = Checked.STRUCTURE

    def refuse_functions(self) -> None:
        found = [name for name in self._names if name.split(".")[0] in _NEVER_TYPES]
        if found:
            raise _FaultError(
                Condition.FOREIGN,
                f"{self.path} refers to {', '.join(found)}, which no checkpoint does. None of it "
                "was called; do not load the file unless you know who wrote it.",
            )

    def refuse_old_objects(self) -> None:
        # A user's own object may contain a path, as the files of helios-ml do.
        is_ours = isinstance(self.tree, Mapping) and file_names.KEY_SCHEMA in self.tree
        schema_upgrades.refuse_old_globals(self.path, [] if is_ours else self._names)

    def refuse_foreign(self) -> None:
        is_old = isinstance(self.tree, Mapping) and file_names.KEY_TRAINING_STATE in self.tree
        try:
            schema_upgrades.refuse_foreign(self.path, self.tree)
        except IncompatibleCheckpointError as error:
            condition = Condition.UNMIGRATED if is_old else Condition.FOREIGN
            raise _FaultError(condition, str(error)) from error

    def check_format(self) -> None:
        check_schema(self.tree[file_names.KEY_SCHEMA], name=str(self.path))

    def check_keys(self) -> None:
        schema_upgrades.refuse_missing_keys(self.path, self.tree)

    def check_numbers(self) -> None:
        state = self.tree[file_names.KEY_TRAINING_STATE]
        counters = [state[name] for name in ("global_epoch", "global_iteration")]
        if any(type(number) is not int for number in (*counters, self.tree["num_replicas"])):
            raise _FaultError(
                Condition.FOREIGN,
                f"{self.path} is not a checkpoint of Helios: its counters are not integers. Move "
                "it to another folder.",
            )

    def check_agreement(self) -> None:
        loading.check_agreement(self.path.name, self.tree, self._sidecar)


@dataclasses.dataclass(frozen=True)
class _Check:
    """A check of a file.

    Attributes:
        reads: what of the file it reads.
        run: raises if it finds a fault.
        when_incompatible: what a file is that cannot be used for another reason than damage.
        shows_content: whether it is also run after a fault, for what can be shown of the file.
    """

    reads: Depth
    run: Callable[[_Look], None]
    when_incompatible: Condition = Condition.FOREIGN
    shows_content: bool = False


# All checks of a file, in their order.
_CHECKS = (
    _Check(Depth.NAMES, _Look.find_files),
    _Check(Depth.SIDECAR, _Look.read_sidecar, Condition.NEWER),
    _Check(Depth.HEADER, _Look.check_header),
    _Check(Depth.BYTES, _Look.compare_bytes, Condition.UNMIGRATED),
    _Check(Depth.STRUCTURE, _Look.read_structure, shows_content=True),
    _Check(Depth.STRUCTURE, _Look.refuse_functions),
    _Check(Depth.STRUCTURE, _Look.refuse_old_objects, Condition.UNMIGRATED),
    _Check(Depth.STRUCTURE, _Look.refuse_foreign),
    _Check(Depth.STRUCTURE, _Look.check_format, Condition.NEWER),
    _Check(Depth.STRUCTURE, _Look.check_keys),
    _Check(Depth.STRUCTURE, _Look.check_numbers),
    _Check(Depth.STRUCTURE, _Look.check_agreement),
)
