"""Statements about hooks that no other test shows, through whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.engines.engine import Engine
from helios.hooks.context import Context
from helios.hooks.events import CHANNELS
from helios.loops.epoch import EpochLoop
from helios.loops.evaluation import PredictionLoop
from helios.plugins import HookContext, PipelineHooks, Plugin
from tests.support.event_logs import Linear, Numbers, Quiet

_STATE_METHODS = ("state_dict", "load_state_dict")


def _telling(kind: type, letter: str, tell: Callable[[str], None], *names: str) -> Any:
    """Return a class that tells when some of its methods are called, and does as usual."""

    def override(name: str) -> Callable[..., Any]:
        usual = getattr(kind, name, None)

        def method(self: Any, *args: Any, **named: Any) -> Any:
            tell(f"{letter} {name}")
            return None if usual is None else usual(self, *args, **named)

        return method

    return type(kind.__name__, (kind,), {name: override(name) for name in names})


class Keeping(Quiet):
    """A plugin with state."""

    def state_dict(self) -> dict[str, Any]:
        return {"kept": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {"kept": 1}


class KeepingEpochs(EpochLoop):
    """A loop with state."""

    def state_dict(self) -> dict[str, Any]:
        return {"kept": 2}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {"kept": 2}


def _fit_telling(folder: Path, total_steps: int) -> list[str]:
    """Train with a checkpoint at the end; returns who saved, loaded and heard of it, in order."""
    told: list[str] = []
    events = ("on_load_checkpoint", "on_checkpoint_loaded", "on_save_checkpoint", "on_fit_start")
    tell, heard = told.append, events[:3]
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=total_steps,
        chkpt_root=folder,
        chkpt_frequency=total_steps,
        engine=_telling(Engine, "E", tell, *_STATE_METHODS, *heard)(torch.device("cpu")),
        plugins=[_telling(Keeping, "P", tell, *_STATE_METHODS, *events)("plugin")],
        print_banner=False,
    )
    loop = _telling(KeepingEpochs, "L", tell, *_STATE_METHODS)()
    trainer.fit_loop.connect(epoch_loop=loop)
    model = _telling(Linear, "M", tell, *_STATE_METHODS, *events)()
    trainer.fit(model, _telling(Numbers, "D", tell, *heard)())
    return told


@pytest.mark.shows("K10", "K13", "K35")
def test_states_are_loaded_between_two_events_and_taken_before_one(tmp_path: Path) -> None:
    """K10, K13, K35: all of them, before the training starts; loops come last."""
    saving = [
        *("M state_dict", "P state_dict", "L state_dict", "E state_dict"),
        *(f"{letter} on_save_checkpoint" for letter in "PDME"),
    ]
    starting = ["P on_fit_start", "M on_fit_start"]
    assert _fit_telling(tmp_path, 2) == [*starting, *saving]
    assert _fit_telling(tmp_path, 4) == [
        *(f"{letter} on_load_checkpoint" for letter in "PDME"),
        *("E load_state_dict", "M load_state_dict", "P load_state_dict", "L load_state_dict"),
        *(f"{letter} on_checkpoint_loaded" for letter in "PDME"),
        *starting,
        *saving,
    ]


def _make_trainer(*plugins: Plugin, **options: Any) -> helios.Trainer:
    given = {"train_unit": "iteration", "total_steps": 2, "use_cpu": True, "print_banner": False}
    return helios.Trainer(**{**given, **options}, plugins=plugins)


@pytest.mark.shows("R24")
def test_all_hooks_of_a_run_get_one_live_object() -> None:
    """R24: no copies, so nothing has to be copied back; it is the plugins' own."""
    seen: dict[str, list[Context]] = {}
    hooks = PipelineHooks()
    for channel in CHANNELS:
        note = seen.setdefault(channel, []).append
        hooks.register(channel, HookContext.from_callable(before=note, after=note))

    class Reading(Quiet):
        def on_forward_end(self, context: Context) -> None:
            seen.setdefault("plugin", []).extend([context, self.context])

    _make_trainer(hooks, Reading("reading"), valid_frequency=1).fit(Linear(), Numbers(2, 1))
    assert {name for name, found in seen.items() if found} == {*CHANNELS, "plugin"}
    assert len({id(context) for found in seen.values() for context in found}) == 1


@pytest.mark.shows("L34")
def test_each_prediction_goes_to_a_hook_and_a_loop_of_ones_own_returns_none() -> None:
    """L34: what `return_predictions` was for."""
    written: list[tuple[int, float]] = []

    class Writing(Quiet):
        def on_predicting_batch_end(self, step: int, prediction: Any) -> None:
            written.append((step, prediction.item()))

    class Dropping(PredictionLoop):
        def on_run_end(self) -> list[Any]:
            super().on_run_end()
            return []

    trainer, model = _make_trainer(Writing("writing")), Linear()
    returned = trainer.predict(model, Numbers(1, 3), checkpoint=None)
    kept, written[:] = list(written), []
    trainer.predict_loop = Dropping()
    assert trainer.predict(model, Numbers(1, 3), checkpoint=None) == []
    assert written == kept == [(step, item.item()) for step, item in enumerate(returned)]
