"""Evaluations without a checkpoint: modes, and weights of the model's own."""

from __future__ import annotations

import pytest
import torch

import helios
from helios.plugins import Plugin
from tests.support.runs import IndexModule, Setting, SmallModel

_SETTING = Setting(total_steps=6)


def _trainer(*plugins: Plugin) -> helios.Trainer:
    return helios.Trainer(use_cpu=True, print_banner=False, plugins=plugins)


@pytest.mark.shows("H55", "L33", "C18")
def test_evaluation_mode_comes_before_the_start_event() -> None:
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

    _trainer().test(Watching(_SETTING), IndexModule(_SETTING), checkpoint=None)
    assert modes == [("start", False), ("end", True), ("frozen part", False)]


@pytest.mark.shows("H56")
def test_without_a_checkpoint_the_model_loads_its_own_weights() -> None:
    called: list[int] = []

    class Loading(SmallModel):
        def load_for_testing(self) -> None:
            called.append(1)

    _trainer().test(Loading(_SETTING), IndexModule(_SETTING))
    assert called == [1]
