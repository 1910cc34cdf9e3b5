"""EMA and SWA: torch's bits, at the right steps, swapped in for evaluations only, and resumable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import helios
from helios.engines.engine import Engine
from helios.errors import ArgumentError, ArgumentTypeError, StateError, UsageError
from helios.loops.evaluation import ValidationLoop
from helios.plugins import Plugin
from helios.plugins.averaged_weights import Averages, Swap, ordinary
from helios.plugins.averaging import EMA, SWA, WeightAverage
from helios.state import Phase, TrainingState
from tests.support.ranks import run_ranks
from tests.support.resume import resume_everywhere
from tests.support.runs import WIDTH, IndexModule, Setting, SmallModel, digest, train


def values(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: part.detach().clone() for name, part in network.named_parameters()}


class Net(SmallModel):
    """A model whose training depends on no score; it notes the weights that evaluations see."""

    unsaved = (*SmallModel.unsaved, "seen_weights", "keeps_buffers", "fails_in", "before")

    def __init__(self, setting: Setting, name: str = "small") -> None:
        super().__init__(setting, name)
        self.seen_weights: dict[str, dict[str, torch.Tensor]] = {}
        self.fails_in = ""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.parameters_of_setup = list(self.net.parameters())

    def have_metrics_improved(self) -> bool:
        return True

    def _evaluate(self, noun: str) -> None:
        self.seen_weights[noun] = self.net.state_dict(keep_vars=True) | values(self.net)
        if self.fails_in == noun:
            raise ZeroDivisionError(noun)

    def valid_step(self, batch: Any, step: int) -> Any:
        self._evaluate("validation")
        return super().valid_step(batch, step)

    def test_step(self, batch: Any, step: int) -> Any:
        self._evaluate("testing")
        return SmallModel.valid_step(self, batch, step)

    def predict_step(self, batch: Any, step: int) -> Any:
        self._evaluate("prediction")
        return super().predict_step(batch, step)


class Listener(Plugin):
    """Calls a function at each event of some names."""

    unsaved = ("calls",)

    def __init__(self, plug_id: str = "listener", **calls: Callable[..., Any]) -> None:
        super().__init__(plug_id)
        self.calls = calls

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        self._call("on_optimizer_step_start")

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        self._call("on_training_step_end", state)

    def on_validation_end(self, validation_cycle: int) -> None:
        self._call("on_validation_end")

    def on_training_end(self) -> None:
        self._call("on_training_end")

    def on_testing_end(self) -> None:
        self._call("on_testing_end")

    def on_predicting_end(self) -> None:
        self._call("on_predicting_end")

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


def fit(setting: Setting, *plugins: Plugin, root: Path | None = None, **model: Any) -> Net:
    net = Net(setting)
    vars(net).update(model)
    make_trainer(setting, *plugins, root=root).fit(net, IndexModule(setting))
    return net


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[n], others[n]) for n in some)


def newest(root: Path) -> dict[str, Any]:
    path = helios.find_last_checkpoint(root / "small")
    assert path is not None
    return helios.load_checkpoint(path)


class Quiet(Net):
    """A model that trains on its last layer only, so that its network may be changed."""

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        """Note nothing."""

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        return next(iter(self.net.parameters())).square().sum()


class Reference(Plugin):
    """Torch's averaged model, moved after the same steps."""

    unsaved = ("averaged", "steps")

    def __init__(self, steps: range, **options: Any) -> None:
        super().__init__("reference")
        self.steps = steps
        self.options = options
        self.averaged: Any = None

    def setup(self) -> None:
        """Nothing to prepare."""

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
    "EMA every 3 steps": (
        lambda: EMA(0.9, every=3),
        range(3, 99, 3),
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
    "SWA": (
        lambda: SWA(5),
        range(5, 99),
        {"multi_avg_fn": get_swa_multi_avg_fn()},
    ),
    "SWA every 3 steps": (
        lambda: SWA(5, 3),
        range(5, 99, 3),
        {"multi_avg_fn": get_swa_multi_avg_fn()},
    ),
}


@pytest.mark.shows("H62")
@pytest.mark.parametrize("name", _REFERENCES)
@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_the_average_has_the_bits_of_torchs_averaged_model(name: str, unit: str) -> None:
    make, steps, options = _REFERENCES[name]
    setting = Setting(unit=unit, total_steps=14 if unit == "iteration" else 2, accumulation=2)
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
    "a mean that begins late": ({}, lambda: [SWA(4, 3)]),
    "two averages": ({}, lambda: [EMA(0.8), SWA(4, swaps_in=())]),
    "epochs": (
        {"unit": "epoch", "total_steps": 4, "valid_frequency": 1, "scheduler": "plateau"},
        lambda: [EMA(0.8)],
    ),
    "epochs with partial windows": (
        {
            "unit": "epoch",
            "total_steps": 3,
            "valid_frequency": 1,
            "accumulation": 4,
            "requests": True,
        },
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


@pytest.mark.shows("U14")
@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_a_checkpoint_holds_the_raw_weights_as_in_a_run_without_average(
    unit: str, tmp_path: Path
) -> None:
    """USERS.md 14."""
    setting = Setting(unit=unit, total_steps=7 if unit == "iteration" else 3, valid_frequency=1)
    fit(setting, root=tmp_path / "plain")
    net = fit(setting, EMA(0.5), root=tmp_path / "averaged")
    paths = sorted((tmp_path / "plain").glob("small/*.pth"))
    assert len(paths) >= 3
    for path in paths:
        plain = helios.load_checkpoint(path)
        averaged = helios.load_checkpoint(tmp_path / "averaged" / "small" / path.name)
        assert digest(averaged["model"]) == digest(plain["model"])
        assert digest(averaged["rng"]) == digest(plain["rng"])
        parts = averaged["plugins"]["ema"]["averages"]["net"]
        raw = averaged["model"]["objects"]["net"]
        assert parts.keys() == dict(net.net.named_parameters()).keys()
        assert unit == "iteration" or not torch.equal(parts["4.weight"], raw["4.weight"])


@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_a_validation_sees_the_average_in_the_same_parameters(unit: str) -> None:
    setting = Setting(unit=unit, total_steps=6 if unit == "iteration" else 2, valid_frequency=2)
    raw: dict[str, Any] = {}
    ema = EMA(0.5)
    listener = Listener(
        on_training_step_end=lambda context, _: raw.update(values(context.model.net)),
        on_validation_end=lambda context: raw.update(now=values(context.model.net)),
    )
    net = fit(setting, ema, listener)
    now = raw.pop("now")
    average = ema.averaged_state_dict(net)
    seen = net.seen_weights["validation"]
    assert all(torch.equal(seen[name], average[name]) for name in raw)
    assert not same({name: seen[name] for name in raw}, raw)
    assert same(now, raw)
    assert same(values(net.net), raw)
    # BatchNorm's statistics were those of the network.
    assert seen["1.running_mean"] is net.net[1].running_mean
    assert all(
        some is other
        for some, other in zip(net.net.parameters(), net.parameters_of_setup, strict=True)
    )
    group = net.optimizer.param_groups[0]["params"]
    assert all(some is other for some, other in zip(net.net.parameters(), group, strict=True))


def test_averaged_buffers_are_swapped_in_and_out() -> None:
    ema = EMA(0.5, averages_buffers=True)
    seen: list[torch.Tensor] = []
    net = Net(Setting(total_steps=6))
    net.valid_step = lambda batch, step: seen.append(net.net[1].running_mean.clone())
    make_trainer(Setting(total_steps=6), ema).fit(net, IndexModule(Setting()))
    average = ema.averaged_state_dict(net)
    assert torch.equal(seen[-1], average["1.running_mean"])
    assert not torch.equal(net.net[1].running_mean, average["1.running_mean"])


def test_nothing_is_swapped_before_the_first_update(capsys: pytest.CaptureFixture[str]) -> None:
    net = fit(Setting(total_steps=3), SWA(100))
    raw = {name: net.seen_weights["validation"][name] for name in values(net.net)}
    assert same(raw, values(net.net))
    assert "average" not in capsys.readouterr().err


def test_a_plugin_may_serve_two_trainings() -> None:
    setting, ema = Setting(total_steps=5), EMA(0.5)
    first = ema.averaged_state_dict(fit(setting, ema))
    assert ema.num_updates == 5
    second = ema.averaged_state_dict(fit(setting, ema))
    assert ema.num_updates == 5
    assert same(first, second)


def test_a_loaded_state_is_copied() -> None:
    state = {"num_updates": 1, "averages": {"net": {"0.weight": torch.zeros(2)}}}
    ema = EMA()
    ema.load_state_dict(state)
    ema.state_dict()["averages"]["net"]["0.weight"].add_(1)
    assert digest(state["averages"]["net"]["0.weight"]) == digest(torch.zeros(2))


@pytest.mark.parametrize("noun", ["testing", "prediction", "validation"])
@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_an_evaluation_on_its_own_sees_the_average(
    noun: str, has_checkpoint: bool, tmp_path: Path
) -> None:
    setting = Setting(total_steps=5, validates=True, valid_frequency=None)
    root = tmp_path if has_checkpoint else None
    fit_net, ema = Net(setting), EMA(0.5)
    at_end: list[dict[str, torch.Tensor]] = []

    def note(context: Any) -> None:
        at_end.append(values(context.model.net))

    ends = ("on_validation_end", "on_testing_end", "on_predicting_end")
    listener = Listener(**dict.fromkeys(ends, note))
    trainer = make_trainer(setting, ema, listener, root=root)
    trainer.fit(fit_net, IndexModule(setting))
    average, raw = ema.averaged_state_dict(fit_net), values(fit_net.net)
    net = fit_net
    if has_checkpoint:
        net, ema = Net(setting), EMA(0.5)
        trainer = make_trainer(setting, ema, listener, root=root)
    methods = {
        "testing": trainer.test,
        "prediction": trainer.predict,
        "validation": trainer.validate,
    }
    methods[noun](net, IndexModule(setting))
    seen = net.seen_weights[noun]
    assert all(torch.equal(seen[name], average[name]) for name in raw)
    assert same(values(net.net), raw)
    assert len(at_end) == 1
    assert same(at_end[0], raw)
    state = ema.state_dict()["averages"]["net"]
    assert not any(part.is_inference() for part in (*state.values(), *net.net.parameters()))


def test_inside_of_an_inference_mode_tensors_are_made_as_outside_of_it() -> None:
    with torch.inference_mode(), ordinary():
        assert not torch.zeros(1).is_inference()
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("noun", ["validation", "testing", "prediction"])
def test_phases_may_keep_the_raw_weights(noun: str) -> None:
    setting = Setting(total_steps=5, valid_frequency=5)
    phases = [phase for phase in Phase if phase.value not in (noun, "training")]
    net, ema = Net(setting), EMA(0.5, swaps_in=phases)
    trainer = make_trainer(setting, ema)
    trainer.fit(net, IndexModule(setting))
    trainer.test(net, IndexModule(setting))
    trainer.predict(net, IndexModule(setting))
    raw, average = values(net.net), ema.averaged_state_dict(net)
    for other in ("validation", "testing", "prediction"):
        expected = raw if other == noun else average
        assert all(torch.equal(net.seen_weights[other][name], expected[name]) for name in raw)


@pytest.mark.parametrize("noun", ["validation", "testing"])
def test_after_an_error_the_model_holds_the_raw_weights(noun: str) -> None:
    setting = Setting(total_steps=3)
    plain = fit(setting)
    net, ema = Net(setting), EMA(0.5)
    trainer = make_trainer(setting, ema)
    if noun == "testing":
        trainer.fit(net, IndexModule(setting))
    net.fails_in = noun
    run = trainer.fit if noun == "validation" else trainer.test
    with pytest.raises(ZeroDivisionError):
        run(net, IndexModule(setting))
    average = ema.averaged_state_dict(net)
    assert torch.equal(net.seen_weights[noun]["4.weight"], average["4.weight"])
    assert same(values(net.net), values(plain.net))
    assert not torch.equal(average["4.weight"], net.net[4].weight)


def test_an_error_of_another_plugin_at_the_start_of_a_validation_is_survived() -> None:
    class Failing(Listener):
        def on_validation_start(self, validation_cycle: int) -> None:
            raise KeyboardInterrupt

    setting = Setting(total_steps=3)
    plain, net = fit(setting), Net(setting)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(setting, EMA(0.5), Failing()).fit(net, IndexModule(setting))
    assert same(values(net.net), values(plain.net))


def test_a_step_that_was_left_out_is_not_averaged() -> None:
    """R26."""
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


def test_two_averages_of_one_network_must_not_both_be_swapped_in() -> None:
    setting = Setting(total_steps=3)
    net = Net(setting)
    with pytest.raises(UsageError, match=r"'ema' and 'swa'.*net for validation.*swaps_in=\(\)"):
        make_trainer(setting, EMA(), SWA(1)).fit(net, IndexModule(setting))
    assert not any("_helios_averages" in vars(part) for part in net.net.parameters())
    phases = (Phase.TESTING,)
    ema, swa = EMA(0.5, swaps_in=(Phase.VALIDATION,)), SWA(1, swaps_in=phases)
    trainer = make_trainer(setting, ema, swa)
    trainer.fit(net, IndexModule(setting))
    trainer.test(net, IndexModule(setting))
    seen, testing = net.seen_weights["validation"], net.seen_weights["testing"]
    assert torch.equal(seen["4.weight"], ema.averaged_state_dict(net)["4.weight"])
    assert torch.equal(testing["4.weight"], swa.averaged_state_dict(net)["4.weight"])
    assert not any("_helios_averages" in vars(part) for part in net.net.parameters())


def test_a_trial_validation_leaves_no_trace(tmp_path: Path) -> None:
    """C17."""
    setting = Setting(total_steps=4)
    fit(setting, EMA(0.5), root=tmp_path / "plain")
    trying = dataclasses.replace(setting, options={"sanity_steps": 1})
    fit(trying, EMA(0.5), root=tmp_path / "tried")
    plain, tried = newest(tmp_path / "plain"), newest(tmp_path / "tried")
    assert digest(tried["model"]) == digest(plain["model"])
    assert digest(tried["plugins"]["ema"]) == digest(plain["plugins"]["ema"])


class Pair(Net):
    """Two networks that share a layer, one of them inside of a list, and one in half precision."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.nets = [nn.Sequential(self.net[4], nn.Linear(1, 1)), nn.Linear(1, 2).bfloat16()]
        self.extra = nn.Linear(2, 2) if fast_init else nn.Linear(3, 3)
        if fast_init:
            del self.nets[1]
        else:
            del self.extra
            self.optimizer.add_param_group({"params": self.nets[1].parameters()})

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        self.nets[1](torch.ones(1, dtype=torch.bfloat16)).sum().backward()
        return super().train_step(batch, state)


def test_all_networks_are_averaged_unless_some_are_named() -> None:
    setting = Setting(total_steps=4, unfreezes=False)
    net, ema = Pair(setting), EMA(0.5)
    one = EMA(0.5, network="nets.1", swaps_in=(), plug_id="one")
    two = EMA(0.5, network=["nets.0", "net"], swaps_in=(), plug_id="two")
    make_trainer(setting, ema, one, two).fit(net, IndexModule(setting))
    assert ema.state_dict()["averages"].keys() == {"net", "nets.0", "nets.1"}
    assert one.state_dict()["averages"].keys() == {"nets.1"}
    assert two.state_dict()["averages"].keys() == {"net", "nets.0"}
    shared = ema.averaged_state_dict(net, "nets.0")["0.weight"]
    assert torch.equal(shared, ema.averaged_state_dict(net, "net")["4.weight"])
    seen = net.seen_weights["validation"]["4.weight"]
    assert not torch.equal(seen, net.net[4].weight)
    with pytest.raises(ArgumentError, match=r"\['net', 'nets.0', 'nets.1'\], got None"):
        ema.averaged_state_dict(net)
    assert same(one.averaged_state_dict(net), ema.averaged_state_dict(net, "nets.1"))


def test_an_average_of_half_precision_is_kept_in_single() -> None:
    setting = Setting(total_steps=4, unfreezes=False)
    net, ema = Pair(setting), EMA(0.9, network="nets.1")
    make_trainer(setting, ema).fit(net, IndexModule(setting))
    average = ema.state_dict()["averages"]["nets.1"]["weight"]
    assert average.dtype is torch.float32
    exported = ema.averaged_state_dict(net)["weight"]
    assert exported.dtype is torch.bfloat16
    assert torch.equal(exported, average.bfloat16())


def test_an_evaluation_may_build_fewer_networks_or_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = Setting(total_steps=4, unfreezes=False)
    trained = Pair(setting)
    ema = EMA(0.5)
    make_trainer(setting, ema, root=tmp_path).fit(trained, IndexModule(setting))
    average = ema.averaged_state_dict(trained, "net")
    net = Pair(setting)
    make_trainer(setting, EMA(0.5), root=tmp_path).test(net, IndexModule(setting))
    assert torch.equal(net.seen_weights["testing"]["4.weight"], average["4.weight"])
    assert "There is no average of extra in plugin 'ema'" in capsys.readouterr().err


def test_a_resume_with_other_networks_is_refused(tmp_path: Path) -> None:
    setting = Setting(total_steps=3, unfreezes=False)
    fit(setting, EMA(0.5), root=tmp_path)

    class Named(Net):
        def load_state_dict(self, state: Any, *, fast_init: bool = False, **_: Any) -> None:
            """Take nothing: this model is another one."""

        def state_dict(self) -> dict[str, Any]:
            return {}

    class Renamed(Named):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.other = vars(self).pop("net")

    class Reshaped(Named):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.net[4] = nn.Linear(8, 2)

    longer = dataclasses.replace(setting, total_steps=5)

    class Added(Named):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.added = nn.Linear(1, 1)

    texts = {
        Added: "networks: added has no average. Build",
        Renamed: "other has no average; the averaged net does not exist",
        Reshaped: r"net: 4.weight is \(2, 8\), its average \(1, 8\), 4.bias is",
    }
    for kind, text in texts.items():
        with pytest.raises(StateError, match=text):
            make_trainer(longer, EMA(0.5), root=tmp_path).fit(kind(longer), IndexModule(longer))
    with pytest.raises(StateError, match="the averaged net does not exist"):
        make_trainer(longer, EMA(0.5), root=tmp_path).test(Renamed(longer), IndexModule(longer))
    with pytest.raises(StateError, match=r"net: 1.running_mean has no average, 1.running_var has"):
        fit(longer, EMA(0.5, averages_buffers=True), root=tmp_path)


def test_a_resume_says_that_the_average_begins_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = Setting(total_steps=3)
    fit(setting, root=tmp_path)
    longer = dataclasses.replace(setting, total_steps=5)
    ema = EMA(0.5)
    fit(longer, ema, SWA(4, swaps_in=()), root=tmp_path)
    texts = [line for line in capsys.readouterr().err.splitlines() if "holds no average" in line]
    assert len(texts) == 1
    assert "plugin 'ema'" in texts[0]
    assert "after step 3" in texts[0]
    assert ema.num_updates == 2
    longest = dataclasses.replace(setting, total_steps=7)
    fit(longest, EMA(0.5), SWA(4, swaps_in=()), root=tmp_path)
    assert "holds no average" not in capsys.readouterr().err


def test_an_evaluation_without_average_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    setting = Setting(total_steps=3, valid_frequency=None)
    net, swa = Net(setting), SWA(50)
    trainer = make_trainer(setting, swa)
    trainer.fit(net, IndexModule(setting))
    assert "has no average" not in capsys.readouterr().err
    trainer.test(net, IndexModule(setting))
    said = capsys.readouterr().err
    assert "Plugin 'swa' has no average yet: this testing uses the networks' own weights" in said
    with pytest.raises(UsageError, match="'swa' has no average: none was loaded, and no step"):
        swa.copy_to(net)


def test_the_average_is_copied_into_the_model_for_good(tmp_path: Path) -> None:
    setting = Setting(total_steps=5)
    ema = EMA(0.5)
    at_end: dict[str, Any] = {}

    def copy_then(context: Any) -> None:
        ema.copy_to(context.model)
        at_end.update(values(context.model.net))

    net = fit(setting, ema, Listener(on_training_end=copy_then), root=tmp_path)
    average = ema.averaged_state_dict(net)
    assert all(torch.equal(at_end[name], average[name]) for name in at_end)
    assert same(values(net.net), at_end)
    raw = newest(tmp_path)["model"]["objects"]["net"]
    assert not torch.equal(raw["4.weight"], average["4.weight"])
    again, fresh = EMA(0.5), Net(setting)
    make_trainer(setting, again, root=tmp_path).test(fresh, IndexModule(setting))
    again.copy_to(fresh)
    assert same(values(fresh.net), at_end)
    assert all(some is other for some, other in _pairs(fresh))


def test_a_finished_run_that_is_started_again_has_its_average(tmp_path: Path) -> None:
    setting = Setting(total_steps=5)
    first, again = EMA(0.5), EMA(0.5)
    average = first.averaged_state_dict(fit(setting, first, root=tmp_path))
    net = fit(setting, again, root=tmp_path)
    assert again.num_updates == 5
    assert digest(again.averaged_state_dict(net)) == digest(average)


def _pairs(net: Net) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    return zip(net.net.parameters(), net.parameters_of_setup, strict=True)


@pytest.mark.shows("S64", "U12")
def test_names_are_those_without_compile() -> None:
    """USERS.md 12."""

    class Compiled(Quiet):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.net = torch.compile(self.net, backend="eager")

    setting = Setting(total_steps=2, valid_frequency=None, unfreezes=False)
    net, ema = Compiled(setting), EMA(0.5)
    make_trainer(setting, ema).fit(net, IndexModule(setting))
    plain = nn.Sequential(
        nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
    )
    plain.load_state_dict(ema.averaged_state_dict(net))
    assert ema.state_dict()["averages"]["net"].keys() == dict(plain.named_parameters()).keys()
    assert not torch.equal(plain[0].weight, net.net.get_parameter("_orig_mod.0.weight"))


def test_tied_weights_are_exported_under_all_their_names() -> None:
    class Tied(Quiet):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.net.add_module("again", self.net[0])

    setting = Setting(total_steps=3, valid_frequency=None, unfreezes=False)
    net, ema = Tied(setting), EMA(0.5)
    make_trainer(setting, ema).fit(net, IndexModule(setting))
    exported = ema.averaged_state_dict(net)
    assert exported.keys() == net.net.state_dict().keys()
    assert torch.equal(exported["again.weight"], exported["0.weight"])
    assert not torch.equal(exported["again.weight"], net.net[0].weight)


class Forgetful(ValidationLoop):
    """Does not tell that a validation has ended."""

    def on_run_end(self) -> None:
        self._modes.close()
        self._randomness.close()


@pytest.mark.parametrize("saves", [True, False])
def test_an_evaluation_without_its_end_is_no_base_for_training(saves: bool, tmp_path: Path) -> None:
    setting = Setting(total_steps=4, valid_frequency=2, chkpt_frequency=1)
    trainer = make_trainer(setting, EMA(0.5), root=tmp_path if saves else None)
    trainer.fit_loop.epoch_loop.connect(val_loop=Forgetful())
    deed = "save a checkpoint" if saves else "update the average"
    net = Net(setting)
    with pytest.raises(UsageError, match=f"Cannot {deed} while the average of plugin 'ema'"):
        trainer.fit(net, IndexModule(setting))
    plain = fit(dataclasses.replace(setting, total_steps=2))
    assert same(values(net.net), values(plain.net))
    assert len(list(tmp_path.glob("small/*.pth"))) == saves


def test_the_average_cannot_be_copied_while_it_is_swapped_in() -> None:
    setting = Setting(total_steps=3)
    net, ema = Net(setting), EMA(0.5)
    net.valid_step = lambda batch, step: ema.copy_to(net)
    with pytest.raises(UsageError, match="Cannot copy the average into the model while"):
        make_trainer(setting, ema).fit(net, IndexModule(setting))


def test_networks_must_stay_those_of_the_start() -> None:
    def replace(context: Any, state: TrainingState) -> None:
        if state.global_iteration == 2:
            context.model.net = nn.Sequential(*context.model.net)

    setting = Setting(total_steps=6)
    with pytest.raises(
        UsageError, match=r"'ema' averages \['net'\], but since the start of the run networks were"
    ):
        fit(setting, EMA(0.5), Listener(on_training_step_end=replace))


def test_a_layer_that_changes_is_refused_at_once() -> None:
    def replace(context: Any, state: TrainingState) -> None:
        if state.global_iteration == 2:
            context.model.net[4] = nn.Linear(8, 2)

    setting = Setting(total_steps=6, valid_frequency=None, unfreezes=False)
    trainer = make_trainer(setting, EMA(0.5), Listener(on_training_step_end=replace))
    with pytest.raises(StateError, match=r"4.weight is \(2, 8\), its average \(1, 8\)"):
        trainer.fit(Quiet(setting), IndexModule(setting))


class Walked(nn.Sequential):
    """A network that counts how often it is walked through by name."""

    walks = 0

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        self.walks += 1
        return super().named_parameters(*args, **kwargs)


def _average_of(net: nn.Module) -> tuple[Averages, Callable[[], None]]:
    """Return an average of a network, and what updates it after the weights have moved."""
    averages = Averages("plugin 'ema'", with_buffers=True)
    merge: Any = get_ema_multi_avg_fn(0.9)

    def update() -> None:
        with torch.no_grad():
            for part in (*net.parameters(), *net.buffers()):
                part.add_(1)
        averages.update({"net": net}, merge)

    update()
    return averages, update


def _expected(parts: dict[str, Any], net: nn.Module) -> dict[str, torch.Tensor]:
    """Return what the next average must be, from a walk of its own."""
    tensors: dict[str, torch.Tensor] = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    tensors = {name: part.detach() for name, part in tensors.items() if part.is_floating_point()}
    wide = {name: torch.promote_types(part.dtype, torch.float32) for name, part in tensors.items()}
    next_ones = {name: parts[name].to(wide[name], copy=True) for name in tensors}
    for name, part in next_ones.items():
        get_ema_multi_avg_fn(0.9)([part], [(tensors[name] + 1).to(part.dtype)], 1)
    return next_ones


def _replace(net: Any) -> None:
    net[0].weight = nn.Parameter(net[0].weight.detach() * 3)


def _load(net: Any) -> None:
    net.load_state_dict({name: part * 2 for name, part in net.state_dict().items()})


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda net: None,
    "another parameter": _replace,
    "another layer": lambda net: net.__setitem__(0, nn.Linear(3, 3)),
    "other bytes of a parameter": lambda net: setattr(
        net[0].weight, "data", net[0].weight.data * 3
    ),
    "another buffer": lambda net: setattr(net[1], "running_mean", torch.full((3,), 7.0)),
    "a parameter that thaws": lambda net: net[2].requires_grad_(True),
    "a parameter that is frozen": lambda net: net[0].requires_grad_(False),
    "half precision": lambda net: net.bfloat16(),
    "double precision": lambda net: net.double(),
    "one layer in half precision": lambda net: net[0].bfloat16(),
    "weights that are loaded": _load,
}


@pytest.mark.parametrize("name", _CHANGES)
def test_an_average_follows_what_a_training_does_to_its_network(name: str) -> None:
    """What was found once is looked for anew where something is another object, or another form."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    net[2].requires_grad_(False)
    averages, update = _average_of(net)
    update()
    _CHANGES[name](net)
    for _ in range(2):
        expected = _expected(averages.state_dict()["averages"]["net"], net)
        update()
        assert same(averages.state_dict()["averages"]["net"], expected)


def test_an_average_that_has_moved_for_an_evaluation_is_the_one_that_goes_on() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    averages, update = _average_of(net)
    update()
    net.double()
    averages.match({"net": net}, is_strict=True)
    net.float()
    expected = _expected(averages.state_dict()["averages"]["net"], net)
    update()
    assert same(averages.state_dict()["averages"]["net"], expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_average_follows_its_network_to_another_device() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    averages, update = _average_of(net)
    update()
    for device in ("cuda", "cpu"):
        net.to(device)
        expected = _expected(
            {k: v.to(device) for k, v in averages.state_dict()["averages"]["net"].items()}, net
        )
        update()
        assert same(averages.state_dict()["averages"]["net"], expected)


def _rename(table: dict[str, Any], name: str) -> None:
    table["new"] = table.pop(name)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda net: setattr(net[0].weight, "data", net[0].weight.data[:2]), r"\(2, 3\), its"),
        (lambda net: setattr(net[0].weight, "data", net[0].weight.data.view(9)), r"\(9,\), its"),
        (lambda net: net.append(nn.Linear(1, 1)), "2.weight has no average"),
        (lambda net: setattr(net[1], "weight", net[0].weight), "averaged 1.weight does not exist"),
        (lambda net: net[0].register_parameter("bias", None), "averaged 0.bias does not exist"),
        (lambda net: _rename(vars(net[1])["_parameters"], "bias"), "1.new has no average"),
    ],
)
def test_a_network_of_other_weights_is_refused_at_the_next_update(change: Any, text: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    _, update = _average_of(net)
    update()
    change(net)
    with pytest.raises(StateError, match=text):
        update()


def test_an_update_walks_through_a_network_only_where_it_has_changed() -> None:
    """The walk costs several times what the arithmetic does."""
    net = Walked(nn.Linear(3, 3), nn.BatchNorm1d(3))
    averages, update = _average_of(net)
    update()
    walks = net.walks

    def walks_of_updates() -> int:
        nonlocal walks
        walks = net.walks
        averages.update({"net": net}, lambda *_: None)
        averages.update({"net": net}, lambda *_: None)
        return net.walks - walks

    assert walks_of_updates() == 0
    net[0].weight = nn.Parameter(torch.zeros(3, 3))
    again = walks_of_updates()
    assert again > 0
    assert walks_of_updates() == 0
    averages.let_go()
    assert walks_of_updates() == again


def test_an_average_that_is_loaded_or_swapped_in_is_the_one_that_moves() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    averages, update = _average_of(net)
    update()
    old = averages.state_dict()
    kept = {name: part.clone() for name, part in old["averages"]["net"].items()}
    averages.load_state_dict(old)
    expected = _expected(kept, net)
    update()
    assert same(averages.state_dict()["averages"]["net"], expected)
    assert same(old["averages"]["net"], kept)
    swap = Swap()
    swap.put_in(averages.pairs({"net": net}))
    swap.put_back()
    expected = _expected(averages.state_dict()["averages"]["net"], net)
    update()
    assert same(averages.state_dict()["averages"]["net"], expected)


def test_a_network_must_be_there() -> None:
    setting = Setting(total_steps=3)
    with pytest.raises(ArgumentError, match=r"EMA\(network=...\).*\(\['net'\]\), got \['nett'\]"):
        fit(setting, EMA(network=["net", "nett"]))

    class Bare(Net):
        def setup(self, fast_init: bool = False) -> None:
            self.layers = nn.Sequential(nn.Dropout())

    with pytest.raises(UsageError, match="finds no floating-point weights to average in Bare"):
        make_trainer(setting, EMA()).fit(Bare(setting), IndexModule(setting))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: EMA(1.0), r"EMA\(decay=...\) must be a number in \(0, 1\), got 1.0. Pass e.g."),
        (lambda: EMA(0.0), r"EMA\(decay"),
        (lambda: EMA(2), r"EMA\(decay=...\) must be a number in \(0, 1\), got 2."),
        (lambda: EMA(every=0), r"EMA\(every=...\) must be a positive int, got 0"),
        (lambda: SWA(0), r"SWA\(start=...\) must be a positive int, got 0"),
        (lambda: SWA(3, 1.5), r"SWA\(every=...\) must be a positive int, got 1.5"),
        (lambda: SWA(3, network=[]), r"SWA\(network=...\) must be at least one name, got \[\]"),
        (lambda: EMA(swaps_in=[Phase.TRAINING]), r"EMA\(swaps_in=...\) must be out of Phase.VAL"),
    ],
)
def test_arguments_are_checked(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        make()


def test_a_network_is_chosen_by_name() -> None:
    with pytest.raises(ArgumentTypeError, match=r"EMA\(network=...\) must be the name of an"):
        EMA(network=nn.Linear(1, 1))  # type: ignore[arg-type]


def _wrapped(wrapping: str) -> type[Quiet]:
    class Wrapped(Quiet):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            if wrapping == "whole":
                self.net = nn.DataParallel(self.net)
            elif wrapping == "part":
                self.net[0] = nn.DataParallel(self.net[0])
            elif wrapping == "both":
                self.net = torch.compile(nn.DataParallel(self.net), backend="eager")

    return Wrapped


@pytest.mark.shows("S64")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("whole", "none"),
        ("part", "none"),
        ("both", "none"),
        ("none", "whole"),
        ("whole", "both"),
    ],
)
def test_an_average_goes_on_with_and_without_data_parallelism(
    first: str, second: str, tmp_path: Path
) -> None:
    setting = Setting(total_steps=4, valid_frequency=None, unfreezes=False)
    longer = dataclasses.replace(setting, total_steps=7)
    plain, net = _wrapped("none")(longer), _wrapped(second)(longer)
    whole, ema = EMA(0.5), EMA(0.5)
    make_trainer(longer, whole).fit(plain, IndexModule(longer))
    where: dict[str, Any] = {"root": tmp_path}
    make_trainer(setting, EMA(0.5), **where).fit(_wrapped(first)(setting), IndexModule(setting))
    tested = _wrapped(second)(setting)
    make_trainer(setting, EMA(0.5), **where).test(tested, IndexModule(setting))
    assert "testing" in tested.seen_weights
    make_trainer(longer, ema, **where).fit(net, IndexModule(longer))
    assert digest(ema.averaged_state_dict(net)) == digest(whole.averaged_state_dict(plain))
    assert ema.state_dict()["averages"]["net"].keys() == dict(plain.net.named_parameters()).keys()


def _average_wrapped(rank: int) -> dict[str, Any]:
    torch.manual_seed(1)
    network = Engine("cpu").wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert isinstance(network, DistributedDataParallel)
    averages = Averages("the test", with_buffers=True)
    averages.update({"net": network}, lambda *args: None)
    assert averages.state_dict_of(network, "net").keys() == network.module.state_dict().keys()
    return averages.state_dict()


@pytest.mark.shows("S64")
def test_an_average_of_what_the_engine_has_wrapped_is_one_of_the_network_itself() -> None:
    first, second = run_ranks(_average_wrapped, 2)
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for state in (first, second):
        averages = Averages("the test", with_buffers=True)
        averages.load_state_dict(state)
        assert averages.match({"net": network}, is_strict=True) == {"net": network}
        assert same(
            state["averages"]["net"],
            dict(network.named_parameters())
            | {n: b for n, b in network.named_buffers() if b.is_floating_point()},
        )
