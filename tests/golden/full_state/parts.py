"""What an owner of state may hold: something for each section of a saved state."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.golden.today.exact import bits, describe_optimizer


def float_tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


class Kind(enum.Enum):
    LOW = 0
    HIGH = 1


class Marks(enum.Flag):
    ODD = 1
    LARGE = 2


@dataclasses.dataclass
class Note:
    number: int
    others: list[Any]


class Small(nn.Module):
    """Four weights, buffers, a plain value; draws nothing when it is made."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(float_tensor(start, -start, 1, 2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", float_tensor(1, 2, 3, 4))
        self.register_buffer("hidden", float_tensor(0), persistent=False)
        self.level = 0

    def forward(self, numbers: Tensor) -> Tensor:
        self.count += 1
        self.level = (self.level + len(numbers)) % 5
        self.table[self.level % 4] += self.level
        self.hidden += self.level
        return (numbers.sum(0) * self.weight).sum() / 8


class Partial(Small):
    """Its state lacks its table."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        for key in [key for key in state if key.endswith("table")]:
            del state[key]
        return state


class Extra(Small):
    """It has an extra state, of what is no tensor."""

    def __init__(self, start: float) -> None:
        super().__init__(start)
        self.seen: set[int] = set()

    def forward(self, numbers: Tensor) -> Tensor:
        self.seen.add(int(numbers.sum()) % 7)
        return super().forward(numbers)

    def get_extra_state(self) -> Any:
        return sorted(self.seen)

    def set_extra_state(self, state: Any) -> None:
        self.seen = set(state)


class Stateless(torch.optim.SGD):
    """Returns its settings alone."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": super().state_dict()["param_groups"]}


class Around:
    """Holds an optimizer and slow weights that its state lacks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]
        self.steps = 0

    def step(self) -> None:
        self.inner.step()
        self.inner.zero_grad()
        self.steps += 1
        fast = [p for group in self.inner.param_groups for p in group["params"]]
        for slow, weight in zip(self.slow, fast, strict=True):
            slow += weight.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def build(owner: Any, start: float) -> None:
    """Give an owner, in its setup, what training changes in :func:`move`."""
    owner.first, owner.second = Small(start), Small(start + 1)
    owner.third, owner.shaped = Small(start + 2), Small(start + 3)
    owner.partial, owner.extra = Partial(start), Extra(start)
    owner.alone = nn.Parameter(float_tensor(start, -start))
    owner.main = torch.optim.SGD(
        [{"params": owner.first.parameters()}, {"params": [owner.alone], "lr": 0.25}],
        lr=0.5,
        momentum=0.5,
    )
    owner.schedule = torch.optim.lr_scheduler.StepLR(owner.main, 3, gamma=0.5)
    owner.stateless = Stateless(owner.second.parameters(), lr=0.25, momentum=0.5)
    owner.around = Around(torch.optim.SGD(owner.partial.parameters(), lr=0.5, momentum=0.5))
    owner.torch_random = torch.Generator()
    owner.torch_random.manual_seed(int(start))
    owner.python_random = random.Random(int(start))
    owner.numpy_random = np.random.default_rng(int(start))
    owner.current, owner.spare = owner.first, owner.second
    owner.line = [owner.first, owner.second, owner.partial]
    owner.named = {"a": owner.first, "b": owner.second, "c": owner.partial}
    owner.ages = {owner.first.weight: 0, owner.second.weight: 0}
    owner.wide = float_tensor(0, 1, 2, 3, 4, 5, 6, 7)
    owner.looking = owner.first.table[1:3]
    owner.array = owner.second.table.numpy()[2:]
    owner.kind, owner.marks, owner.noted = Kind.LOW, Marks.ODD, Note(0, [])
    owner.history, owner.temporary, owner.callback = [], "here", None
    owner.recent = owner.history
    owner.table = {"pairs": {(1, 2): {3}}, "gone": 1}
    owner.frozen = {"untouched": [1]}


def move(owner: Any, number: int, ids: Tensor) -> int:
    """Change everything; return a number that depends on all that may be lost."""
    numbers = ids.to(torch.float64).view(-1, 1) + torch.arange(4)
    networks = (owner.first, owner.second, owner.third, owner.partial, owner.extra, owner.shaped)
    if number == 2:
        _change_structure(owner)
    loss = sum(network(numbers) for network in networks)
    loss = loss + (owner.alone * owner.current.table[:2]).sum()
    # Every second time the gradients stay open.
    loss.backward()
    _change_values(owner, number)
    if number % 2 == 0:
        owner.main.step()
        owner.main.zero_grad()
        owner.schedule.step()
    if number % 3 == 0:
        owner.stateless.step()
        owner.stateless.zero_grad()
        owner.around.step()
    if number % 4 == 0:
        owner.third.zero_grad()
        owner.shaped.zero_grad()
    return int(sum(map(int, _numbers_of(owner))) % 65536)


def _change_structure(owner: Any) -> None:
    owner.main.add_param_group({"params": list(owner.extra.parameters()), "lr": 0.125})
    owner.shaped.count = owner.shaped.count.to(torch.float32)
    owner.shaped.table = torch.cat([owner.shaped.table, owner.shaped.table])
    owner.shaped.register_buffer("late", float_tensor(8, 9))
    owner.shaped.requires_grad_(False)
    owner.shaped.eval()
    owner.third.table = owner.second.table
    owner.extra.table = owner.wide[2:6].clone()
    owner.current = owner.second
    del owner.spare
    owner.line[0], owner.line[1] = owner.line[1], owner.line[0]
    owner.line.pop()
    owner.named["a"] = owner.named.pop("a")
    owner.recent = []
    owner.second.half = owner.torch_random
    del owner.temporary
    del owner.table["gone"]
    owner.made = torch.arange(3)


def _change_values(owner: Any, number: int) -> None:
    with torch.no_grad():
        owner.wide += 1
        if number > 2:
            owner.shaped.late += number
            owner.made += number
        owner.looking += 1
        owner.array += 2
    from_torch = int(torch.randint(0, 256, (1,), generator=owner.torch_random))
    from_python = int(owner.python_random.random() * 256)
    from_numpy = int(owner.numpy_random.random() * 256)
    owner.recent.append(number)
    owner.history.append((number, from_torch, from_python, from_numpy))
    owner.line[0].level += 1
    next(iter(owner.named.values())).level += 1
    owner.ages[owner.second.weight] += number
    if number == 3:
        owner.ages[owner.first.weight] = owner.ages.pop(owner.first.weight) + 1
    owner.kind = Kind(number % 2)
    owner.marks = Marks(number % 4) if number % 4 else Marks.LARGE
    owner.noted.number += number
    owner.noted.others.append([number])
    owner.table["pairs"][(1, 2)].add(number % 4)
    # No checkpoint can hold it; nothing depends on it.
    owner.callback = lambda: number


def _numbers_of(owner: Any) -> list[Any]:
    drawn = owner.history[-1][1:]
    ages = [age * place for place, age in enumerate(owner.ages.values(), 1)]
    levels = [owner.line[0].level, next(iter(owner.named.values())).level, owner.current.level]
    weights = [owner.first.weight, owner.alone, owner.extra.weight, owner.second.weight]
    tables = [owner.extra.table, owner.third.table, owner.shaped.table, owner.partial.table]
    summed = [tensor.detach().sum() * 8 for tensor in (*weights, *tables, owner.around.slow[0])]
    return [*drawn, *ages, *levels, *summed, owner.noted.number, len(owner.recent)]


def describe(owner: Any) -> list[str]:
    """Return everything that an owner holds, a line each, and writes what shares memory."""
    lines = []
    names = ("first", "second", "third", "shaped", "partial", "extra")
    for name in names:
        network = getattr(owner, name)
        tensors = [*network.named_parameters(), *network.named_buffers()]
        lines += [f"{name}.{key} {bits(value)}" for key, value in tensors]
        grads = [(key, p.requires_grad, bits(p.grad)) for key, p in network.named_parameters()]
        lines.append(f"{name} {network.training} {network.level} {grads}")
    for name in ("main", "stateless"):
        lines.append(f"{name} {describe_optimizer(getattr(owner, name))}")
    lines.append(f"around {owner.around.steps} {bits(owner.around.slow[0])}")
    lines.append(f"inner {describe_optimizer(owner.around.inner)}")
    lines.append(f"schedule {owner.schedule.last_epoch} {owner.schedule.get_last_lr()}")
    by_id = {id(getattr(owner, name)): name for name in names}
    groups = [len(group["params"]) for group in owner.main.param_groups]
    lines.append(f"groups {groups} extra {sorted(owner.extra.seen)} alone {bits(owner.alone)}")
    lines.append(f"current {by_id[id(owner.current)]} line {[by_id[id(p)] for p in owner.line]}")
    lines.append(f"named {[(key, by_id[id(part)]) for key, part in owner.named.items()]}")
    weights = {id(getattr(owner, name).weight): name for name in names}
    lines.append(f"ages {[(weights[id(key)], age) for key, age in owner.ages.items()]}")
    lines.append(f"attributes {[hasattr(owner, name) for name in ('spare', 'temporary')]}")
    lines.append(f"half {owner.second.half is owner.torch_random}")
    plain = ("wide", "looking", "made", "kind", "marks", "noted", "history", "recent", "frozen")
    lines += [f"{name} {bits(getattr(owner, name))}" for name in plain]
    lines.append(f"array {owner.array.dtype.name} {owner.array.tolist()}")
    pairs = {key: sorted(members) for key, members in owner.table["pairs"].items()}
    lines.append(f"table {pairs} {sorted(owner.table)}")
    lines.append(f"drawn {torch.randint(0, 256, (1,), generator=owner.torch_random).item()}")
    lines.append(f"drawn {owner.python_random.random():.6f} {owner.numpy_random.random():.6f}")
    write: list[Callable[[], Any]] = [
        lambda: owner.wide.add_(16),
        lambda: owner.second.table.add_(16),
        lambda: owner.first.table.add_(16),
    ]
    for change in write:
        change()
    shared = (owner.extra.table, owner.third.table, owner.looking, owner.array)
    lines.append(f"shares {[part.tolist() for part in shared]}")
    return lines
