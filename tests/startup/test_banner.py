"""What the banner says of schedulers that look as if they counted epochs."""

from __future__ import annotations

from typing import Any

import pytest

import helios
from tests.support.runs import IndexModule, Setting, SmallModel


class PerEpoch(SmallModel):
    """Says that its scheduler counts epochs."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.scheduler_interval = {"scheduler": "epoch"}


class Stopped(helios.Plugin):
    """Ends the training before its first step."""

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_start(self) -> None:
        raise InterruptedError


def banner_of(
    kind: type[SmallModel], capsys: pytest.CaptureFixture[str], **options: Any
) -> list[str]:
    setting = Setting()
    trainer = helios.Trainer(use_cpu=True, plugins=[Stopped("stopped")], **options)
    trainer.train_exceptions.append(InterruptedError)
    with pytest.raises(InterruptedError):
        trainer.fit(kind(setting), IndexModule(setting))
    return [line for line in capsys.readouterr().err.splitlines() if "schedulers: " in line]


@pytest.mark.shows("P81")
def test_the_banner_names_a_scheduler_that_seems_to_count_epochs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The scheduler of the model has a period of 30."""
    assert banner_of(SmallModel, capsys, total_steps=30) == [
        "schedulers: scheduler: stepped after every optimizer step, not after every epoch. For "
        "epochs, set Model.scheduler_interval = {'scheduler': 'epoch'}"
    ]
    assert banner_of(SmallModel, capsys, total_steps=29) == []
    assert banner_of(SmallModel, capsys, total_steps=30, train_unit="iteration") == []
    assert banner_of(PerEpoch, capsys, total_steps=30) == []
