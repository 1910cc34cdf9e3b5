"""What the banner says of model and data: how many parameters and samples there are, and where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from helios.core.text import size_text
from helios.core.wrappers import class_of
from helios.data.interfaces import Source
from helios.data.steps import StepsSource
from helios.model.model import Model
from helios.model.schedulers import find_epoch_like
from helios.schedule import Schedule
from helios.state import Phase

_MAX_ROWS = 8


@dataclass(frozen=True)
class _Row:
    """The parameters of one module, each counted where it is found first."""

    name: str
    kind: str
    count: int
    trainable: int
    num_bytes: int
    is_lazy: bool

    def cells(self) -> tuple[str, str, str, str, str]:
        count, size = f"{self.count:,}", size_text(self.num_bytes)
        if self.is_lazy:
            return self.name, self.kind, count, size, "lazy: the first batch sets the rest"
        note = "" if self.trainable else "frozen"
        if 0 < self.trainable < self.count:
            note = f"{self.trainable:,} trainable"
        return self.name, self.kind, count, size, note


def describe_run(
    model: Model, sources: Mapping[Phase, Sequence[Source]], schedule: Schedule
) -> dict[str, str]:
    """Return lines for the banner, by label: model, data, and schedulers if one is doubtful."""
    return {
        "model": describe_model(model),
        "data": describe_data(sources),
        **_describe_schedulers(model, schedule),
    }


def describe_model(model: Model) -> str:
    """Return the parameters by module, at most eight rows under a line of totals.

    A row is a network, or a part of it if the model has only one. A parameter that several modules
    share counts once.

    Args:
        model: the model, after its setup.
    """
    rows = list(_rows(model))
    if not rows:
        return "no parameters"
    lines = [_totals(rows), *_table(rows[:_MAX_ROWS])]
    rest = rows[_MAX_ROWS:]
    if rest:
        lines.append(f"  {len(rest)} more with {sum(row.count for row in rest):,} parameters")
    return "\n".join(lines)


def _rows(model: Model) -> Iterator[_Row]:
    seen: set[int] = set()
    for name, module in _parts(model.discovery.modules()):
        row = _row(name, class_of(module).__name__, module.parameters(), seen)
        if row.count or row.is_lazy:
            yield row
    loose, _ = model.discovery.moved()
    for name, tensor in loose.items():
        row = _row(name, "Parameter", [tensor], seen)
        if row.count or row.is_lazy:
            yield row


def _parts(networks: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for path, network in networks.items():
        if len(networks) == 1:
            yield from ((f"{path}.{name}", part) for name, part in network.named_children())
        # What its parts do not hold, or all of it.
        yield path, network


def _row(name: str, kind: str, parameters: Iterable[Tensor], seen: set[int]) -> _Row:
    new = [each for each in parameters if id(each) not in seen]
    seen.update(map(id, new))
    known = [each for each in new if not is_lazy(each)]
    return _Row(
        name,
        kind,
        count=sum(each.numel() for each in known),
        trainable=sum(each.numel() for each in known if each.requires_grad),
        num_bytes=sum(each.numel() * each.element_size() for each in known),
        is_lazy=len(known) < len(new),
    )


def _totals(rows: Sequence[_Row]) -> str:
    count, trainable = sum(row.count for row in rows), sum(row.trainable for row in rows)
    size = size_text(sum(row.num_bytes for row in rows))
    how = f"{trainable:,} trainable" if trainable < count else "all trainable"
    text = f"{count:,} parameters ({size}), {how}"
    return f"{text}, without lazy ones" if any(row.is_lazy for row in rows) else text


def _table(rows: Sequence[_Row]) -> Iterator[str]:
    table = [row.cells() for row in rows]
    first, second, third, fourth, _ = (max(map(len, column)) for column in zip(*table, strict=True))
    for name, kind, count, size, note in table:
        line = f"  {name:<{first}}  {kind:<{second}}  {count:>{third}}  {size:>{fourth}}  {note}"
        yield line.rstrip()


def describe_data(sources: Mapping[Phase, Sequence[Source]]) -> str:
    """Return how many samples and batches an epoch and a validation have.

    Args:
        sources: the loaders of each phase.
    """
    return "; ".join(
        " ".join(filter(None, ("" if phase is Phase.TRAINING else phase.value, source.name, size)))
        for phase, found in sources.items()
        for source in found
        for size in [_size(source, "per epoch" if phase is Phase.TRAINING else "")]
    )


def _size(source: Source, unit: str) -> str:
    samples, batches = source.length, source.num_batches()
    if isinstance(source, StepsSource):
        return "none" if batches is None else f"none, {batches:,} iterations {unit}"
    counts = [
        "an unknown number of samples" if samples is None else f"{samples:,} samples",
        "" if batches is None else f"{batches:,} batches {unit}".rstrip(),
    ]
    return " in ".join(filter(None, counts))


def _describe_schedulers(model: Model, schedule: Schedule) -> dict[str, str]:
    """Return a line about schedulers that seem to count epochs, but count steps; or nothing."""
    if not schedule.is_by_epoch:
        return {}
    schedulers = model.discovery.schedulers()
    found = find_epoch_like(schedulers, model.scheduler_interval, schedule.total_steps)
    if not found:
        return {}
    names, intervals = ", ".join(found), dict.fromkeys(found, "epoch")
    text = (
        f"{names}: stepped after every optimizer step, not after every epoch. For epochs, set "
        f"Model.scheduler_interval = {intervals}"
    )
    return {"schedulers": text}
