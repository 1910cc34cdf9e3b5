"""Names: the files it consists of, and what stands in a file's name.

``<name>_epoch_<E>_iter_<I>[_<metadata>].pth`` is the checkpoint, ``.json`` in place of ``.pth``
its sidecar; ``.tmp`` and ``.damaged`` are added behind either.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from helios.errors import ArgumentError, CheckpointError, UsageError
from helios.storage.files import TEMPORARY_SUFFIX

Found = TypeVar("Found")

SCHEMA = 2
"""Version of the format; a file with a higher one is not read."""

# The keys that are read from files as they lie there; all of them are in `record`.
KEY_SCHEMA = "schema"
KEY_VERSION = "version"
KEY_TRAINING_STATE = "training_state"
KEY_CURSOR = "cursor"
KEY_MODEL = "model"
KEY_PLUGINS = "plugins"
KEY_NUM_REPLICAS = "num_replicas"
KEY_OPTIONS = "options"
KEY_MIGRATED_FROM = "migrated_from"

SOURCE_DIGEST = "source_digest"
"""The entry of a migrated file's sidecar that tells the file that it was made from."""

SUFFIX = ".pth"
SIDECAR_SUFFIX = ".json"
DAMAGED_SUFFIX = ".damaged"

_NUMBERS = re.compile(r"epoch_([0-9]+)_iter_([0-9]+)")
_SEPARATORS = ("/", "\\", "\0")
_MAX_NAME_BYTES = 255
_MAX_LISTINGS = 50


def stem(name: str, epoch: int, iteration: int) -> str:
    """Return the name of a checkpoint without suffix (H21, C1).

    Args:
        name: the run's name.
        epoch: ``TrainingState.global_epoch``.
        iteration: ``TrainingState.global_iteration``.

    Raises:
        ArgumentError: for a run name that cannot be part of a file name.

    Example:
        >>> stem("cifar10", 3, 100)
        'cifar10_epoch_3_iter_100'
    """
    result = _join(name, epoch, iteration)
    if not _is_file_name(result):
        raise ArgumentError(
            "The name of a run must be usable as a file name, without path separators and not "
            f"too long, got {name!r}. Pass another run_name, or give the model another save_name."
        )
    return result


def _join(name: str, epoch: int, iteration: int) -> str:
    return f"{name}_epoch_{epoch}_iter_{iteration}"


def apply_metadata(stem: str, returned: str) -> str:
    """Return the stem with what ``Model.append_metadata_to_chkpt_name`` made of it (H22, C2).

    A result that begins with the given name replaces it, an empty one adds nothing, anything else
    is appended with ``_``.

    Raises:
        UsageError: if the result is no string, holds a path separator, is too long, or would
            change the numbers by which the checkpoint is found again.

    Example:
        >>> apply_metadata("cifar10_epoch_3_iter_100", "accuracy_0.89")
        'cifar10_epoch_3_iter_100_accuracy_0.89'
    """
    if not isinstance(returned, str):
        raise UsageError(
            "Model.append_metadata_to_chkpt_name(...) must return a string, got "
            f"{type(returned).__name__}. Return the name that it was given to add nothing."
        )
    if not returned:
        return stem
    result = returned if returned.startswith(stem) else f"{stem}_{returned}"
    if not _is_file_name(result):
        raise UsageError(
            "Model.append_metadata_to_chkpt_name(...) must return part of a file name, without "
            f"path separators and not too long, got {returned!r}. Leave them out."
        )
    if parse(result) != parse(stem):
        raise UsageError(
            "Model.append_metadata_to_chkpt_name(...) must leave epoch and iteration in the name "
            f"{stem!r} as they are, but {result!r} reads as {parse(result)}. Begin with another "
            "character than a digit, and name no other epoch and iteration."
        )
    return result


def _is_file_name(stem: str) -> bool:
    longest = f"{stem}{SIDECAR_SUFFIX}.99{DAMAGED_SUFFIX}"
    has_separator = any(separator in stem for separator in _SEPARATORS)
    return not has_separator and len(os.fsencode(longest)) <= _MAX_NAME_BYTES


def parse(path: str | Path) -> tuple[int, int] | None:
    """Return (epoch, iteration) of a file's name, or ``None`` if it names none (H23, C1).

    The last pair of numbers counts, so a run may be called ``epoch_1_iter_2``; metadata that
    names another pair is refused when the name is made.

    Example:
        >>> parse("my_epoch_run_epoch_3_iter_100_accuracy_0.89.pth")
        (3, 100)
    """
    found = _NUMBERS.findall(Path(path).name)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def run_name(stem: str) -> str:
    """Return the name of the run in a checkpoint's stem; all of it if it names no iteration.

    Example:
        >>> run_name("cifar10_epoch_3_iter_100_accuracy_0.89")
        'cifar10'
    """
    places = list(_NUMBERS.finditer(stem))
    return stem[: places[-1].start()].rstrip("_") if places else stem


def belongs_to(path: Path, name: str) -> bool:
    """Whether a checkpoint is one of the run of this name, judged by its own.

    The name of a run, and its metadata, may hold the words themselves.

    Example:
        >>> belongs_to(Path("cifar10_epoch_3_iter_100_accuracy_0.89.pth"), "cifar10")
        True
        >>> belongs_to(Path("my_cifar10_epoch_3_iter_100.pth"), "cifar10")
        False
    """
    place = parse(path)
    if place is None:
        return False
    start = _join(name, *place)
    return path.name.startswith(start) and not path.name[len(start)].isdigit()


def sidecar_path(path: Path) -> Path:
    """Return where the sidecar of a checkpoint lies."""
    return path.with_suffix(SIDECAR_SUFFIX)


def damaged_path(path: Path) -> Path:
    """Return a free name for a damaged file: nothing that was kept aside earlier is lost."""
    result, number = path.with_name(path.name + DAMAGED_SUFFIX), 1
    while result.exists():
        number += 1
        result = path.with_name(f"{path.name}.{number}{DAMAGED_SUFFIX}")
    return result


def is_checkpoint(path: Path) -> bool:
    """Whether a file is a committed checkpoint, judged by its name."""
    return path.suffix == SUFFIX and parse(path) is not None


def is_temporary(path: Path) -> bool:
    """Whether a file is a part of a checkpoint that was never completed, judged by its name."""
    written = path.with_suffix("")
    is_part = written.suffix in (SUFFIX, SIDECAR_SUFFIX)
    return path.suffix == TEMPORARY_SUFFIX and is_part and parse(path) is not None


def is_damaged(path: Path) -> bool:
    """Whether a file was put aside as damaged, judged by its name."""
    return path.suffix == DAMAGED_SUFFIX and parse(path) is not None


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the committed checkpoints directly in a folder, oldest first.

    A run that goes on there commits a checkpoint and then deletes older ones: one listing of a
    large folder may miss both. The folder is listed until nothing has changed in between.
    """
    found = list_checkpoints(folder)
    for _ in range(_MAX_LISTINGS):
        before, found = found, list_checkpoints(folder)
        if found == before:
            break
    return found


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the committed checkpoints of one listing, for who alone writes into a folder."""
    return select_checkpoints(list_files(folder))


def list_files(folder: Path) -> list[Path]:
    """Return the files of one listing, sorted by name; none where there is no folder."""
    try:
        with os.scandir(folder) as entries:
            # What the listing itself says of a file: asked for later, it may be deleted.
            names = sorted(entry.name for entry in entries if entry.is_file())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in names]


def select_checkpoints(files: list[Path]) -> list[Path]:
    """Return the committed checkpoints among these files, oldest first."""
    found = [path for path in files if is_checkpoint(path)]
    return sorted(found, key=lambda path: (parse(path) or (0, 0), path.name))


def listings(folder: Path) -> Iterator[list[Path]]:
    """Yield the checkpoints of a folder, once more whenever the reader finds one of them gone.

    Args:
        folder: that of a run, which may go on and delete what is listed here.

    Raises:
        CheckpointError: if the reader has found one gone every time.
    """
    for _ in range(_MAX_LISTINGS):
        yield find_checkpoints(folder)
    raise CheckpointError(
        f"The checkpoints in {folder} could not be read: each was deleted before its end was "
        "reached, by a run that goes on there. Let that run save more rarely, or keep more with "
        "CheckpointStore(keep_last=...)."
    )


def search(
    folder: Path, look: Callable[[Path], Found | None], *, listed: list[Path] | None = None
) -> Found | None:
    """Look at the checkpoints of a folder, newest first, until something is found.

    Args:
        folder: that of a run, which may go on and delete what is looked at here, behind a newer one
            that it has committed: the search begins again then.
        look: returns what it finds in a file, or ``None`` to go on with the next older one; raises
            FileNotFoundError if the file is gone.
        listed: the checkpoints to begin with, if the folder was listed before.

    Raises:
        CheckpointError: as :func:`listings`.
    """
    for paths in itertools.chain([] if listed is None else [listed], listings(folder)):
        try:
            found = (look(path) for path in reversed(paths))
            return next((each for each in found if each is not None), None)
        except FileNotFoundError:
            continue
    return None


def is_gone(path: Path) -> bool:
    """Whether there is no such file any more; one that cannot be looked at is not gone."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def find_last_checkpoint(root: Path | None) -> Path | None:
    """Return the last checkpoint directly in a folder (API section 12, H23).

    Args:
        root: the folder that holds the files; it need not exist.

    Returns:
        The ``.pth`` file with the highest (epoch, iteration), or ``None`` if there is none.
    """
    found = [] if root is None else find_checkpoints(Path(root))
    return found[-1] if found else None
