"""``allow_changes=("optimizer",)``: the next step has the settings of a run with the new ones."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import helios
from helios.errors import RunMismatchError
from tests.integration.test_declared_params import Data
from tests.typed.user_script import Line, Numbers

Pair = tuple[torch.optim.Optimizer, list[Any]]
Build = Callable[[nn.Sequential], Pair]
_LENGTH = 2
_CHANGED_AFTER, _END = 7, 15


def _shown(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {
            name: float(value) if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name not in ("params", "initial_lr")
        }
        for group in optimizer.param_groups
    ]


class Model(helios.Model):
    """A model with a network, an optimizer and schedulers for each name."""

    def __init__(
        self, builds: dict[str, Build], intervals: dict[str, str], *, is_manual: bool = False
    ) -> None:
        super().__init__("line")
        self.builds = builds
        self.scheduler_interval = intervals
        self.seen: dict[int, dict[str, Any]] = {}
        self.is_manual = is_manual

    unsaved = ("builds", "seen", "scheduler_interval", "is_manual")

    def setup(self, fast_init: bool = False) -> None:
        self.nets = nn.ModuleDict()
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.schedulers: dict[str, list[Any]] = {}
        for name, build in self.builds.items():
            net = self.nets[name] = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
            self.optimizers[name], self.schedulers[name] = build(net)

    def train_step(self, batch: torch.Tensor, state: helios.TrainingState) -> torch.Tensor | None:
        self.seen[state.global_iteration] = {
            name: _shown(optimizer) for name, optimizer in self.optimizers.items()
        }
        outputs = [net(batch.unsqueeze(1).float()) for net in self.nets.values()]
        loss = torch.stack(outputs).square().mean()
        if not self.is_manual:
            return loss
        loss.backward()
        for name, optimizer in self.optimizers.items():
            optimizer.step()
            optimizer.zero_grad()
            for scheduler in self.schedulers[name]:
                scheduler.step()
        return None


def _fit(
    root: Path, total: int, model: Any, data: helios.DataModule | None = None, **options: Any
) -> Any:
    """Train, and return what the model has seen."""
    chosen: dict[str, Any] = {"train_unit": "iteration", "chkpt_frequency": 100} | options
    trainer = helios.Trainer(
        total_steps=total,
        chkpt_root=root,
        use_cpu=True,
        print_banner=False,
        ledger="off",
        **chosen,
    )
    assert trainer.fit(model, data or Data())
    return model.seen


def _loop(build: Build, intervals: dict[str, str], total: int) -> dict[int, Any]:
    """Train by hand with these settings from the beginning."""
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    optimizer, schedulers = build(net)
    seen: dict[int, Any] = {}
    for step in range(1, total + 1):
        seen[step] = _shown(optimizer)
        net(torch.ones(1, 1)).square().mean().backward()
        optimizer.step()
        for number, scheduler in enumerate(schedulers):
            by_epoch = intervals.get(f"schedulers.it.{number}") == "epoch"
            if not by_epoch or step % _LENGTH == 0:
                scheduler.step()
    return seen


def make(
    *kinds: Callable[[Any], Any], lr: float = 0.1, second: float | None = None, **given: Any
) -> Build:
    def build(net: nn.Sequential) -> Pair:
        table: list[dict[str, Any]] = [
            {"params": net[0].parameters()},
            {"params": net[1].parameters(), **({} if second is None else {"lr": second})},
        ]
        kind = given.get("kind", torch.optim.SGD)
        others = {name: value for name, value in given.items() if name != "kind"}
        # Schedulers and a resume write into a tensor.
        optimizer = kind(table, lr=copy.deepcopy(lr), **others)
        return optimizer, [kind(optimizer) for kind in kinds]

    return build


def of(kind: Any, *args: Any, **given: Any) -> Callable[[Any], Any]:
    return lambda optimizer: kind(optimizer, *args, **given)


def sequence(first: Any, second: Any, milestone: int) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [first(optimizer), second(optimizer)], milestones=[milestone]
    )


def chain(*kinds: Any) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.ChainedScheduler([kind(optimizer) for kind in kinds])


def curve(step: int, rate: float) -> float:
    return 1 / (1 + rate * step)


L = lr_scheduler
M = {"momentum": 0.9}
_OLD = make(of(L.StepLR, 3), second=0.2, **M)
CASES: dict[str, tuple[Build, Build]] = {
    "none": (make(lr=0.1), make(lr=0.3, momentum=0.5, weight_decay=0.1)),
    "adam": (
        make(of(L.ExponentialLR, 0.8), kind=torch.optim.AdamW),
        make(of(L.ExponentialLR, 0.9), kind=torch.optim.AdamW, betas=(0.8, 0.99), eps=1e-4),
    ),
    "tensor": (
        make(of(L.StepLR, 3), kind=torch.optim.Adam),
        make(of(L.StepLR, 3), kind=torch.optim.Adam, lr=torch.tensor(0.3)),  # type: ignore[arg-type]
    ),
    "LambdaLR": (
        make(of(L.LambdaLR, functools.partial(curve, rate=0.1)), second=0.2),
        make(of(L.LambdaLR, functools.partial(curve, rate=0.3)), lr=0.3, second=0.5),
    ),
    "a lambda": (
        make(of(L.LambdaLR, lambda step: 1 / (1 + step))),
        make(of(L.LambdaLR, lambda step: 1 / (1 + 2 * step))),
    ),
    "MultiplicativeLR": (
        make(of(L.MultiplicativeLR, functools.partial(curve, rate=0.1))),
        make(of(L.MultiplicativeLR, functools.partial(curve, rate=0.01)), lr=0.3),
    ),
    "StepLR": (_OLD, make(of(L.StepLR, 2, 0.3), lr=0.3, second=0.5, **M)),
    "MultiStepLR": (
        make(of(L.MultiStepLR, [3, 5])),
        make(of(L.MultiStepLR, [2, 4, 9], gamma=0.3), lr=0.3, second=0.5),
    ),
    "ConstantLR": (make(of(L.ConstantLR)), make(of(L.ConstantLR, 0.2, 9), lr=0.3, second=0.5)),
    "LinearLR": (make(of(L.LinearLR)), make(of(L.LinearLR, 0.2, 0.9, 11), lr=0.3, second=0.5)),
    "ExponentialLR": (
        make(of(L.ExponentialLR, 0.9)),
        make(of(L.ExponentialLR, 0.7), lr=0.3, second=0.5),
    ),
    "PolynomialLR": (
        make(of(L.PolynomialLR, 20)),
        make(of(L.PolynomialLR, 13, 2.0), lr=0.3, second=0.5),
    ),
    "CosineAnnealingLR": (
        make(of(L.CosineAnnealingLR, 20)),
        make(of(L.CosineAnnealingLR, 4, 0.01), lr=0.3, second=0.5),
    ),
    "CosineAnnealingWarmRestarts": (
        make(of(L.CosineAnnealingWarmRestarts, 4)),
        make(of(L.CosineAnnealingWarmRestarts, 3, 2, 0.01), lr=0.3, second=0.5),
    ),
    "CyclicLR": (
        make(of(L.CyclicLR, 0.1, 0.5, 3), **M),
        make(of(L.CyclicLR, 0.2, 0.7, 2, mode="exp_range", gamma=0.9), lr=0.3, second=0.5, **M),
    ),
    "OneCycleLR": (
        make(of(L.OneCycleLR, 0.5, total_steps=20), **M),
        make(of(L.OneCycleLR, [0.7, 0.9], total_steps=30, pct_start=0.5), lr=0.3, **M),
    ),
    "SWALR": (
        make(of(torch.optim.swa_utils.SWALR, 0.01, 4)),
        make(of(torch.optim.swa_utils.SWALR, 0.05, 9), lr=0.3, second=0.5),
    ),
    "SequentialLR": (
        make(sequence(of(L.LinearLR, total_iters=4), of(L.CosineAnnealingLR, 20), 4)),
        make(sequence(of(L.LinearLR, total_iters=9), of(L.ExponentialLR, 0.8), 9), lr=0.3),
    ),
    "ChainedScheduler": (
        make(chain(of(L.ConstantLR), of(L.ExponentialLR, 0.9))),
        make(chain(of(L.ConstantLR, 0.5, 9), of(L.ExponentialLR, 0.8)), lr=0.3, second=0.5),
    ),
    "nested": (
        make(chain(sequence(of(L.LinearLR), of(L.StepLR, 3), 4), of(L.ExponentialLR, 0.9))),
        make(chain(sequence(of(L.LinearLR), of(L.StepLR, 2), 9), of(L.ExponentialLR, 0.8)), lr=0.3),
    ),
    "two": (
        make(of(L.LinearLR), of(L.ExponentialLR, 0.9)),
        make(of(L.LinearLR, 0.1, 1.0, 12), of(L.ExponentialLR, 0.8), lr=0.3, second=0.5),
    ),
}


def _take(
    root: Path, cases: dict[str, tuple[Build, Build]], intervals: dict[str, str], **more: Any
) -> dict[int, dict[str, Any]]:
    """Return by step what the optimizers of all cases have after the settings were taken."""
    old, new = ({name: pair[side] for name, pair in cases.items()} for side in (0, 1))
    _fit(root, _CHANGED_AFTER, Model(old, intervals, **more))
    allowed = {"allow_changes": ("optimizer",)}
    seen = _fit(root, _END - 3, Model(new, intervals, **more), **allowed)
    # The run has the new settings from then on, and the argument does nothing any more.
    seen |= _fit(root, _END - 1, Model(new, intervals, **more), **allowed)
    return seen | _fit(root, _END, Model(new, intervals, **more))


def _require_fresh(
    seen: dict[int, dict[str, Any]], name: str, new: Build, intervals: dict[str, str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = _loop(new, intervals, _END)
    found = {step: each[name] for step, each in seen.items()}
    assert found == {step: reference[step] for step in range(_CHANGED_AFTER + 1, _END + 1)}


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """All cases, in one run, which steps its optimizers itself because there are several."""
    return _take(tmp_path_factory.mktemp("all"), CASES, {}, is_manual=True)


# PyTorch 2.6 warns of what its own SequentialLR does at a milestone.
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_taken_settings_are_those_of_a_fresh_loop(
    name: str, taken: dict[int, dict[str, Any]]
) -> None:
    _require_fresh(taken, name, CASES[name][1], {})


def test_every_scheduler_of_torch_is_among_them() -> None:
    kinds = {name for name in vars(lr_scheduler) if name.endswith(("LR", "Restarts"))}
    assert kinds - {"LRScheduler", "_LRScheduler"} - CASES.keys() == set()


def test_a_setting_whose_state_the_run_lacks_is_an_error(tmp_path: Path) -> None:
    kind = torch.optim.AdamW
    with pytest.raises(RunMismatchError, match="no state for amsgrad"):
        _take(tmp_path, {"it": (make(kind=kind), make(kind=kind, amsgrad=True))}, {})


class Plateau(Line):
    scheduler_interval: ClassVar[dict[str, str]] = {"scheduler": "validation:error"}

    def __init__(self, lr: float) -> None:
        super().__init__("line")
        self.lr, self.seen = lr, None

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=self.lr)
        self.scheduler = lr_scheduler.ReduceLROnPlateau(self.optimizer)


def test_a_scheduler_that_follows_scores_is_an_error(tmp_path: Path) -> None:
    options: dict[str, Any] = {"valid_frequency": 1, "chkpt_frequency": 1}
    _fit(tmp_path, 3, Plateau(0.1), Numbers(), **options)
    options |= {"allow_changes": ("optimizer",)}
    with pytest.raises(
        RunMismatchError, match=r"unknown when model\.scheduler .*on_training_resume"
    ):
        _fit(tmp_path, 6, Plateau(0.3), Numbers(), **options)
