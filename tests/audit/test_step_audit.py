"""Audits in one process: gradients that are computed a second time, without a trace."""

from __future__ import annotations

import itertools
import json
import pickle
import platform
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import helios
from helios import Audit
from helios.checkpoint.sidecar import Sidecar
from helios.cli import main
from helios.core import rng
from helios.errors import ArgumentError, AuditError
from helios.ledger import lineage
from helios.ledger.lineage import read_lineage
from helios.loops import YieldLoop
from helios.plugins import Plugin
from helios.state import TrainingState
from tests.support import audited, runs
from tests.support.audited import NAME, FaultyModel, always, fit, never
from tests.support.elastic import Elastic, ElasticData, assert_same, make_trainer, read_bits
from tests.support.quiet import Quiet
from tests.support.runs import Setting
from tests.support.warned import collect_warnings

OFTEN = Audit(every=1)
NO_VALIDATION = {"valid_frequency": None}


def count_steps(folder: Path) -> int:
    """Return how often ``train_step`` was called."""
    return sum(len(path.read_text().splitlines()) for path in folder.glob("turns-*.jsonl"))


def is_found(n: int) -> Callable[[int], bool]:
    """Return a fault of the n-th backward only."""
    return lambda number: number == n


SOUND = {
    "one replica": Elastic(num_replicas=1, total_steps=10),
    "one replica, accumulation": Elastic(num_replicas=1, accumulation=3, total_steps=10),
    "several, accumulation, bf16": Elastic(
        num_replicas=3, accumulation=2, total_steps=10, options={"precision": "bf16"}
    ),
    "windows that end early, fp16, workers": Elastic(
        num_replicas=2,
        accumulation=4,
        unit="epoch",
        total_steps=3,
        num_workers=1,
        options={"precision": "fp16"},
    ),
}


@pytest.mark.shows("P14")
@pytest.mark.parametrize("name", SOUND)
def test_an_audited_run_has_the_bits_and_the_events_of_one_that_is_not(
    tmp_path: Path, name: str
) -> None:
    setting = SOUND[name]
    *_, events = fit(tmp_path / "plain", setting)
    warnings, error, code, audited_events = fit(tmp_path / "audited", setting, audit=OFTEN)
    assert (warnings, error, code) == ([], "", 0)
    assert_same(read_bits(tmp_path / "audited"), read_bits(tmp_path / "plain"))
    assert audited_events == events
    # In fp16 a window whose update was skipped is audited as well.
    num_windows = [event[0] for event in events].count("on_training_step_end")
    assert num_windows >= 6
    assert count_steps(tmp_path / "audited") == count_steps(tmp_path / "plain") + num_windows


@pytest.mark.shows("P17")
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("several, accumulation, bf16", 100),
        *(pytest.param(name, 2500, marks=pytest.mark.full) for name in SOUND),
    ],
)
def test_thousands_of_audits_of_sound_models_find_nothing(
    tmp_path: Path, name: str, count: int
) -> None:
    setting = SOUND[name]
    # Two windows are an epoch of the last one.
    total = count if setting.unit == "iteration" else count // 2 + 5
    options = {**setting.options, **NO_VALIDATION, "total_steps": total, "chkpt_frequency": total}
    warnings, error, _, _ = fit(tmp_path, setting, hears=False, audit=OFTEN, **options)
    assert (warnings, error) == ([], "")
    newest = helios.find_last_checkpoint(tmp_path / "elastic")
    assert helios.load_checkpoint(newest)["training_state"].global_step >= count


@pytest.mark.shows("P15")
@pytest.mark.parametrize("step", [1, 2])
def test_a_gradient_that_errs_once_is_found_and_named(tmp_path: Path, step: int) -> None:
    setting = Elastic(num_replicas=2, total_steps=4, options=NO_VALIDATION)
    # The step has two backwards, and a third is that of the audit: of replica 0, then of 1.
    warnings, error, code, _ = fit(
        tmp_path, setting, is_found(3 * (step - 1) + step - 1), audit=OFTEN
    )
    (text,) = warnings
    assert f"Iteration {step}, step {step}: the gradient of replica {step - 1} differs" in text
    assert f" {NAME}: " in text
    assert text.count("on rank 0 (") == 2
    assert "1 element differs. The same process has computed both." in text
    assert (error, code) == ("", 0)


@pytest.mark.shows("P15")
def test_the_fault_of_the_second_computation_is_found_and_the_first_gradient_kept(
    tmp_path: Path,
) -> None:
    setting = Elastic(num_replicas=2, total_steps=3, options=NO_VALIDATION)
    fit(tmp_path / "plain", setting)
    warnings, *_ = fit(tmp_path / "audited", setting, is_found(2), audit=OFTEN)
    assert len(warnings) == 1
    plain, found = read_bits(tmp_path / "plain"), read_bits(tmp_path / "audited")
    assert_same(found, plain)


@pytest.mark.shows("P16")
def test_a_fault_that_is_the_same_each_time_is_not_found(tmp_path: Path) -> None:
    """The limit of an audit: what errs in the same way everywhere looks right."""
    setting = Elastic(num_replicas=2, total_steps=3, options=NO_VALIDATION)
    fit(tmp_path / "sound", setting)
    warnings, error, _, _ = fit(tmp_path / "faulty", setting, always, audit=OFTEN)
    assert (warnings, error) == ([], "")
    assert read_bits(tmp_path / "faulty").state != read_bits(tmp_path / "sound").state


@pytest.mark.shows("P19")
def test_a_strict_audit_ends_the_run_before_the_update(tmp_path: Path) -> None:
    setting = Elastic(num_replicas=2, total_steps=6, options=NO_VALIDATION)
    # Step 2 has the backwards 2 and 3; the audit is that of replica 0.
    _, error, code, _ = fit(
        tmp_path, setting, is_found(2), audit=Audit(every=2, on_mismatch="raise")
    )
    assert "Iteration 2, step 2: the gradient of replica 0 differs" in error
    assert "Check the hardware" in error
    assert code == 1
    newest = helios.find_last_checkpoint(tmp_path / "elastic")
    assert helios.load_checkpoint(newest)["training_state"].global_step == 1
    fit(tmp_path, setting)
    fit(tmp_path / "plain", setting)
    assert_same(read_bits(tmp_path), read_bits(tmp_path / "plain"))


class Counting(FaultyModel):
    """Its loss depends on an attribute that each step changes, and logs and requests."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.count = 0
        self.history: list[float] = []

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        self.count += 1
        loss = super().train_step(batch, state) * self.count
        self.history.append(float(loss.detach()))
        self.trainer.plugins["logging"].context.log({"count": self.count})
        return loss


class Logging(Quiet):
    """Collects what is logged."""

    unsaved = ("logged",)

    def setup(self) -> None:
        self.logged: list[Any] = []

    def on_log(self, scalars: dict[str, float], state: TrainingState) -> None:
        self.logged.append(dict(scalars))


def fit_counting(
    folder: Path, errs: audited.Errs, audit: Audit | None
) -> tuple[Counting, list[Any], list[str]]:
    folder.mkdir()
    setting = Elastic(num_replicas=1, total_steps=6, options=NO_VALIDATION)
    logging = Logging()
    model = Counting(setting, folder, errs)
    with collect_warnings() as warnings:
        trainer = make_trainer(folder, setting, logging, audit=audit)
        trainer.fit(model, ElasticData(setting))
    return model, logging.logged, warnings


@pytest.mark.shows("P21")
def test_attributes_that_a_step_changes_are_put_back(tmp_path: Path) -> None:
    plain, logged, _ = fit_counting(tmp_path / "plain", never, None)
    found, logged_too, warnings = fit_counting(tmp_path / "audited", never, OFTEN)
    (text,) = warnings
    assert "Counting.train_step changes count, history, " in text
    assert count_steps(tmp_path / "audited") == 6 + 5
    assert (found.count, found.history) == (plain.count, plain.history)
    assert logged_too == logged
    assert_same(read_bits(tmp_path / "audited"), read_bits(tmp_path / "plain"))


@pytest.mark.shows("P21")
def test_a_fault_is_found_in_a_step_that_changes_attributes_too(tmp_path: Path) -> None:
    *_, warnings = fit_counting(tmp_path / "faulty", is_found(3), OFTEN)
    assert [NAME in text for text in warnings] == [False, True]


@pytest.mark.shows("P14")
def test_a_model_that_changes_attributes_and_a_plugin_keep_their_bits(tmp_path: Path) -> None:
    setting = Setting(total_steps=5)
    plain = runs.train(tmp_path / "plain", setting)
    options = {"audit": OFTEN}
    found = runs.train(tmp_path / "audited", Setting(total_steps=5, options=options))
    assert found.bits() == plain.bits()
    assert (found.events, found.records, found.fetched) == (
        *(plain.events, plain.records, plain.fetched),
    )


class Running(FaultyModel):
    """Its loss depends on the running averages that it updates."""

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        mean = self.body[1].running_mean.sum().clone()
        return super().train_step(batch, state) * (2 + mean)


@pytest.mark.shows("P14")
def test_a_step_that_uses_its_buffers_is_repeated_with_those_that_it_started_from(
    tmp_path: Path,
) -> None:
    setting = Elastic(num_replicas=2, accumulation=2, total_steps=4, options=NO_VALIDATION)
    for name, audit in (("plain", None), ("audited", OFTEN)):
        (tmp_path / name).mkdir()
        trainer = make_trainer(tmp_path / name, setting, audit=audit)
        with collect_warnings() as warnings:
            trainer.fit(Running(setting, tmp_path / name, never), ElasticData(setting))
        assert [text for text in warnings if "udit" in text] == []
    assert_same(read_bits(tmp_path / "audited"), read_bits(tmp_path / "plain"))


GENERATOR = np.random.default_rng(0)
"""A generator that a step uses, outside of its model."""


class DrawingFromGlobals(FaultyModel):
    """Its loss depends on a generator among the globals of its module."""

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        return super().train_step(batch, state) * (1 + GENERATOR.random())


def test_a_generator_among_the_globals_is_put_back(tmp_path: Path) -> None:
    setting = Elastic(num_replicas=1, total_steps=4, options=NO_VALIDATION)
    begin = GENERATOR.bit_generator.state
    for name, audit in (("plain", None), ("audited", OFTEN)):
        GENERATOR.bit_generator.state = begin
        (tmp_path / name).mkdir()
        trainer = make_trainer(tmp_path / name, setting, audit=audit)
        with collect_warnings() as warnings:
            trainer.fit(DrawingFromGlobals(setting, tmp_path / name, never), ElasticData(setting))
        assert [text for text in warnings if "udit" in text] == []
    assert_same(read_bits(tmp_path / "audited"), read_bits(tmp_path / "plain"))


class Drawing(Quiet):
    """Draws random numbers around the place where a gradient is computed again."""

    unsaved = ("drawn",)

    def setup(self) -> None:
        self.drawn: list[float] = []

    def on_backward_end(self) -> None:
        self.drawn.append(random.random())

    def on_optimizer_step_start(self, optimizer: Any) -> None:
        numbers = rng.get_default_numpy_rng().generator
        self.drawn += [float(torch.rand(())), random.random(), numbers.random()]


@pytest.mark.shows("P14")
def test_hooks_after_an_audit_draw_the_same_random_numbers(tmp_path: Path) -> None:
    setting = Elastic(num_replicas=1, total_steps=4, options=NO_VALIDATION)
    drawn = []
    for name, audit in (("plain", None), ("audited", OFTEN)):
        plugin = Drawing()
        (tmp_path / name).mkdir()
        trainer = make_trainer(tmp_path / name, setting, plugin, audit=audit)
        trainer.fit(FaultyModel(setting, tmp_path / name, never), ElasticData(setting))
        drawn.append(plugin.drawn)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 16
    assert count_steps(tmp_path / "audited") == 8


class Odd(FaultyModel):
    """A model whose step does what an audit cannot repeat or put back."""

    total = 0

    def __init__(self, setting: Elastic, folder: Path, kind: str) -> None:
        super().__init__(setting, folder, never)
        self.kind = kind

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        if self.kind == "iterator":
            self.numbers = itertools.count()

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        if self.kind == "class":
            type(self).total += 1
        if self.kind == "backward":
            self.head.weight.square().sum().backward()
        if self.kind == "weights" and state.global_iteration == 2:
            self.head.weight.data.mul_(0.5)
        loss = super().train_step(batch, state)
        if self.kind == "manual":
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return None
        return loss

    def batch_to_device(self, batch: Any, phase: Any) -> Any:
        batch = super().batch_to_device(batch, phase)
        return [*batch[:1], Unpicklable(batch[1])] if self.kind == "batch" else batch


class Unpicklable(torch.Tensor):
    """A tensor that no process can send."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Unpicklable:
        return torch.Tensor._make_subclass(cls, data)

    def __reduce_ex__(self, protocol: int) -> Any:
        raise TypeError("it stays here")


class Doubling(Quiet):
    """Changes the loss in place."""

    def on_backward_start(self, loss: torch.Tensor) -> None:
        loss.mul_(2)


class Shrinking(Quiet):
    """Changes weights between the step and the update."""

    def on_backward_end(self) -> None:
        with torch.no_grad():
            self.context.model.head.weight.mul_(0.9)


@pytest.mark.shows("P14")
def test_a_step_that_calls_backward_itself_too_is_repeated_with_what_it_started_from(
    tmp_path: Path,
) -> None:
    setting = Elastic(num_replicas=1, accumulation=2, total_steps=3, options=NO_VALIDATION)
    for name, audit in (("plain", None), ("audited", OFTEN)):
        (tmp_path / name).mkdir()
        trainer = make_trainer(tmp_path / name, setting, audit=audit)
        with collect_warnings() as warnings:
            trainer.fit(Odd(setting, tmp_path / name, "backward"), ElasticData(setting))
        assert [text for text in warnings if "udit" in text] == []
    assert_same(read_bits(tmp_path / "audited"), read_bits(tmp_path / "plain"))
    assert count_steps(tmp_path / "audited") == 6 + 3


SAID = {
    "iterator": "is not audited: the position of the iterator 'numbers' cannot be put back.",
    "class": "train_step has changed class Odd.total when",
    "weights": "train_step changes head.weight",
    "batch": "train_step is not audited: the batch cannot be pickled (TypeError('it stays here')).",
    "hook": "train_step is not audited: a hook changes the weights before the update.",
    "loss": "train_step is not audited: a hook changes the loss in place.",
    "manual": "Trainer(audit=...) has no effect: train_step returns None",
}


@pytest.mark.shows("P21")
@pytest.mark.parametrize("kind", SAID)
def test_what_cannot_be_audited_is_said_once_and_trained_as_ever(tmp_path: Path, kind: str) -> None:
    said = []
    for name, audit in (("plain", None), ("audited", OFTEN)):
        setting = Elastic(num_replicas=1, total_steps=4, options=NO_VALIDATION)
        plugins: list[Plugin] = [Doubling()] if kind == "loss" else []
        plugins += [Shrinking()] if kind == "hook" else []
        (tmp_path / name).mkdir()
        trainer = make_trainer(tmp_path / name, setting, *plugins, audit=audit)
        with collect_warnings() as warnings:
            trainer.fit(Odd(setting, tmp_path / name, kind), ElasticData(setting))
        said.append([text for text in warnings if "udit" in text])
    plain, found = said
    assert plain == []
    assert sum(SAID[kind] in text for text in found) == 1, found
    assert_same(read_bits(tmp_path / "audited"), read_bits(tmp_path / "plain"))


@pytest.mark.shows("P21")
@pytest.mark.parametrize("is_connected", [True, False])
def test_loops_that_compute_gradients_in_another_way_are_not_audited(
    tmp_path: Path, is_connected: bool
) -> None:
    setting = Elastic(num_replicas=1, total_steps=1, options=NO_VALIDATION)

    class Yielding(FaultyModel):
        def train_step(self, batch: Any, state: TrainingState) -> Any:
            yield super().train_step(batch, state)

    trainer = make_trainer(tmp_path, setting, audit=OFTEN)
    if is_connected:
        trainer.fit_loop.epoch_loop.batch_loop.connect(optimizer_loop=YieldLoop())
    with collect_warnings() as warnings:
        trainer.fit(Yielding(setting, tmp_path, never), ElasticData(setting))
    assert [text for text in warnings if "udit" in text] == [
        "Trainer(audit=...) has no effect: YieldLoop takes the place of Helios' own BatchLoop or "
        "OptimizerLoop, so Helios does not know how to compute a gradient a second time."
    ]


@pytest.mark.shows("P20", "P61")
def test_a_mismatch_lowers_the_level_of_all_later_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def newest() -> tuple[Path, Sidecar]:
        path = helios.find_last_checkpoint(tmp_path / "elastic")
        assert path is not None
        side = path.with_suffix(".json")
        return path, Sidecar.from_json(side.read_text(), name=side.name)

    setting = Elastic(num_replicas=2, total_steps=2, options=NO_VALIDATION)
    audit = Audit(every=3)
    fit(tmp_path, setting, is_found(4), audit=audit)
    assert (newest()[1].level, newest()[1].mismatches) == ("elastic", [])
    assert "mismatches" not in json.loads(newest()[0].with_suffix(".json").read_text())
    fit(tmp_path, setting, is_found(0), audit=audit, total_steps=3)
    path, sidecar = newest()
    assert sidecar.level == "order"
    (text,) = sidecar.mismatches
    assert NAME in text
    (event,) = [x for x in read_lineage(path.parent) if x["event"] == lineage.MISMATCH]
    assert (event["cause"], event["hosts"]) == (text, [platform.node()])
    fit(tmp_path, setting, total_steps=4)
    path, sidecar = newest()
    assert (sidecar.level, sidecar.mismatches) == ("order", [text])
    assert main(["inspect", str(path)]) == 0
    assert "Iteration 3, step 3" in capsys.readouterr().out


@pytest.mark.parametrize("value", [0, 2.0, True, "often"])
def test_an_audit_needs_a_number_of_steps(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"Audit\(every=...\) must be a positive int, got"):
        Audit(every=value)


def test_an_audit_warns_or_raises() -> None:
    with pytest.raises(ArgumentError, match=r"must be \"warn\" or \"raise\", got 'stop'"):
        Audit(on_mismatch="stop")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"Trainer\(audit=...\) must be None or an Audit"):
        helios.Trainer(audit=5)  # type: ignore[arg-type]


def test_spawned_ranks_get_the_audit(tmp_path: Path) -> None:
    audit = Audit(every=3, on_mismatch="raise")
    assert pickle.loads(pickle.dumps(helios.Trainer(audit=audit)))._options.audit == audit


def test_the_error_is_one_of_helios() -> None:
    assert issubclass(AuditError, helios.HeliosError)
    assert issubclass(AuditError, RuntimeError)
