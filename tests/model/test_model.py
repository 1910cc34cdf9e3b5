"""The model that users subclass: its tables, modes, names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helios import Trainer
from helios.core.registry import Registry
from helios.errors import ArgumentError, UsageError
from helios.model import MODEL_REGISTRY as EXPORTED
from helios.model.model import (
    MODEL_REGISTRY,
    Model,
    create_model,
    find_pretrained_file,
)
from helios.state import TrainingState
from tests.support.quiet import Quiet, QuietModel
from tests.typed.user_script import Line, Numbers


class Net(Model):
    """Two networks, one of them half frozen in evaluation mode."""

    def __init__(self, name: str = "net") -> None:
        super().__init__(name)

    def setup(self, fast_init: bool = False) -> None:
        self.head = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        self.parts = {"tail": nn.Sequential(nn.Dropout(0.5))}
        if not fast_init:
            self.optimizer = torch.optim.SGD(self.head.parameters(), lr=0.1)


def make_net(name: str = "net") -> Net:
    model = Net(name)
    model.setup()
    model.discovery.take_baseline()
    return model


def modes(model: Net) -> list[bool]:
    parts = [*model.head.modules(), *model.parts["tail"].modules()]
    return [part.training for part in parts]


@pytest.mark.parametrize("name", ["net", "net.v1", "my net", "netz_ä", ".hidden", "a..b"])
def test_a_name_of_a_folder_is_accepted(name: str) -> None:
    assert Net(name).save_name == name


@pytest.mark.parametrize("name", ["", "..", "a/b", 3])
def test_a_name_that_is_no_folder_is_an_error_that_shows_it(name: Any) -> None:
    """`chkpt_root/<save_name>/` belongs to one run."""
    with pytest.raises(ArgumentError, match=r"Model\(save_name=\.\.\.\) must be") as caught:
        Net(name)
    assert f"got {name!r}" in str(caught.value)


def test_a_model_without_a_name_has_that_of_its_class_in_lower_case() -> None:
    class DigitNet(QuietModel):
        """Has no constructor of its own."""

    assert DigitNet().save_name == "digitnet"
    assert DigitNet("other").save_name == "other"


@pytest.mark.shows("H58", "R43")
def test_running_losses_are_sums_that_stay_on_the_device() -> None:
    """H58: `.item()` would wait for the device in every batch."""
    model, state = Net(), TrainingState()
    for number in range(3):
        model.on_training_batch_start(state)
        model._loss_items["tensor"] = torch.tensor(2.0, requires_grad=True) * number
        model._loss_items["number"] = 0.5
        model.on_training_batch_end(state, should_log=True)
    running = model._running_losses
    assert isinstance(running["tensor"], torch.Tensor)
    assert running["tensor"].item() == 6.0
    assert not running["tensor"].requires_grad
    assert running["number"] == 1.5


@pytest.mark.shows("L33", "K39")
def test_each_part_gets_back_the_mode_that_it_had() -> None:
    """L33, K39: a part that the user froze stays in evaluation mode."""
    model = make_net()
    model.head[1].eval()
    model.parts["tail"].eval()
    before = modes(model)
    assert any(before)
    for _ in range(2):
        model.eval()
        model.train()
        assert modes(model) == before


def test_a_prediction_must_be_defined_and_the_error_names_the_class() -> None:
    with pytest.raises(UsageError, match=r"Net\.predict_step\(batch, step\) must be defined"):
        Net().predict_step(None, 0)


def test_a_registered_model_is_created_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EXPORTED is MODEL_REGISTRY
    assert str(MODEL_REGISTRY) == "model"
    own = Registry("model")
    own.register(Net)
    monkeypatch.setattr("helios.model.model.MODEL_REGISTRY", own)
    made = create_model("Net", name="by_name")
    assert isinstance(made, Net)
    assert made.save_name == "by_name"
    with pytest.raises(KeyError, match="Other"):
        create_model("Other")


def test_a_pretrained_file_is_found_by_the_folder_and_the_name(tmp_path: Path) -> None:
    """The stem contains `<folder>_<name>_`."""
    root = tmp_path / "nets"
    root.mkdir()
    for name in (
        "nets_big_1.pth",
        "nets_small_2.pth",
        "nets_small_1.pth",
        "nets_small.pth",
        "nets_small_0.txt",
        "small_0.pth",
    ):
        (root / name).touch()
    assert find_pretrained_file(root, "small") == root / "nets_small_1.pth"
    assert find_pretrained_file(root, "big") == root / "nets_big_1.pth"
    with pytest.raises(UsageError, match="nets_tiny_") as caught:
        find_pretrained_file(root, "tiny")
    assert str(root) in str(caught.value)


@pytest.mark.shows("S70")
def test_the_state_before_any_run_is_what_there_is() -> None:
    class Plain(Model):
        def setup(self, fast_init: bool = False) -> None:
            self.net = nn.Linear(2, 1)
            self.count = 3

    model = Plain("plain")
    assert model.state_dict() == {}
    model.setup()
    model.count = 4
    state = model.state_dict()
    assert list(state["objects"]) == ["net"]
    assert state["objects"]["net"]["weight"].data_ptr() == model.net.weight.data_ptr()
    assert not any(state["values"].values())
    again = Plain("plain")
    again.setup()
    again.load_state_dict(state)
    assert torch.equal(again.net.weight, model.net.weight)
    # To look at the state is not the beginning of a run.
    model.count = 5
    assert not any(model.state_dict()["values"].values())


class Watched(Line):
    """A model that logs a number of its own, and keeps what it sees of the run."""

    unsaved = ("seen",)

    def __init__(self) -> None:
        super().__init__("line")
        self.seen: list[tuple[str, int, bool]] = []

    def note(self) -> None:
        context = self.context
        is_own = context.model is self
        self.seen.append((context.phase.value, context.state.global_iteration, is_own))

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        self.note()
        self.context.log({"train/weight": self.net.weight.sum()})

    def on_validation_start(self, validation_cycle: int) -> None:
        super().on_validation_start(validation_cycle)
        self.note()


class Heard(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[tuple[int, float]] = []

    def on_log(self, scalars: Mapping[str, float], state: TrainingState) -> None:
        if "train/weight" in scalars:
            self.numbers.append((state.global_iteration, scalars["train/weight"]))


@pytest.mark.shows("U30")
def test_a_model_sees_the_run_and_logs_a_number_of_its_own() -> None:
    model, heard = Watched(), Heard()
    trainer = Trainer(
        total_steps=1, valid_frequency=1, use_cpu=True, print_banner=False, plugins=[heard]
    )
    trainer.fit(model, Numbers())
    assert model.seen == [
        *(("training", iteration, True) for iteration in range(1, 5)),
        ("validation", 4, True),
    ]
    assert [iteration for iteration, _ in heard.numbers] == [1, 2, 3, 4]
    assert heard.numbers[-1][1] == model.net.weight.sum().item()
    with pytest.raises(UsageError, match="Watched has no context here: it belongs to a run"):
        model.context  # noqa: B018 - a property that raises
    trainer.validate(model, Numbers())
    assert model.seen[-1] == ("validation", 4, True)


def test_defaults_are_the_historical_ones() -> None:
    model = Net()
    assert model.trained_state_dict(1, two=2) == {}
    assert model.types_for_safe_load() == []
    assert model.append_metadata_to_chkpt_name("name") == "name"
    assert model.append_to_banner("banner") == "banner"
    assert model.train_step(None, TrainingState()) is None
    assert model.valid_step(None, 0) is None
    assert model.test_step(None, 0) is None
    assert model.have_metrics_improved() is True
    assert model.should_training_stop() is False
    model.load_for_testing()
