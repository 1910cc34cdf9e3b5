"""The index of a sharded checkpoint: which rows of which tensor are where, and the digests.

A sharded checkpoint is a folder. ``record.pth`` is the record without sharded tensors; the rows
that each process held are in a file of its own, ``rank-<r>-of-<P>.safetensors``; ``index.json``
names all of them. Reading the index needs no PyTorch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from helios.errors import DamagedCheckpointError, IncompatibleCheckpointError, SaveError

INDEX_NAME = "index.json"
RECORD_NAME = "record.pth"
SCHEMA = 1
_RANK_FILE = re.compile(r"rank-[0-9]{5,}-of-[0-9]{5,}\.safetensors")


def rank_file(rank: int, num_ranks: int) -> str:
    """Return the name of the file with the rows of one process."""
    return f"rank-{rank:05d}-of-{num_ranks:05d}.safetensors"


@dataclasses.dataclass(frozen=True)
class RowRange:
    """Rows of a tensor in a file.

    Attributes:
        file: number of the file.
        first: the first row.
        rows: the number of rows.
        begin: where their bytes begin in the file.
    """

    file: int
    first: int
    rows: int
    begin: int


@dataclasses.dataclass(frozen=True)
class ShardedTensor:
    """A tensor whose rows are in several files.

    Attributes:
        code: its type, as safetensors names it.
        shape: the shape of the whole.
        pieces: its rows, in order and without gaps.
    """

    code: str
    shape: tuple[int, ...]
    pieces: tuple[RowRange, ...]


@dataclasses.dataclass(frozen=True)
class IndexedFile:
    """A file of the folder.

    Attributes:
        name: its name.
        size: its size in bytes.
        digests: SHA-256 of its blocks; of ``record.pth``, of the whole; empty without digests.
    """

    name: str
    size: int
    digests: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ShardIndex:
    """The content of ``index.json``.

    Attributes:
        tensors: the sharded tensors, by their path in the record.
        files: the files of the processes, by rank.
        record: the file of the record.
    """

    tensors: dict[str, ShardedTensor]
    files: tuple[IndexedFile, ...]
    record: IndexedFile

    @property
    def names(self) -> set[str]:
        """The names of all files of the folder."""
        return {INDEX_NAME, self.record.name, *(file.name for file in self.files)}

    def to_json(self) -> str:
        """Return the text of the file."""
        tensors = {
            name: {
                "dtype": tensor.code,
                "shape": tensor.shape,
                "pieces": [dataclasses.astuple(piece) for piece in tensor.pieces],
            }
            for name, tensor in self.tensors.items()
        }
        table = {
            "schema": SCHEMA,
            "piece": [field.name for field in dataclasses.fields(RowRange)],
            "record": dataclasses.asdict(self.record),
            "files": [dataclasses.asdict(file) for file in self.files],
            "tensors": tensors,
        }
        return json.dumps(table, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str, *, name: str) -> ShardIndex:
        """Read the text of the file.

        Args:
            text: what :meth:`to_json` returned.
            name: the file in messages.

        Raises:
            IncompatibleCheckpointError: if a later version wrote it in another format.
            DamagedCheckpointError: if it is damaged.
        """
        try:
            table = json.loads(text)
            schema = table["schema"]
            if type(schema) is int and schema > SCHEMA:
                raise IncompatibleCheckpointError(
                    f"{name} was written in format {schema}, and this version of Helios reads "
                    f"formats up to {SCHEMA}. Install the version that wrote it, or a later one."
                )
            index = cls(
                {key: _read_tensor(each) for key, each in table["tensors"].items()},
                tuple(map(_read_file, table["files"])),
                _read_file(table["record"]),
            )
            _check(index)
        except (AssertionError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise DamagedCheckpointError(
                f"{name} is damaged: it is not an index of a sharded checkpoint. Remove the "
                "checkpoint, or use another one."
            ) from None
        return index


def _read_tensor(table: Mapping[str, Any]) -> ShardedTensor:
    pieces = tuple(RowRange(*map(_number, piece)) for piece in table["pieces"])
    return ShardedTensor(str(table["dtype"]), tuple(map(_number, table["shape"])), pieces)


def _read_file(table: Mapping[str, Any]) -> IndexedFile:
    digests = tuple(map(str, table["digests"]))
    return IndexedFile(str(table["name"]), _number(table["size"]), digests)


def _number(value: Any) -> int:
    assert type(value) is int
    assert value >= 0
    return value


def _check(index: ShardIndex) -> None:
    assert index.record.name == RECORD_NAME
    for file in index.files:
        # A name with a path would lead out of the folder.
        assert _RANK_FILE.fullmatch(file.name)
    for tensor in index.tensors.values():
        assert _find_gap(tensor) is None
        assert all(piece.file < len(index.files) for piece in tensor.pieces)


def _find_gap(tensor: ShardedTensor) -> int | None:
    """Return the first row of a tensor that no piece has, or several have; ``None`` if none."""
    row = 0
    for piece in tensor.pieces:
        if piece.first != row or not piece.rows:
            return row
        row += piece.rows
    return None if row == (tensor.shape[0] if tensor.shape else 1) else row


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a process has written of a tensor.

    Attributes:
        code: its type, as safetensors names it.
        shape: the shape of the whole.
        first: the first row.
        rows: the number of rows.
        begin: where their bytes begin in its file.
    """

    code: str
    shape: tuple[int, ...]
    first: int
    rows: int
    begin: int


@dataclasses.dataclass(frozen=True)
class RankNote:
    """What a process says of the file that it has written.

    Attributes:
        size: the size of the file in bytes.
        digests: of its blocks; none without digests.
        tensors: what is in it, by name, also of tensors of which it has no row.
    """

    size: int
    digests: list[str]
    tensors: dict[str, Rows]

    def to_json(self) -> str:
        """Return it as text."""
        tensors = {name: dataclasses.astuple(rows) for name, rows in self.tensors.items()}
        return json.dumps({"size": self.size, "digests": self.digests, "tensors": tensors})

    @classmethod
    def from_json(cls, text: str) -> RankNote:
        """Return what :meth:`to_json` made the text of."""
        table = json.loads(text)
        tensors = {
            name: Rows(code, tuple(shape), *numbers)
            for name, (code, shape, *numbers) in table["tensors"].items()
        }
        return cls(table["size"], table["digests"], tensors)


def join_notes(notes: Sequence[RankNote], *, record: IndexedFile) -> ShardIndex:
    """Return the index of a checkpoint from the notes of all ranks.

    Raises:
        SaveError: if processes have written different tensors, or rows are missing.
    """
    num_ranks = len(notes)
    files = tuple(
        IndexedFile(rank_file(rank, num_ranks), note.size, tuple(note.digests))
        for rank, note in enumerate(notes)
    )
    tensors = {}
    for name, own in notes[0].tensors.items():
        parts = [note.tensors.get(name) for note in notes]
        if any(part is None or (part.code, part.shape) != (own.code, own.shape) for part in parts):
            raise _differing(name)
        pieces = tuple(
            RowRange(rank, part.first, part.rows, part.begin)
            for rank, part in enumerate(parts)
            if part is not None and part.rows
        )
        tensors[name] = ShardedTensor(own.code, own.shape, pieces)
        if _find_gap(tensors[name]) is not None:
            raise _differing(name)
    for note in notes:
        for name in note.tensors.keys() - tensors.keys():
            raise _differing(name)
    return ShardIndex(tensors, files, record)


def _differing(name: str) -> SaveError:
    return SaveError(
        f"The processes hold different rows or kinds of {name}, so that it could not be put "
        "together again. All processes must build the same networks and save the same values."
    )


def row_bytes(tensor: ShardedTensor, itemsize: int) -> int:
    """Return the bytes of one row of a tensor."""
    return math.prod(tensor.shape[1:]) * itemsize
