"""Validate, test and predict: the newest checkpoint, no trace (H54-H57, K31, K32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.plugins import Plugin
from tests.support.runs import EventLog, IndexModule, Setting, SmallModel, train

_SETTING = Setting(total_steps=6)


def _trainer(folder: Path | None, *plugins: Plugin, **options: Any) -> helios.Trainer:
    return helios.Trainer(
        chkpt_root=folder, use_cpu=True, print_banner=False, plugins=plugins, **options
    )


@pytest.mark.shows("L34")
def test_predictions_come_in_the_order_of_the_data(tmp_path: Path) -> None:
    train(tmp_path, _SETTING)
    found = _trainer(tmp_path).predict(SmallModel(_SETTING), IndexModule(_SETTING))
    assert [ids.tolist() for ids in found] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.shows("H56", "L1")
def test_every_evaluation_loads_the_newest_checkpoint(tmp_path: Path) -> None:
    outcome = train(tmp_path, _SETTING)
    for call in ("validate", "test", "predict"):
        model = SmallModel(_SETTING)
        getattr(_trainer(tmp_path), call)(model, IndexModule(_SETTING))
        trained = outcome.model["objects"]["net"]
        for name, weight in model.net.state_dict().items():
            assert weight.equal(trained[name]), (call, name)


@pytest.mark.shows("H55", "L33", "C18")
def test_evaluation_mode_comes_before_the_start_event(tmp_path: Path) -> None:
    """C5; and each submodule gets its own mode back (L33)."""
    modes: list[tuple[str, bool]] = []

    class Watching(SmallModel):
        def setup(self, fast_init: bool = False) -> None:
            super().setup(fast_init)
            self.net[1].eval()

        def on_testing_start(self) -> None:
            super().on_testing_start()
            modes.append(("start", self.net.training))
            assert torch.is_inference_mode_enabled()

        def on_testing_end(self) -> None:
            modes.append(("end", self.net.training))
            modes.append(("frozen part", self.net[1].training))

    _trainer(None).test(Watching(_SETTING), IndexModule(_SETTING), checkpoint=None)
    assert modes == [("start", False), ("end", True), ("frozen part", False)]


@pytest.mark.shows("H56")
def test_without_a_checkpoint_the_model_loads_its_own_weights() -> None:
    called: list[int] = []

    class Loading(SmallModel):
        def load_for_testing(self) -> None:
            called.append(1)

    _trainer(None).test(Loading(_SETTING), IndexModule(_SETTING))
    assert called == [1]


@pytest.mark.shows("H56", "K31")
def test_no_data_is_no_error_and_no_event() -> None:
    class Empty(IndexModule):
        def setup(self) -> None:
            return

    log = EventLog()
    assert _trainer(None, log).test(SmallModel(_SETTING), Empty(_SETTING), checkpoint=None)
    assert log.events == [("teardown",)]
    assert _trainer(None).predict(SmallModel(_SETTING), Empty(_SETTING), checkpoint=None) == []
