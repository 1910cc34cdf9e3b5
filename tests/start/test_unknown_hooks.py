"""Methods that nobody calls are named when a run starts, with what replaces them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from helios.data.datamodule import DataModule
from helios.start.objects import warn_of_unknown_hooks
from tests.support.quiet import Quiet
from tests.support.quiet import QuietModel as Plain


def nothing(*args: Any) -> None:
    """Do nothing."""


class Data(DataModule):
    def setup(self) -> None:
        """Load nothing."""


def warnings_of(owner: object, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    warn_of_unknown_hooks(owner)
    return [record.getMessage() for record in caplog.records]


_FOREIGN = {
    "configure_optimizers": "attributes that setup() builds",
    "lr_scheduler_step": "scheduler_interval",
    "on_after_backward": "on_backward_end",
    "on_test_batch_start": "on_testing_batch_start",
    "on_train_epoch_end": "on_training_epoch_end",
    "on_validation_model_eval": "",
    "training_step": "train_step",
    "val_dataloader": "valid_dataloader",
    "on_something": "",
    "process_x": "",
}
"""Some of what other trainers call, and what only looks like a hook, with what replaces it."""


@pytest.mark.parametrize("base", [Plain, Quiet, Data])
def test_what_nobody_calls_is_named_with_its_counterpart(
    base: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A ported method that is never called changes a training in silence."""
    for name, text in _FOREIGN.items():
        if name in dir(base):
            continue
        owner = type("Ported", (base,), {name: nothing})()
        (message,) = warnings_of(owner, caplog)
        assert message.startswith(f"Ported.{name} is never called by Helios")
        assert text in message.partition(" is never called")[2]


@pytest.mark.parametrize(
    ("base", "name", "receivers"),
    [
        (Plain, "process_training_batch", "plugins"),
        (Plain, "prepare_data", "the data module"),
        (Quiet, "train_step", "the model"),
        (Data, "on_training_start", "plugins and the model"),
    ],
)
def test_an_event_that_the_class_does_not_receive_is_named(
    base: Any, name: str, receivers: str, caplog: pytest.LogCaptureFixture
) -> None:
    (message,) = warnings_of(type("Own", (base,), {name: nothing})(), caplog)
    assert message == f"Own.{name} is never called by Helios: only {receivers} may define it."


def test_what_is_the_users_own_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    owner: Any = Plain()
    own = ("_on_something", "_process_part", "critic_step", "forward", "log", "step")
    for name in own:
        setattr(owner, name, nothing)
    owner.on_device = True
    owner.process_net = nn.Linear(1, 1)
    assert warnings_of(owner, caplog) == []
    kind = type("Typed", (Plain,), {**dict.fromkeys(own, nothing), "on_cpu": property(nothing)})
    assert warnings_of(kind(), caplog) == []
