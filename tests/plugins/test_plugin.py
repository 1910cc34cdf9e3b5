"""Plugins: ids, flags, defaults and the registry."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import helios
import helios.plugins
from helios.core.registry import Registry
from helios.plugins import PLUGIN_REGISTRY, CUDAPlugin, Plugin, UniquePluginOverrides, create_plugin
from helios.state import TrainingState
from tests.support.quiet import Quiet


class Roll:
    """What `configure_trainer` needs of a trainer."""

    def __init__(self) -> None:
        self.registered: list[Plugin] = []

    def register_plugin(self, plugin: Plugin) -> None:
        self.registered.append(plugin)


def test_a_plugin_must_define_its_setup() -> None:
    """API section 15."""
    with pytest.raises(TypeError, match="setup"):
        Plugin("plugin")  # type: ignore[abstract]


def test_a_plugin_is_known_by_its_id() -> None:
    """H59."""
    plugin = Quiet("quiet")
    assert plugin.plug_id == "quiet"
    with pytest.raises(AttributeError):
        plugin.plug_id = "other"  # type: ignore[misc]


@pytest.mark.shows("K2", "C17")
def test_a_plugin_claims_nothing_and_is_no_monitor_unless_it_says_so() -> None:
    """H60, C14."""
    assert UniquePluginOverrides() == UniquePluginOverrides(
        training_batch=False,
        validation_batch=False,
        testing_batch=False,
        should_training_stop=False,
    )
    first, second = Quiet("first"), Quiet("second")
    first.unique_overrides.training_batch = True
    assert not second.unique_overrides.training_batch
    assert Quiet.monitor is False


def test_the_historical_properties_can_be_set() -> None:
    """API section 15."""
    plugin = Quiet("quiet")
    assert (plugin.is_distributed, plugin.map_loc, plugin.rank) == (False, "", 0)
    assert (plugin.device, plugin.trainer) == (torch.device("cpu"), None)
    plugin.is_distributed, plugin.map_loc, plugin.rank = True, "cuda:1", 1
    plugin.device = torch.device("meta")
    assert (plugin.is_distributed, plugin.map_loc, plugin.rank) == (True, "cuda:1", 1)
    assert plugin.device == torch.device("meta")


@pytest.mark.shows("K5")
def test_a_user_registers_a_plugin_by_asking_it() -> None:
    """API section 15: `configure_trainer` is called by users and may be extended."""

    class Extended(Quiet):
        def configure_trainer(self, trainer: Any) -> None:
            super().configure_trainer(trainer)
            trainer.extended = True

    roll, plugin = Roll(), Extended("extended")
    plugin.configure_trainer(roll)
    assert roll.registered == [plugin]
    assert roll.extended  # type: ignore[attr-defined]


def test_defaults_hand_everything_through() -> None:
    """API section 15."""
    plugin, batch = Quiet("quiet"), object()
    assert plugin.process_training_batch(batch, TrainingState()) is batch
    assert plugin.process_validation_batch(batch, 0) is batch
    assert plugin.process_testing_batch(batch, 0) is batch
    assert plugin.should_training_stop() is False
    assert plugin.state_dict() == {}
    plugin.load_state_dict({"left": "over"})


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("process_training_batch", ["batch", "state"]),
        ("process_validation_batch", ["batch", "step"]),
        ("process_testing_batch", ["batch", "step"]),
        ("on_validation_start", ["validation_cycle"]),
        ("on_validation_end", ["validation_cycle"]),
        ("load_state_dict", ["state_dict"]),
        ("configure_trainer", ["trainer"]),
        ("configure_model", ["model"]),
        ("_register_in_trainer", ["trainer"]),
    ],
)
def test_methods_keep_the_names_of_their_parameters(method: str, parameters: list[str]) -> None:
    """API section 15."""
    assert list(inspect.signature(getattr(Plugin, method)).parameters)[1:] == parameters


def test_a_registered_plugin_is_created_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """API section 15."""
    assert str(PLUGIN_REGISTRY) == "plugin"
    assert PLUGIN_REGISTRY.get("CUDAPlugin") is CUDAPlugin
    own = Registry("plugin")
    own.register(Quiet)
    monkeypatch.setattr("helios.plugins.plugin.PLUGIN_REGISTRY", own)
    made = create_plugin("Quiet", plug_id="by name")
    assert isinstance(made, Quiet)
    assert made.plug_id == "by name"
    with pytest.raises(KeyError, match="Other"):
        create_plugin("Other")


def test_the_plugin_for_cuda_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """API section 15: a RuntimeError."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CUDAPlugin.plugin_id == "cuda"
    with pytest.raises(RuntimeError, match="CUDA"):
        CUDAPlugin()


@pytest.mark.shows("H61")
def test_the_plugin_for_cuda_owns_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """H61: batches are moved by the model, so another plugin may own them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plugin = CUDAPlugin()
    assert plugin.plug_id == "cuda"
    assert plugin.unique_overrides == UniquePluginOverrides()
    plugin.setup()
    batch = [1]
    assert plugin.process_training_batch(batch, TrainingState()) is batch


def test_every_plugin_in_the_box_is_in_the_registry() -> None:
    """DESIGN section 9: a plugin may be made by its name, as a table of options names it."""
    kinds = [getattr(helios.plugins, name) for name in helios.plugins.__all__]
    boxed = [
        kind
        for kind in kinds
        if inspect.isclass(kind) and issubclass(kind, Plugin) and kind is not Plugin
    ]
    assert len(boxed) == 14
    missing = [kind.__name__ for kind in boxed if kind.__name__ not in PLUGIN_REGISTRY]
    assert not missing
    assert isinstance(create_plugin("EMA", 0.9), helios.plugins.EMA)


@pytest.mark.shows("S70")
def test_a_plugin_lets_exceptions_pass_through_the_trainer() -> None:
    """As in helios-ml: called in configure_trainer, with a type or a list of them."""

    class Pruning(Quiet):
        def configure_trainer(self, trainer: helios.Trainer) -> None:
            super().configure_trainer(trainer)
            self._append_train_exceptions(KeyError, trainer)
            self._append_train_exceptions([ValueError, OSError], trainer)
            self._append_test_exceptions([RuntimeError], trainer)

    trainer = helios.Trainer(use_cpu=True)
    Pruning("pruning").configure_trainer(trainer)
    assert trainer.train_exceptions == [KeyError, ValueError, OSError]
    assert trainer.test_exceptions == [RuntimeError]
    assert "pruning" in trainer.plugins
