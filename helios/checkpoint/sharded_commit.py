"""How rank 0 commits a sharded checkpoint: it waits for all parts, and renames the folder."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from helios.checkpoint import file_names
from helios.checkpoint.rank_part import RankPart, SavePlan
from helios.checkpoint.shard_index import (
    INDEX_NAME,
    RECORD_NAME,
    IndexedFile,
    RankNote,
    ShardIndex,
    join_notes,
    rank_file,
)
from helios.checkpoint.sidecar import Sidecar
from helios.errors import SaveError
from helios.storage import codec, files
from helios.storage.digest import digest_file

_POLL_SECONDS = (0.001, 0.05)
# A rank whose file has not grown for so long is taken for dead, unless rank 0 needs long itself.
_STALL_SECONDS = 60.0
_SLOWER = 10.0
# After a collective has failed, a process is probably gone.
_LOST_SECONDS = 5.0


@final
class RankParts:
    """The parts of all ranks of one save, as rank 0 sees them.

    Args:
        own: the part of rank 0.
        is_lost: whether a collective of this process has failed.
        clock: returns seconds.
    """

    def __init__(
        self,
        own: RankPart,
        is_lost: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = own.plan
        self._own = own
        self._is_lost = is_lost
        self._clock = clock
        self._failure = ""
        self._has_news = threading.Event()

    def fail(self, token: str, text: str) -> None:
        """End the wait for a part that could not be written, if it is one of this save."""
        if token == self.plan.token:
            self._failure = text
            self._has_news.set()

    def write_own(self) -> tuple[RankNote, float]:
        """Write the part of rank 0; returns its note and the seconds that it took.

        Raises:
            OSError: if the disk fails.
        """
        begin = self._clock()
        return self._own.write(), self._clock() - begin

    def try_own(self) -> None:
        """Write the part of rank 0 while others write theirs; the commit meets an error again."""
        with contextlib.suppress(OSError):
            self._own.write()

    def collect(self, own: RankNote, seconds: float) -> list[RankNote]:
        """Return the notes of all ranks when their files are on the disk.

        Args:
            own: the note of rank 0.
            seconds: how long rank 0 has written.

        Raises:
            SaveError: if a rank has failed, or seems to be gone.
            OSError: if the folder cannot be read.
        """
        notes = {0: own}
        watch, pause = _Progress(self._clock), _POLL_SECONDS[0]
        while True:
            for rank in range(self.plan.num_ranks):
                if rank not in notes and (note := self._read(rank)) is not None:
                    notes[rank] = note
            if len(notes) == self.plan.num_ranks:
                self._check_sizes(notes)
                return [notes[rank] for rank in range(self.plan.num_ranks)]
            if self._failure:
                raise SaveError(self._failure)
            limit = _LOST_SECONDS if self._is_lost() else max(_STALL_SECONDS, _SLOWER * seconds)
            if watch.stands_still(self._measure(), limit):
                absent = [rank for rank in range(self.plan.num_ranks) if rank not in notes]
                raise SaveError(
                    f"rank {absent[0]} of {self.plan.num_ranks} has not written its part of "
                    f"{self.plan.path}, and nothing has changed there for {limit:.0f} seconds"
                )
            self._has_news.wait(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])

    def _read(self, rank: int) -> RankNote | None:
        with contextlib.suppress(FileNotFoundError):
            return RankNote.from_json(self.plan.note(rank).read_text())
        with contextlib.suppress(FileNotFoundError):
            text = self.plan.failure(rank).read_text()
            self.fail(self.plan.token, text or f"rank {rank} could not write its part")
        return None

    def _measure(self) -> dict[str, int]:
        """Return the size of each file of the draft, as far as it is still there."""
        sizes = {}
        with os.scandir(self.plan.draft) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    sizes[entry.name] = entry.stat().st_size
        return sizes

    def _check_sizes(self, notes: dict[int, RankNote]) -> None:
        for rank, note in notes.items():
            path = self.plan.draft / rank_file(rank, self.plan.num_ranks)
            size = path.stat().st_size
            if size != note.size:
                raise SaveError(
                    f"{path} has {size} bytes, but rank {rank} has written {note.size}. All "
                    "processes must see the same folder"
                )


class _Progress:
    """Whether something has changed lately."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: Any = None
        self._since = clock()

    def stands_still(self, state: Any, seconds: float) -> bool:
        if state != self._seen:
            self._seen, self._since = state, self._clock()
        return self._clock() - self._since > seconds


def commit_folder(parts: RankParts, code: Any, seal: Callable[[str], Sidecar]) -> Sidecar:
    """Write the record, wait for all parts, and rename the folder; returns the sidecar.

    Args:
        parts: the parts of all ranks.
        code: the encoded payload without sharded tensors.
        seal: returns the sidecar for a digest.

    Raises:
        OSError: if a part or another file cannot be written. The draft is removed.
    """
    plan = parts.plan
    try:
        _remove_other_drafts(plan)
        files.make_folder(plan.draft)
        own, seconds = parts.write_own()
        record = _write_record(plan, code)
        index = join_notes(parts.collect(own, seconds), record=record)
        _write_index(plan, index)
        digest = digest_file(plan.draft / INDEX_NAME) if plan.hashes else ""
        _remove_others(plan.draft, index)
        sidecar = seal(digest)
        files.write_text_durably(file_names.sidecar_path(plan.path), sidecar.to_json())
        files.fsync_folder(plan.draft)
        files.replace(plan.draft, plan.path)
    except BaseException:
        with contextlib.suppress(OSError):
            if not plan.path.exists():
                files.unlink(file_names.sidecar_path(plan.path), missing_ok=True)
            files.remove_folder(plan.draft)
        raise
    files.fsync_folder(plan.path.parent)
    return sidecar


def _write_record(plan: SavePlan, code: Any) -> IndexedFile:
    path = plan.draft / RECORD_NAME
    digest = codec.write_file(path, code, hashes=plan.hashes)
    return IndexedFile(RECORD_NAME, path.stat().st_size, (digest,) if digest else ())


def _write_index(plan: SavePlan, index: ShardIndex) -> None:
    with files.create(plan.draft / INDEX_NAME) as handle:
        files.write(handle, index.to_json().encode())
        files.fsync(handle)


def _remove_others(folder: Path, index: ShardIndex) -> None:
    """Remove the notes, and what an earlier save may have left in the folder."""
    for path in folder.iterdir():
        if path.name not in index.names:
            files.unlink(path, missing_ok=True)


def _remove_other_drafts(plan: SavePlan) -> None:
    """Remove drafts of saves that have failed, which another rank was still writing to."""
    for path in file_names.list_files(plan.path.parent):
        if file_names.is_temporary(path) and file_names.is_folder(path) and path != plan.draft:
            with contextlib.suppress(OSError):
                files.remove_folder(path)


def remove_checkpoint(path: Path) -> None:
    """Remove the folder of a checkpoint; a kill leaves it whole, or as a draft."""
    doomed = files.temporary_path(path)
    files.remove_folder(doomed)
    with contextlib.suppress(FileNotFoundError):
        files.replace(path, doomed)
    files.remove_folder(doomed)
