"""Plugins of a trainer: every way to register one, and the checks that each of them runs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.errors import ArgumentError, ArgumentTypeError, DuplicateError, UsageError
from helios.hooks.bus import Bus
from helios.plugins import Plugin
from helios.startup.objects import PluginTable, log_order
from helios.state import TrainingState
from tests.support.event_logs import Linear, Numbers
from tests.support.quiet import Quiet
from tests.support.runs import Setting, train


class Owner(Quiet):
    """Owns the training batch."""

    def process_training_batch(self, batch: Any, state: TrainingState) -> Any:
        return batch


class Misled(Quiet):
    """Takes an argument that its event does not have."""

    def on_fit_start(self, trainer: Any) -> None: ...


def make_trainer(*plugins: Plugin) -> helios.Trainer:
    return helios.Trainer(use_cpu=True, total_steps=1, print_banner=False, plugins=plugins)


def assign(trainer: helios.Trainer, plugin: Any) -> None:
    trainer.plugins[plugin.plug_id] = plugin


def join(trainer: helios.Trainer, plugin: Any) -> None:
    trainer.plugins |= {plugin.plug_id: plugin}


def join_table(trainer: helios.Trainer, plugin: Any) -> None:
    table = PluginTable()
    table[plugin.plug_id] = plugin
    trainer.plugins |= table


WAYS: dict[str, Callable[[helios.Trainer, Any], Any]] = {
    "register_plugin": lambda trainer, plugin: trainer.register_plugin(plugin),
    "configure_trainer": lambda trainer, plugin: plugin.configure_trainer(trainer),
    "an assignment": assign,
    "update": lambda trainer, plugin: trainer.plugins.update({plugin.plug_id: plugin}),
    "setdefault": lambda trainer, plugin: trainer.plugins.setdefault(plugin.plug_id, plugin),
    "a union in place": join,
    "a union with a table": join_table,
}
every_way = pytest.mark.parametrize("register", WAYS.values(), ids=WAYS)


@pytest.mark.shows("H59")
@every_way
def test_a_plugin_is_registered_under_its_id(
    register: Callable[[helios.Trainer, Any], Any],
) -> None:
    """H59, DESIGN section 9, "plug-in registration"."""
    first, second = Quiet("first"), Quiet("second")
    trainer = make_trainer(first)
    register(trainer, second)
    assert list(trainer.plugins.items()) == [("first", first), ("second", second)]
    assert type(trainer.plugins) is PluginTable


@pytest.mark.shows("H59", "K2", "R38")
def test_plugins_of_the_constructor_are_registered_in_their_order() -> None:
    plugins = [Quiet("b"), Owner("a"), Quiet("c")]
    assert list(make_trainer(*plugins).plugins.values()) == plugins


@pytest.mark.shows("H60")
@every_way
def test_a_second_owner_of_a_batch_is_refused_when_it_registers(
    register: Callable[[helios.Trainer, Any], Any],
) -> None:
    """H60."""
    trainer = make_trainer(Owner("one"))
    with pytest.raises(
        ArgumentError, match=r"one owner, but plugin 'one' \(Owner\) and plugin 'two' \(Owner\)"
    ):
        register(trainer, Owner("two"))
    assert list(trainer.plugins) == ["one"]


@every_way
def test_a_method_with_wrong_parameters_is_refused_when_it_registers(
    register: Callable[[helios.Trainer, Any], Any],
) -> None:
    """DESIGN section 7."""
    trainer = make_trainer()
    with pytest.raises(ArgumentTypeError, match=r"Misled\.on_fit_start must take \(\)"):
        register(trainer, Misled("misled"))
    assert not trainer.plugins


@pytest.mark.shows("H59")
@pytest.mark.parametrize("way", [way for way in WAYS if "set" not in way])
def test_an_id_that_is_taken_is_refused(way: str) -> None:
    """H59: a `KeyError`; `setdefault` keeps the present one, as dictionaries do."""
    first = Quiet("one")
    trainer = make_trainer(first)
    with pytest.raises(DuplicateError, match=r"'one' is registered already\. Pass another plug_id"):
        WAYS[way](trainer, Quiet("one"))
    with pytest.raises(KeyError):
        WAYS[way](trainer, Owner("one"))
    assert trainer.plugins["one"] is first


def test_setdefault_keeps_the_plugin_that_is_there() -> None:
    first = Quiet("one")
    trainer = make_trainer(first)
    assert trainer.plugins.setdefault("one", Quiet("one")) is first


@pytest.mark.parametrize(
    ("plugins", "error", "message"),
    [
        ((Owner("one"), Owner("two")), ArgumentError, "must have one owner"),
        ((Quiet("one"), Quiet("one")), DuplicateError, "registered already"),
        ((Misled("one"),), ArgumentTypeError, "must take"),
        ((Quiet,), ArgumentError, "must be a list of Plugin objects"),
    ],
)
def test_the_constructor_checks_its_plugins(
    plugins: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_trainer(*plugins)


def test_a_foreign_id_is_refused() -> None:
    """The state of a plugin is saved under its own id, so another one would lose it."""
    trainer = make_trainer()
    with pytest.raises(DuplicateError, match="under its own id 'own', got 'other'"):
        trainer.plugins["other"] = Quiet("own")
    with pytest.raises(DuplicateError, match="under its own id 'own', got 'other'"):
        trainer.plugins.update(other=Quiet("own"))
    assert not trainer.plugins


@pytest.mark.parametrize("thing", [Quiet, None, "quiet", object()])
def test_something_that_is_no_plugin_is_refused(thing: Any) -> None:
    trainer = make_trainer()
    with pytest.raises(ArgumentTypeError, match=r"Trainer.plugins\['it'\] must be a Plugin object"):
        trainer.plugins["it"] = thing


def test_an_id_is_free_again_when_its_plugin_is_removed() -> None:
    """It comes last then: the order is that of registration."""
    first, second, third = Owner("one"), Quiet("two"), Owner("one")
    trainer = make_trainer(first, second)
    del trainer.plugins["one"]
    trainer.register_plugin(third)
    assert list(trainer.plugins.values()) == [second, third]


@pytest.mark.shows("H60")
def test_all_checks_run_again_when_fit_starts() -> None:
    """DESIGN section 9: a method may be set after its plugin has registered."""
    plugin = Quiet("late")
    trainer = make_trainer(Owner("one"), plugin)
    plugin.on_training_start = lambda trainer: None  # type: ignore[method-assign, misc, assignment]
    with pytest.raises(ArgumentTypeError, match=r"Quiet\.on_training_start must take \(\)"):
        trainer.fit(Linear(), Numbers())
    del plugin.on_training_start
    plugin.process_training_batch = lambda batch, state: batch  # type: ignore[method-assign]
    with pytest.raises(ArgumentError, match=r"plugin 'one' \(Owner\) and plugin 'late' \(Quiet\)"):
        trainer.fit(Linear(), Numbers())


class Loud(Quiet):
    """Hears the end of an epoch."""

    def on_training_epoch_end(self, current_epoch: int) -> None: ...


@pytest.mark.shows("K2", "C14")
def test_the_order_of_receivers_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """C8, C14: for the run, and event by event."""
    monitor, plain = Loud("watcher"), Loud("plain")
    monitor.monitor = True
    table = PluginTable()
    table.update({"watcher": monitor, "plain": plain})
    with caplog.at_level(logging.DEBUG):
        log_order(table, Bus(plugins=[monitor, plain], monitors=[monitor]))
    lines = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert lines == [
        (
            logging.DEBUG,
            "Hook order: the plugins watcher, plain, the model, the engine.",
        ),
        (logging.DEBUG, "Called after the model at the ends of validations and epochs: watcher."),
        (
            logging.DEBUG,
            "on_training_epoch_end: plugin 'plain' (Loud), plugin 'watcher' (Loud).",
        ),
    ]


def test_without_plugins_there_is_no_order_to_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        log_order(PluginTable(), Bus())
    assert not caplog.records


@pytest.mark.shows("S70")
@every_way
def test_a_plugin_that_only_loads_a_state_is_refused_when_it_registers(
    register: Callable[[helios.Trainer, Any], Any],
) -> None:
    """DESIGN R5: nothing would be there to load."""
    half = type("Half", (Quiet,), {"load_state_dict": lambda self, *args: None})
    with pytest.raises(ArgumentError, match=r"Half must override both.*got load_state_dict only"):
        register(make_trainer(), half("half"))


class Shown(Quiet):
    """Puts something into checkpoints that nobody loads, as helios-ml's plugin for Optuna does."""

    def state_dict(self) -> dict[str, Any]:
        return {"trial": 7}


@pytest.mark.shows("S70")
@every_way
def test_a_plugin_may_save_a_state_that_nobody_loads(
    register: Callable[[helios.Trainer, Any], Any],
) -> None:
    register(make_trainer(), Shown("shown"))


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


class Replacing(Quiet):
    """Hears an event by a function that its setup has made."""

    def __init__(self, plug_id: str) -> None:
        super().__init__(plug_id)
        self.seen: list[int] = []

    def setup(self) -> None:
        self.on_training_batch_start = lambda state: self.seen.append(state.global_iteration)


class Wrapped(Linear):
    """Puts another function in the place of its step, as torch.compile does."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.calls = 0
        inner = self.train_step

        def step(batch: Any, state: TrainingState) -> Any:
            self.calls += 1
            return inner(batch, state)

        self.train_step = step  # type: ignore[method-assign]


def test_a_hook_that_setup_has_put_in_place_is_heard() -> None:
    """DESIGN section 7."""
    plugin, model = Replacing("replacing"), Wrapped()
    trainer = make_trainer(plugin)
    trainer.fit(model, Numbers(2))
    assert plugin.seen == [1, 2]
    assert model.calls == 2
