"""Plugins of a trainer: every way to register one, and the checks that each of them runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.errors import ArgumentError, ArgumentTypeError, DuplicateError, UsageError
from helios.plugins import Plugin
from helios.start.objects import PluginTable
from helios.state import TrainingState
from tests.support.event_logs import Linear, Numbers
from tests.support.quiet import Quiet
from tests.support.runs import Setting, train


class Owner(Quiet):
    def process_training_batch(self, batch: Any, state: TrainingState) -> Any:
        return batch


def make_trainer(*plugins: Plugin) -> helios.Trainer:
    return helios.Trainer(use_cpu=True, total_steps=1, print_banner=False, plugins=plugins)


def assign(trainer: helios.Trainer, plugin: Any) -> None:
    trainer.plugins[plugin.plug_id] = plugin


def join(trainer: helios.Trainer, plugin: Any) -> None:
    trainer.plugins |= {plugin.plug_id: plugin}


WAYS: dict[str, Callable[[helios.Trainer, Any], Any]] = {
    "register_plugin": lambda trainer, plugin: trainer.register_plugin(plugin),
    "configure_trainer": lambda trainer, plugin: plugin.configure_trainer(trainer),
    "an assignment": assign,
    "update": lambda trainer, plugin: trainer.plugins.update({plugin.plug_id: plugin}),
    "a union in place": join,
}


class Half(Quiet):
    """Loads a state that nothing saves."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing."""


class Shown(Quiet):
    """Puts something into checkpoints that nobody loads, as helios-ml's plugin for Optuna does."""

    def state_dict(self) -> dict[str, Any]:
        return {"trial": 7}


@pytest.mark.shows("H59", "H60", "K2", "R38", "S70")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_register_runs_the_same_checks(way: str) -> None:
    plugins = [Quiet("b"), Owner("a"), Quiet("c")]
    trainer = make_trainer(*plugins)
    for plugin in (second := Quiet("second"), shown := Shown("shown")):
        WAYS[way](trainer, plugin)
    assert list(trainer.plugins.values()) == [*plugins, second, shown]
    assert list(trainer.plugins) == ["b", "a", "c", "second", "shown"]
    assert type(trainer.plugins) is PluginTable
    with pytest.raises(
        ArgumentError, match=r"one owner, but plugin 'a' \(Owner\) and plugin 'two' \(Owner\)"
    ):
        WAYS[way](trainer, Owner("two"))
    with pytest.raises(ArgumentError, match=r"Half must override both.*got load_state_dict only"):
        WAYS[way](trainer, Half("half"))
    expected = r"'b' is registered already\. Pass another plug_id"
    with pytest.raises(DuplicateError, match=expected) as caught:
        WAYS[way](trainer, Quiet("b"))
    assert isinstance(caught.value, KeyError)
    assert list(trainer.plugins.values()) == [*plugins, second, shown]


@pytest.mark.shows("H60")
def test_all_checks_run_again_when_fit_starts() -> None:
    """A method may be set after its plugin has registered."""
    plugin = Quiet("late")
    trainer = make_trainer(Owner("one"), plugin)
    plugin.on_training_start = lambda trainer: None  # type: ignore[method-assign, misc, assignment]
    with pytest.raises(ArgumentTypeError, match=r"Quiet\.on_training_start must take \(\)"):
        trainer.fit(Linear(), Numbers())
    del plugin.on_training_start
    plugin.process_training_batch = lambda batch, state: batch  # type: ignore[method-assign]
    with pytest.raises(ArgumentError, match=r"plugin 'one' \(Owner\) and plugin 'late' \(Quiet\)"):
        trainer.fit(Linear(), Numbers())


@pytest.mark.shows("S70")
def test_a_run_goes_on_with_a_plugin_that_only_saves(tmp_path: Path) -> None:
    setting = Setting(total_steps=2, valid_frequency=None)
    train(tmp_path, setting, Shown("shown"))
    newest = helios.find_last_checkpoint(tmp_path / "small")
    assert newest is not None
    assert helios.load_checkpoint(newest)["plugins"]["shown"] == {"trial": 7}
    again = train(tmp_path, dataclasses.replace(setting, total_steps=4), Shown("shown"))
    assert sorted(again.records) == [3, 4]


def test_a_plugin_calls_the_constructor_of_its_base() -> None:
    class Forgetful(Quiet):
        def __init__(self) -> None:
            """Leave out the base."""

    with pytest.raises(UsageError, match=r"Forgetful has no plug_id: its __init__ must call super"):
        make_trainer(Forgetful())
