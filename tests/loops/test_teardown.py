"""Every loop is torn down on every way out of a training (L40)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import helios
from helios.loops.epoch import BatchLoop, EpochLoop
from helios.loops.evaluation import ValidationLoop
from helios.loops.fit import FitLoop
from helios.loops.loop import Loop
from helios.loops.optimizer import OptimizerLoop
from helios.plugins import Plugin
from tests.loops.parts import Failing
from tests.support.runs import IndexModule, Setting, SmallModel

_SETTING = Setting(total_steps=3)
# A loop is torn down after its children.
_ALL = ["optimizer", "batch", "validation", "epoch", "fit"]


def _noting(base: type[Any], name: str, torn: list[str], *children: Loop) -> Any:
    def teardown(self: Any) -> None:
        base.teardown(self)
        torn.append(name)

    return type(f"Noting{base.__name__}", (base,), {"teardown": teardown})(*children)


def _trainer(torn: list[str], *plugins: Plugin, **options: Any) -> helios.Trainer:
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=3,
        valid_frequency=2,
        use_cpu=True,
        print_banner=False,
        plugins=plugins,
        **options,
    )
    trainer.fit_loop = _noting(
        FitLoop,
        "fit",
        torn,
        _noting(
            EpochLoop,
            "epoch",
            torn,
            _noting(BatchLoop, "batch", torn, _noting(OptimizerLoop, "optimizer", torn)),
            _noting(ValidationLoop, "validation", torn),
        ),
    )
    return trainer


def _fit(trainer: helios.Trainer) -> bool:
    return trainer.fit(SmallModel(_SETTING), IndexModule(_SETTING))


@pytest.mark.shows("L40", "R47")
@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ("setup", ValueError),
        ("on_training_start", KeyboardInterrupt),
        ("on_forward_end", ValueError),
        ("on_optimizer_step_end", KeyboardInterrupt),
        ("on_validation_batch_end", ValueError),
        ("on_training_end", ValueError),
    ],
)
def test_after_an_error_anywhere(event: str, kind: type[BaseException]) -> None:
    torn: list[str] = []
    with pytest.raises(kind):
        _fit(_trainer(torn, Failing(event, kind())))
    assert torn == _ALL


@pytest.mark.shows("L40", "K28")
def test_after_the_regular_end_and_after_a_finished_run(tmp_path: Path) -> None:
    torn: list[str] = []
    for _ in range(2):
        assert _fit(_trainer(torn, chkpt_root=tmp_path, chkpt_frequency=1))
        assert torn == _ALL
        torn.clear()
