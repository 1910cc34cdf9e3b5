"""EMA and SWA: torch's bits, at the right steps, swapped in for evaluations only, and resumable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import helios
from helios.errors import UsageError
from helios.plugins import Plugin
from helios.plugins.averaging import EMA, SWA, WeightAverage
from helios.state import TrainingState
from tests.support.quiet import Quiet
from tests.support.resume import resume_everywhere
from tests.support.runs import WIDTH, IndexModule, Setting, SmallModel, digest, train


def values(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: part.detach().clone() for name, part in network.named_parameters()}


class Net(SmallModel):
    """A model whose training depends on no score; it notes the weights that evaluations see."""

    unsaved = (*SmallModel.unsaved, "seen_weights")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.seen_weights: dict[str, torch.Tensor] = {}

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.parameters_of_setup = list(self.net.parameters())

    def have_metrics_improved(self) -> bool:
        return True

    def valid_step(self, batch: Any, step: int) -> Any:
        self.seen_weights = self.net.state_dict(keep_vars=True) | values(self.net)
        return super().valid_step(batch, step)


class Listener(Quiet):
    """Calls a function at each event of some names."""

    unsaved = ("calls",)

    def __init__(self, **calls: Callable[..., Any]) -> None:
        super().__init__("listener")
        self.calls = calls

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        self._call("on_optimizer_step_start")

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        self._call("on_training_step_end", state)

    def on_validation_end(self, validation_cycle: int) -> None:
        self._call("on_validation_end")

    def _call(self, name: str, *args: Any) -> None:
        if name in self.calls:
            self.calls[name](self.context, *args)


def make_trainer(setting: Setting, *plugins: Plugin, root: Path | None = None) -> helios.Trainer:
    return helios.Trainer(
        train_unit=setting.unit,
        total_steps=setting.total_steps,
        valid_frequency=setting.valid_frequency,
        chkpt_frequency=setting.chkpt_frequency if root else None,
        accumulation_steps=setting.accumulation,
        chkpt_root=root,
        random_seed=setting.seed,
        print_banner=False,
        use_cpu=True,
        plugins=plugins,
        **setting.options,
    )


def fit(setting: Setting, *plugins: Plugin, root: Path | None = None) -> Net:
    net = Net(setting)
    make_trainer(setting, *plugins, root=root).fit(net, IndexModule(setting))
    return net


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[n], others[n]) for n in some)


def newest(root: Path) -> dict[str, Any]:
    path = helios.find_last_checkpoint(root / "small")
    assert path is not None
    return helios.load_checkpoint(path)


class Compiled(Net):
    """A model that trains on its first layer only, whose network is wrapped."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.net = torch.compile(self.net, backend="eager")

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        """Note nothing."""

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        return next(iter(self.net.parameters())).square().sum()


class Reference(Quiet):
    """Torch's averaged model, moved after the same steps."""

    unsaved = ("averaged", "steps")

    def __init__(self, steps: range, **options: Any) -> None:
        super().__init__("reference")
        self.steps = steps
        self.options = options
        self.averaged: Any = None

    def on_fit_start(self) -> None:
        self.averaged = AveragedModel(self.context.model.net, **self.options)

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        if state.global_step + 1 in self.steps:
            self.averaged.update_parameters(self.context.model.net)


def _warming(averages: Any, present: Any, count: Any) -> None:
    count = int(count)
    get_ema_multi_avg_fn(min(0.9, (1 + count) / (10 + count)))(averages, present, count)


_REFERENCES: dict[str, tuple[Callable[[], WeightAverage], range, dict[str, Any]]] = {
    "EMA": (
        lambda: EMA(0.9),
        range(1, 99),
        {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    ),
    "EMA with warmup": (
        lambda: EMA(0.9, warmup=True),
        range(1, 99),
        {"multi_avg_fn": _warming},
    ),
    "EMA with buffers": (
        lambda: EMA(0.9, averages_buffers=True),
        range(1, 99),
        {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    ),
    "SWA every 3 steps": (
        lambda: SWA(5, 3),
        range(5, 99, 3),
        {"multi_avg_fn": get_swa_multi_avg_fn()},
    ),
}


@pytest.mark.shows("H62")
@pytest.mark.parametrize("name", _REFERENCES)
def test_the_average_has_the_bits_of_torchs_averaged_model(name: str) -> None:
    make, steps, options = _REFERENCES[name]
    setting = Setting(total_steps=14, accumulation=2)
    average, reference = make(), Reference(steps, **options)
    net = fit(setting, average, reference)
    expected = reference.averaged.module.state_dict()
    # Torch averages counters of batches as well; ours stay the network's own, as do all buffers
    # that are not averaged.
    expected["1.num_batches_tracked"] = net.net[1].num_batches_tracked
    if not options.get("use_buffers"):
        expected |= dict(net.net.named_buffers())
    assert same(average.averaged_state_dict(net), expected)
    assert average.num_updates == int(reference.averaged.n_averaged)


_RESUMED: dict[str, tuple[dict[str, Any], Callable[[], list[Plugin]]]] = {
    "a plateau on the average's score": (
        {"scheduler": "plateau", "accumulation": 2, "total_steps": 9, "valid_frequency": 2},
        lambda: [EMA(0.8)],
    ),
    "a stop by the average's score": (
        {"early_stop_cycles": 2, "total_steps": 60},
        lambda: [EMA(0.8, warmup=True, averages_buffers=True)],
    ),
    "manual steps": ({"is_manual": True}, lambda: [EMA(0.8, every=2)]),
    "two averages": ({}, lambda: [EMA(0.8), SWA(4, swaps_in=())]),
    "epochs with partial windows": (
        {"unit": "epoch", "total_steps": 3, "valid_frequency": 1, "accumulation": 4},
        lambda: [SWA(2, averages_buffers=True)],
    ),
}


@pytest.mark.shows("U14")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", _RESUMED)
def test_a_run_with_an_average_resumes_everywhere(name: str, tmp_path: Path) -> None:
    options, make = _RESUMED[name]
    setting = Setting(**options)
    resume_everywhere(lambda folder: train(folder, setting, *make()), tmp_path)
    whole = newest(tmp_path / "whole")["plugins"]
    for folder in tmp_path.glob("resumed-*"):
        assert digest(newest(folder)["plugins"]) == digest(whole), folder
    assert whole[make()[0].plug_id]["num_updates"] > 1


def test_a_validation_sees_the_average_in_the_same_parameters() -> None:
    setting = Setting(total_steps=6, valid_frequency=2)
    raw: dict[str, Any] = {}
    ema = EMA(0.5)
    listener = Listener(
        on_training_step_end=lambda context, _: raw.update(values(context.model.net)),
        on_validation_end=lambda context: raw.update(now=values(context.model.net)),
    )
    net = fit(setting, ema, listener)
    now = raw.pop("now")
    average = ema.averaged_state_dict(net)
    seen = net.seen_weights
    assert all(torch.equal(seen[name], average[name]) for name in raw)
    assert not same({name: seen[name] for name in raw}, raw)
    assert same(now, raw)
    assert same(values(net.net), raw)
    # BatchNorm's statistics were those of the network.
    assert seen["1.running_mean"] is net.net[1].running_mean
    pairs = zip(net.net.parameters(), net.parameters_of_setup, strict=True)
    assert all(some is other for some, other in pairs)
    group = net.optimizer.param_groups[0]["params"]
    assert all(some is other for some, other in zip(net.net.parameters(), group, strict=True))


def test_a_step_that_was_left_out_is_not_averaged() -> None:
    ema = EMA(0.5)
    updates = []

    def skip(context: Any) -> None:
        if context.state.global_iteration in (2, 3, 5):
            context.skip_step("on purpose")

    def note(context: Any, state: TrainingState) -> None:
        updates.append((state.global_iteration, ema.num_updates))

    setting = Setting(total_steps=4, valid_frequency=None)
    fit(setting, ema, Listener(on_optimizer_step_start=skip, on_training_step_end=note))
    assert updates == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (7, 4)]


@pytest.mark.shows("S64", "U12")
def test_names_are_those_without_compile() -> None:
    setting = Setting(total_steps=2, valid_frequency=None, unfreezes=False)
    net, ema = Compiled(setting), EMA(0.5)
    make_trainer(setting, ema).fit(net, IndexModule(setting))
    plain = nn.Sequential(
        nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
    )
    plain.load_state_dict(ema.averaged_state_dict(net))
    assert ema.state_dict()["averages"]["net"].keys() == dict(plain.named_parameters()).keys()
    assert not torch.equal(plain[0].weight, net.net.get_parameter("_orig_mod.0.weight"))


def test_two_averages_are_not_swapped_into_one_network() -> None:
    setting = Setting(total_steps=3, valid_frequency=1)
    plain, net = fit(Setting(total_steps=1, valid_frequency=None)), Net(setting)
    trainer = make_trainer(setting, EMA(0.5), SWA(1))
    with pytest.raises(UsageError, match="Plugins 'ema' and 'swa' must not both swap"):
        trainer.fit(net, IndexModule(setting))
    assert same(values(net.net), values(plain.net)), "own weights are put back"
