"""Sums a few numbers of each replica by name, in the order of the summation tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from helios.errors import UsageError
from helios.replicas.reduction_tree import assign, block_of, tree_sum
from helios.replicas.tree_reducer import PointToPoint

# Sums are floats, or tensors of a GPU that is not waited for.
_Scores: TypeAlias = dict[str, tuple[Any, float]]


def _add_scores(left: _Scores, right: _Scores) -> _Scores:
    """Return sums and weights by name; a name in only one of the two keeps its values."""
    total = dict(left)
    for name, (value, weight) in right.items():
        known = total.get(name)
        total[name] = (value, weight) if known is None else (known[0] + value, known[1] + weight)
    return total


def _add_up(tables: list[_Scores]) -> _Scores:
    """Add tables along the tree, with names in sorted order."""
    sums, found = tree_sum(tables, _add_scores), {}
    for name in sorted(sums):
        found[name] = sums[name]
    return found


def _as_scores(tables: Sequence[Mapping[str, Any]], *, waits: bool = True) -> list[_Scores]:
    """Return losses as sums with weights.

    Args:
        tables: losses by name: numbers, whose weight is 1, or means with their sums and weights.
        waits: whether those on a GPU are read; otherwise they stay there, in float64.
    """
    scores: list[_Scores] = []
    for table in tables:
        scores.append({})
        for name, loss in table.items():
            weight = 1.0
            if isinstance(loss, tuple):
                _, loss, weight = loss
            stays = not waits and isinstance(loss, Tensor) and loss.is_cuda
            number = loss.double().reshape(()) if stays else float(loss)
            scores[-1][name] = (number, weight)
    return scores


def _divide(total: Any, weight: float) -> Any:
    # A GPU multiplies by the reciprocal of a number of the host, which rounds twice.
    return total / (torch.full_like(total, weight) if isinstance(total, Tensor) else weight)


class NumberReducer:
    """Adds a few numbers of each replica, by name, in the order of the tree.

    The names are known from the last call, so a call needs one small exchange unless a process has
    a new name. Use one object for each kind of table.

    Args:
        num_replicas: leaves of the tree.
        num_processes: processes that run them.
        rank: number of this process in the group, from 0.
        group: the process group; ``None`` for that of all processes.
        device: the device that the group's backend needs.
        in_waves: whether replicas are assigned to the processes in waves.

    Attributes:
        numbers: whole numbers of this process that are added over all processes, exactly, with the
            next losses; as many on all processes.
        totals: their sums, after the losses were added.
        sums: the sums and weights of the last losses.
        means: their means in float64, before they were rounded to torch's default type.

    Raises:
        ArgumentError: unless 0 <= rank < num_processes <= num_replicas.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        num_processes: int = 1,
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        in_waves: bool = False,
    ) -> None:
        self._block = block_of(rank, num_processes, num_replicas, in_waves=in_waves)
        assignment = assign(num_processes, num_replicas, in_waves=in_waves)
        self._sizes = [len(block) for block in assignment]
        by_rank = [replica for block in assignment for replica in block]
        self._rows_in_order = sorted(range(num_replicas), key=by_rank.__getitem__)
        self._is_in_order = by_rank == [*range(num_replicas)]
        self._ranks = PointToPoint(num_processes, rank, group)
        self._device = device
        self._names: list[str] = []
        self.numbers: Sequence[float] = ()
        self.totals: Sequence[float] = ()
        self.sums: _Scores = {}
        self.means: Mapping[str, Any] = {}

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all replicas in order, exactly.

        Args:
            rows: one row for each replica of this process, of the same length on all processes.
        """
        if not self._ranks.others:
            return rows
        padded = self._pad(rows)
        found = [torch.empty_like(padded) for _ in self._sizes]
        dist.all_gather(found, padded, group=self._ranks.group)
        return self._cut(found)

    def _pad(self, rows: Tensor) -> Tensor:
        """Return the rows of this process, padded with zeros to the largest block."""
        padded = rows.new_zeros((max(self._sizes), *rows.shape[1:]))
        padded[: len(rows)] = rows
        return padded

    def _cut(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the rows of all replicas from the padded rows of each process."""
        rows = torch.cat([part[:size] for part, size in zip(parts, self._sizes, strict=True)])
        return rows if self._is_in_order else rows[self._rows_in_order]

    def sum_scores(
        self, tables: Sequence[Mapping[str, tuple[Any, Any]]]
    ) -> dict[str, tuple[float, float]]:
        """Return sum and weight of each name over all replicas, in sorted order.

        Args:
            tables: ``{name: (sum, weight)}`` of each replica of this process, in order. A replica
                may lack a name.

        Raises:
            UsageError: unless there is one table for each replica.
        """
        numbers = [
            {name: (float(total), float(weight)) for name, (total, weight) in table.items()}
            for table in tables
        ]
        return _add_up(self._exchange(numbers))

    def mean_losses(self, tables: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the mean of each name over the replicas that have it, in sorted order.

        Args:
            tables: losses of each replica of this process by name: numbers, or tensors of one
                element.

        Returns:
            Tensors without dimensions, of torch's default type, summed in float64. Where there is
            nothing to exchange, means of losses on a GPU are there, and nothing waits for it.
        """
        return self._average(self._exchange(_as_scores(tables, waits=bool(self._ranks.others))))

    def write_losses(self, tables: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return losses as a row of numbers for a message, of the same length on all processes.

        Args:
            tables: as in :meth:`mean_losses`.
        """
        return self._pad(self._as_rows(_as_scores(tables))).flatten()

    def read_losses(self, tables: Sequence[Mapping[str, Any]], rows: Tensor) -> dict[str, Tensor]:
        """Return what :meth:`mean_losses` returns, from the rows that all processes have written.

        Args:
            tables: the tables that this process has written.
            rows: the row of each process, in the order of ranks.
        """
        parts = rows.view(len(self._sizes), max(self._sizes), -1)
        return self._average(self._read(_as_scores(tables), self._cut(parts)))

    def _average(self, tables: list[_Scores]) -> dict[str, Tensor]:
        self.sums, dtype, means, rounded = _add_up(tables), torch.get_default_dtype(), {}, {}
        for name, (total, weight) in self.sums.items():
            means[name] = mean = _divide(total, weight or 1.0)
            is_far = isinstance(mean, Tensor)
            rounded[name] = mean.to(dtype) if is_far else torch.tensor(mean, dtype=dtype)
        self.means = means
        return rounded

    def _exchange(self, tables: list[_Scores]) -> list[_Scores]:
        """Return the tables of all replicas in order.

        Raises:
            UsageError: unless there is one for each replica of this process.
        """
        if len(tables) != len(self._block):
            raise UsageError(
                f"There must be one table for each of the {len(self._block)} replicas of this "
                f"process, got {len(tables)}. Pass an empty one for a replica without scores."
            )
        if not self._ranks.others:
            self.totals = self.numbers
            return tables
        return self._read(tables, self.gather(self._as_rows(tables)))

    def _read(self, tables: list[_Scores], rows: Tensor) -> list[_Scores]:
        """Return the tables of all replicas, and add the names that other processes have."""
        if rows[:, 0].any():
            names = {name for table in tables for name in table}
            found = self._ranks.gather_objects(sorted(names))
            self._names = sorted({*self._names, *(name for part in found for name in part)})
            rows = self.gather(self._as_rows(tables))
        count = len(self.numbers)
        self.totals = rows[:, 1 : 1 + count].sum(0).tolist()
        return [self._as_table(row[1 + count :]) for row in rows.tolist()]

    def _as_rows(self, tables: list[_Scores]) -> Tensor:
        """Return rows of numbers, one for each table.

        They are "has unknown names", the numbers of the process in its first row, and "is present",
        sum and weight of each known name.
        """
        rows, numbers = [], list(self.numbers)
        known = set(self._names)
        for table in tables:
            row = [float(not known.issuperset(table)), *numbers]
            numbers = [0.0] * len(numbers)
            for name in self._names:
                row += (1.0, *table[name]) if name in table else (0.0, 0.0, 0.0)
            rows.append(row)
        return torch.tensor(rows, dtype=torch.float64, device=self._device)

    def _as_table(self, row: list[float]) -> _Scores:
        there, sums, weights = row[::3], row[1::3], row[2::3]
        columns = zip(self._names, there, sums, weights, strict=True)
        return {name: (total, weight) for name, is_there, total, weight in columns if is_there}
