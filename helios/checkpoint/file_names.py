"""Names of the files of a checkpoint, and how they are parsed and listed.

``<name>_epoch_<E>_iter_<I>[_<metadata>].pth`` is the checkpoint; a sharded one is a folder that
ends with ``.ckpt``. Its sidecar ends with ``.json`` instead; ``.tmp`` and ``.damaged`` are appended
to each of them.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from helios.errors import ArgumentError, CheckpointError, UsageError
from helios.storage.files import TEMPORARY_SUFFIX, as_local_path, find_free

Found = TypeVar("Found")

SCHEMA = 5
"""Version of the format; files with a higher one are refused."""
FIRST_SCHEMA = 5
"""The version of the first release; files with a lower one are refused."""

CONFIG_NAME = "config.yaml"
"""The file with the command-line options of a run."""

# The keys that are read without decoding the file; `record` has all of them.
KEY_SCHEMA = "schema"
KEY_VERSION = "version"
KEY_TRAINING_STATE = "training_state"
KEY_CURSOR = "cursor"
KEY_MODEL = "model"
KEY_PLUGINS = "plugins"
KEY_NUM_REPLICAS = "num_replicas"
KEY_OPTIONS = "options"
KEY_MIGRATED_FROM = "migrated_from"

SUFFIX = ".pth"
FOLDER_SUFFIX = ".ckpt"
SIDECAR_SUFFIX = ".json"
DAMAGED_SUFFIX = ".damaged"

_SUFFIXES = (SUFFIX, FOLDER_SUFFIX)
_FOLDER = re.compile(r"\.ckpt(\.tmp|(\.[0-9]+)?\.damaged)?$")
_NUMBERS = re.compile(r"epoch_([0-9]+)_iter_([0-9]+)")
_SEPARATORS = ("/", "\\", "\0")
_MAX_NAME_BYTES = 255
_MAX_LISTINGS = 50


def stem(name: str, epoch: int, iteration: int) -> str:
    """Return the name of a checkpoint without suffix.

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
    """Return the stem with the result of ``Model.append_metadata_to_chkpt_name``.

    A result that begins with the given name replaces it, an empty one adds nothing, anything else
    is appended with ``_``.

    Raises:
        UsageError: if the result is not a string, contains a path separator, is too long, or would
            change the numbers that identify the checkpoint.

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
            f"path separators and not too long, got {returned!r}. Remove them."
        )
    if parse(result) != parse(stem):
        raise UsageError(
            "Model.append_metadata_to_chkpt_name(...) must not change epoch and iteration in the "
            f"name {stem!r}, but {result!r} is parsed as {parse(result)}. Do not begin with a "
            "digit, and name no other epoch and iteration."
        )
    return result


def _is_file_name(stem: str) -> bool:
    longest = f"{stem}{SIDECAR_SUFFIX}.99{DAMAGED_SUFFIX}"
    has_separator = any(separator in stem for separator in _SEPARATORS)
    return not has_separator and len(os.fsencode(longest)) <= _MAX_NAME_BYTES


def parse(path: str | Path) -> tuple[int, int] | None:
    """Return (epoch, iteration) of a file's name, or ``None`` if it has none.

    The last pair of numbers counts, so a run may be named ``epoch_1_iter_2``; metadata that
    contains another pair is refused when the name is created.

    Example:
        >>> parse("my_epoch_run_epoch_3_iter_100_accuracy_0.89.pth")
        (3, 100)
    """
    found = _NUMBERS.findall(Path(path).name)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def iteration_of(path: str | Path) -> int:
    """Return the iteration of a file's name; 0 if it has none."""
    return (parse(path) or (0, 0))[1]


def run_name(stem: str) -> str:
    """Return the name of the run in a checkpoint's stem; all of it if it names no iteration.

    Example:
        >>> run_name("cifar10_epoch_3_iter_100_accuracy_0.89")
        'cifar10'
    """
    places = list(_NUMBERS.finditer(stem))
    return stem[: places[-1].start()].rstrip("_") if places else stem


def belongs_to(path: Path, name: str) -> bool:
    """Return whether a checkpoint belongs to the run of this name, judged by its file name.

    The name of a run, and its metadata, may contain the words ``epoch`` and ``iter`` themselves.

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
    """Return the path of a checkpoint's sidecar."""
    return path.with_suffix(SIDECAR_SUFFIX)


def damaged_path(path: Path) -> Path:
    """Return a free name for a damaged file, so that no earlier one is overwritten."""
    return find_free(
        lambda n: path.with_name(f"{path.name}{f'.{n}' if n > 1 else ''}{DAMAGED_SUFFIX}")
    )


def is_checkpoint(path: Path) -> bool:
    """Return whether a file or folder is a committed checkpoint, judged by its name."""
    return path.suffix in _SUFFIXES and parse(path) is not None


def is_folder(path: Path) -> bool:
    """Return whether a checkpoint, draft or damaged checkpoint is a folder, judged by its name."""
    return _FOLDER.search(path.name) is not None


def is_present(path: Path) -> bool:
    """Return whether there is a file, or the folder of a sharded checkpoint."""
    return path.is_dir() if is_folder(path) else path.is_file()


def is_temporary(path: Path) -> bool:
    """Return whether a file is an incomplete part of a checkpoint, judged by its name."""
    written = path.with_suffix("")
    is_part = written.suffix in (*_SUFFIXES, SIDECAR_SUFFIX)
    return path.suffix == TEMPORARY_SUFFIX and is_part and parse(path) is not None


def is_damaged(path: Path) -> bool:
    """Return whether a file or folder was put aside as damaged, judged by its name."""
    return path.suffix == DAMAGED_SUFFIX and parse(path) is not None


def is_damaged_checkpoint(path: Path) -> bool:
    """Return whether a file is a checkpoint, not a sidecar, that was put aside as damaged."""
    return is_damaged(path) and not set(_SUFFIXES).isdisjoint(path.suffixes)


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the committed checkpoints directly in a folder, oldest first.

    A running script commits a checkpoint and then deletes older ones: one listing of a large folder
    may miss both. The folder is listed again until nothing has changed.
    """
    found = list_checkpoints(folder)
    for _ in range(_MAX_LISTINGS):
        before, found = found, list_checkpoints(folder)
        if found == before:
            break
    return found


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the committed checkpoints of one listing, if no other process writes to the folder."""
    return select_checkpoints(list_files(folder))


def list_files(folder: Path) -> list[Path]:
    """Return the files and sharded checkpoints of one listing, sorted by name.

    There are none if there is no folder.
    """
    try:
        with os.scandir(folder) as entries:
            # Read from the listing itself: a separate query could find the file deleted.
            names = sorted(
                entry.name
                for entry in entries
                if (entry.is_dir() if is_folder(Path(entry.name)) else entry.is_file())
            )
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in names]


def select_checkpoints(files: list[Path]) -> list[Path]:
    """Return the committed checkpoints among these files, oldest first."""
    found = [path for path in files if is_checkpoint(path)]
    return sorted(found, key=lambda path: (parse(path) or (0, 0), path.name))


def listings(folder: Path) -> Iterator[list[Path]]:
    """Yield the checkpoints of a folder, again whenever the reader finds that one was deleted.

    Args:
        folder: the folder of a run, which may be running and delete what is listed here.

    Raises:
        CheckpointError: if one was deleted every time.
    """
    for _ in range(_MAX_LISTINGS):
        yield find_checkpoints(folder)
    raise CheckpointError(
        f"The checkpoints in {folder} could not be read: a running script deleted each of them "
        "before it was read completely. Save less often in that run, or keep more with "
        "CheckpointStore(keep_last=...)."
    )


def search(
    folder: Path, look: Callable[[Path], Found | None], *, listed: list[Path] | None = None
) -> Found | None:
    """Look at the checkpoints of a folder, newest first, until something is found.

    Args:
        folder: the folder of a run, which may be running and delete what is looked at here after
            committing a newer one: the search then starts again.
        look: returns what it finds in a file, or ``None`` to continue with the next older one;
            raises FileNotFoundError if the file was deleted.
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
    """Return whether the file was deleted; one that cannot be accessed was not."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def find_last_checkpoint(root: Path | None) -> Path | None:
    """Return the last checkpoint directly in a folder.

    Args:
        root: the folder that holds the files; it need not exist.

    Returns:
        The ``.pth`` file or ``.ckpt`` folder with the highest (epoch, iteration), or ``None`` if
        there is none.
    """
    if root is not None:
        root = as_local_path("find_last_checkpoint(root=...)", root)
    found = [] if root is None else find_checkpoints(root)
    return found[-1] if found else None
