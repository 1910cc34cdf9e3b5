"""Options that would have no effect with this model and this data are named at the start."""

from __future__ import annotations

from typing import Any

import pytest

from helios import Trainer
from helios.best import BestRule
from helios.model import Model
from helios.schedule import Schedule
from helios.start.run_log import warn_of_idle_options
from tests.support.quiet import QuietModel
from tests.typed.user_script import Line, Numbers

VALIDATING = Schedule(total_steps=2, valid_frequency=1)


class Mistyped(QuietModel):
    def validate_batch(self, batch: Any, step: int) -> None:
        """Never called."""


class Validating(QuietModel):
    def valid_step(self, batch: Any, step: int) -> None:
        """Compute nothing, on purpose."""


def warnings_of(
    caplog: pytest.LogCaptureFixture,
    model: Model | None = None,
    *,
    schedule: Schedule = VALIDATING,
    rule: BestRule | None = None,
    has_validation: bool = True,
) -> str:
    caplog.clear()
    model = Validating("quiet") if model is None else model
    warn_of_idle_options(schedule, rule, model, has_validation=has_validation)
    assert all(record.levelname == "WARNING" for record in caplog.records)
    return "\n".join(caplog.messages)


@pytest.mark.shows("U27")
def test_a_missing_validation_step_is_named_with_what_may_be_meant(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = warnings_of(caplog, Mistyped("quiet"))
    assert said.startswith("Mistyped has no valid_step, so validations compute no scores.")
    assert "Rename validate_batch to valid_step" in said
    said = warnings_of(caplog, QuietModel("quiet"))
    assert said.endswith(
        "Write valid_step(self, batch), and log scores in it: self.log(name, value)."
    )
    assert warnings_of(caplog, QuietModel("quiet"), schedule=Schedule(total_steps=2)) == ""


def test_validation_without_data_is_named(caplog: pytest.LogCaptureFixture) -> None:
    said = warnings_of(caplog, QuietModel("quiet"), has_validation=False)
    assert said.startswith("There is no validation data, so valid_frequency")
    assert "valid_step" not in said


@pytest.mark.shows("U27")
@pytest.mark.parametrize(
    ("schedule", "has_validation"),
    [(VALIDATING, False), (Schedule(total_steps=2), True)],
)
def test_a_rule_for_the_best_without_validations_is_named(
    schedule: Schedule, has_validation: bool, caplog: pytest.LogCaptureFixture
) -> None:
    best = BestRule("loss", "max")
    said = warnings_of(caplog, schedule=schedule, rule=best, has_validation=has_validation)
    assert said.startswith("There is no validation that computes the score 'loss'")
    assert "There is no validation data" not in said
    assert warnings_of(caplog, rule=best) == ""


@pytest.mark.shows("U27")
def test_a_training_of_no_steps_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert Trainer(total_steps=0, use_cpu=True, print_banner=False).fit(Line("line"), Numbers())
    assert "Trainer(total_steps=0) trains nothing" in capsys.readouterr().err
