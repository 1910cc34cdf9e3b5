"""What a run keeps of an optimizer, or of what loading replaces, is the same one after a kill.

Each row of the table keeps something in ``setup`` or in the second iteration, and changes it
through what it has kept from then on. The run is killed for real and started again.
"""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

import helios
from helios.plugins import Plugin
from tests.state.owners import bits
from tests.support.killed_fits import kill
from tests.support.kills import KillAt, run_in_child


class Data(helios.DataModule):
    def setup(self) -> None:
        x = torch.linspace(-1, 1, 32).unsqueeze(1)
        params = helios.DataLoaderParams(batch_size=4, shuffle=True)
        self._train_dataset = self._create_dataset(TensorDataset(x, x.sin()), params)


class Average:
    """Its ``load_state_dict`` replaces what it holds."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.shadow = {"weight": weight.detach().clone()}
        self.rows: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = {name: value.clone() for name, value in state["shadow"].items()}
        self.rows = list(state["rows"])


class Recorded(nn.Linear):
    """Has a list in its extra state."""

    def __init__(self) -> None:
        super().__init__(1, 4)
        self.rows: list[int] = []

    def get_extra_state(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


class KeepsGroup:
    """A schedule without a state: counts, and sets the rate of a group."""

    def __init__(self, optimizer: Any) -> None:
        self.group, self.count = optimizer.param_groups[1], 0

    def step(self) -> None:
        self.count += 1
        self.group["lr"] = 0.1 * 0.5**self.count


class Net(helios.Model):
    def __init__(self, row: Row) -> None:
        super().__init__("net")
        self.row = row

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(Recorded(), nn.Tanh(), nn.Linear(4, 1))
        groups = [{"params": part.parameters()} for part in (self.net[0], self.net[2])]
        self.optimizer = self.row.optimizer(groups, lr=0.1)
        self.spare = nn.Linear(1, 1)
        self.average = Average(self.net[0].weight)
        self.kept = self.row.keep(self)

    def inner(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        x, y = batch
        scale = 1 + len(self.average.rows) + len(self.net[0].rows)
        drift = (self.net[0].weight - self.average.shadow["weight"]).square().sum()
        return (self.net(x) - y).square().mean() + 0.01 * drift * scale

    def on_training_batch_end(self, state: helios.TrainingState, should_log: bool) -> None:
        super().on_training_batch_end(state, should_log)
        if self.row.take and state.global_iteration == 2:
            self.kept = self.row.take(self)
        if self.kept is not None:
            self.row.use(self.kept)


class Row(NamedTuple):
    keep: Callable[[Net], Any]
    use: Callable[[Any], object]
    take: Callable[[Net], Any] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = SGD


def _nothing(model: Net) -> None:
    """Keep nothing in setup."""


def _group(model: Net) -> dict[str, Any]:
    return model.optimizer.param_groups[1]


def _added_group(model: Net) -> dict[str, Any]:
    model.optimizer.add_param_group({"params": model.spare.parameters()})
    return model.optimizer.param_groups[2]


def _halve(group: dict[str, Any]) -> None:
    group["lr"] *= 0.5


def _closure(model: Net) -> Callable[[], None]:
    group = _group(model)

    def halve() -> None:
        group["lr"] *= 0.5

    return halve


def _closure_over_average(model: Net) -> Callable[[], None]:
    shadow, rows = model.average.shadow["weight"], model.average.rows

    def change() -> None:
        shadow.mul_(0.5)
        rows.append(1)

    return change


def _moment(model: Net) -> torch.Tensor:
    moment: torch.Tensor = model.optimizer.state[model.net[0].weight]["exp_avg"]
    return moment


def _shrink(tensor: torch.Tensor) -> None:
    tensor.mul_(0.5)


def _append(rows: list[int]) -> None:
    rows.append(1)


def _base_rates(model: Net) -> list[float]:
    model.scheduler = torch.optim.lr_scheduler.LambdaLR(model.optimizer, lambda step: 0.9**step)
    rates: list[float] = model.scheduler.base_lrs
    return rates


def _halve_first(rates: list[float]) -> None:
    rates[0] *= 0.5


ROWS = {
    "a group": Row(_group, _halve),
    "groups in a dict": Row(
        lambda model: {"head": _group(model)}, lambda kept: _halve(kept["head"])
    ),
    "the list of groups": Row(
        lambda model: model.optimizer.param_groups, lambda groups: _halve(groups[1])
    ),
    "a list of groups": Row(
        lambda model: [*model.optimizer.param_groups], lambda groups: _halve(groups[1])
    ),
    "a group in a closure": Row(_closure, lambda halve: halve()),
    "a group in a partial": Row(
        lambda model: functools.partial(_halve, _group(model)), lambda halve: halve()
    ),
    "a group that training keeps": Row(_nothing, _halve, _group),
    "a group that training adds and keeps": Row(_nothing, _halve, _added_group),
    "a schedule that keeps a group": Row(
        lambda model: KeepsGroup(model.optimizer), lambda schedule: schedule.step()
    ),
    "the rates of a scheduler": Row(_base_rates, _halve_first),
    "a moment": Row(_nothing, _shrink, _moment, Adam),
    "a moment in an entry": Row(
        _nothing,
        lambda entry: _shrink(entry["exp_avg"]),
        lambda model: model.optimizer.state[model.net[0].weight],
        Adam,
    ),
    "a tensor that loading replaces": Row(lambda model: model.average.shadow["weight"], _shrink),
    "a list that loading replaces": Row(lambda model: model.average.rows, _append),
    "a closure over what loading replaces": Row(_closure_over_average, lambda change: change()),
    "a list in an extra state": Row(lambda model: model.net[0].rows, _append),
}


class Both:
    """A wrapper whose groups are those of two optimizers; written as for plain PyTorch."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for one in optimizers for group in one.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, inner in zip(self.optimizers, state["inner"], strict=True):
            optimizer.load_state_dict(inner)


class Stateless:
    """The same without a state of its own."""

    __init__, step = Both.__init__, Both.step


class Wrapped(helios.Model):
    def __init__(self, wrap: Callable[..., Any], momentum: float) -> None:
        super().__init__("net")
        self.wrap, self.momentum = wrap, momentum

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
        first = SGD(self.net[0].parameters(), lr=0.05, momentum=self.momentum)
        self.both = self.wrap(first, SGD(self.net[2].parameters(), lr=0.05))

    def inner(self) -> list[torch.optim.Optimizer]:
        return [*self.both.optimizers]

    def train_step(self, batch: Any, state: helios.TrainingState) -> None:
        x, y = batch
        (self.net(x) - y).square().mean().backward()
        self.both.step()
        for group in self.both.param_groups:
            group["lr"] *= 0.8


def _train(make: Callable[[], Any], root: Path, every: int, *plugins: Plugin) -> Any:
    """Return rates, weights and what the newest checkpoint lacks, at the end of a run."""
    trainer = helios.Trainer(
        total_steps=8 if every == 4 else 9,
        train_unit="iteration",
        chkpt_frequency=every,
        chkpt_root=root,
        store=helios.CheckpointStore(is_async=False),  # written before the kill
        plugins=plugins,
        random_seed=5,
        use_cpu=True,
        print_banner=False,
    )
    model = make()
    assert trainer.fit(model, Data())
    rates = [group["lr"] for optimizer in model.inner() for group in optimizer.param_groups]
    sidecars = [json.loads(path.read_text()) for path in root.glob("net/*.json")]
    missing = [sidecar["missing"] for sidecar in sidecars if sidecar.get("missing")]
    return rates, [weight.detach().numpy().tobytes() for weight in model.net.parameters()], missing


def _train_killed(make: Callable[[], Any], root: Path, every: int) -> Any:
    """Train, killed in the iteration after the first checkpoint, and again."""
    kill = KillAt("on_training_batch_end", every + 1)
    work = functools.partial(_train, make, root, every, kill)
    assert run_in_child(work, root.with_suffix(".killed")) == -signal.SIGKILL
    return _train(make, root, every)


@pytest.mark.shows("S75")
@pytest.mark.parametrize("row", ROWS)
def test_what_is_kept_is_the_same_after_a_kill(row: str, tmp_path: Path) -> None:
    make = functools.partial(Net, ROWS[row])
    whole = _train(make, tmp_path / "whole", 4)
    assert _train_killed(make, tmp_path / "killed", 4) == whole
    assert whole[2] == []


class Keeper(Plugin):
    """Keeps a group, or a moment, of the model's optimizer from the second iteration on."""

    def __init__(self, take: Callable[[Any], Any], use: Callable[[Any], object]) -> None:
        super().__init__("keeper")
        self.take, self.use, self.kept = take, use, None

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: helios.TrainingState, should_log: bool) -> None:
        if state.global_iteration == 2:
            self.kept = self.take(self.context.model)
        if self.kept is not None:
            self.use(self.kept)


@pytest.mark.parametrize("row", ["a group that training keeps", "a moment"])
def test_what_a_plugin_keeps_is_the_same_after_a_kill(row: str, tmp_path: Path) -> None:
    def train(root: Path, *plugins: Plugin) -> Any:
        model = functools.partial(Net, Row(_nothing, use, optimizer=optimizer))
        return _train(model, root, 4, Keeper(take, use), *plugins)

    _, use, take, optimizer = ROWS[row]
    whole = train(tmp_path / "whole")
    kill(train, tmp_path / "run", 5)
    assert train(tmp_path / "run") == whole


def test_the_rate_of_a_group_that_is_kept_is_exact(tmp_path: Path) -> None:
    rates, _, _ = _train_killed(functools.partial(Net, ROWS["a group"]), tmp_path / "run", 4)
    assert rates == [0.1, 0.1 * 0.5**8]  # 0.00039; 0.00625 if the group is a dead dict


@pytest.mark.shows("S75")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("wrap", [Both, Stateless])
def test_a_wrapper_of_two_optimizers_is_right_after_a_kill(
    wrap: Callable[..., Any], momentum: float, tmp_path: Path
) -> None:
    make = functools.partial(Wrapped, wrap, momentum)
    whole = _train(make, tmp_path / "whole", 2)
    assert _train_killed(make, tmp_path / "killed", 2) == whole
    assert whole[0] == pytest.approx([0.05 * 0.8**9] * 2)  # 0.0067; 0.032 if the groups are dead
    assert whole[2] == []


class Sent(Net):
    """Finds its row by name, since it is sent to other processes."""

    def __init__(self, name: str) -> None:
        helios.Model.__init__(self, "net")
        self.name = name

    @property
    def row(self) -> Row:  # type: ignore[override]
        return ROWS[self.name]


def test_what_is_kept_is_the_same_on_other_processes(tmp_path: Path) -> None:
    def train(root: Path, total: int, nproc: int) -> Any:
        trainer = helios.Trainer(
            total_steps=total,
            train_unit="iteration",
            chkpt_frequency=4,
            chkpt_root=root,
            random_seed=5,
            use_cpu=True,
            print_banner=False,
            num_replicas=2,
            nproc=nproc,
        )
        assert trainer.fit(Sent("a group in a closure"), Data())
        newest = max(root.glob("net/*.pth"), key=lambda path: path.stat().st_mtime_ns)
        sidecar = json.loads(newest.with_suffix(".json").read_text())
        objects = torch.load(newest, weights_only=True)["model"]["objects"]
        return bits(objects), sidecar["level"], sidecar.get("missing")

    whole = train(tmp_path / "whole", 8, 1)
    train(tmp_path / "parted", 4, 1)
    assert train(tmp_path / "parted", 8, 2) == whole
    assert whole[1:] == ("elastic", {})
