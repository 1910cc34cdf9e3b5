"""Plugins: ids, flags, defaults and the registry."""

from __future__ import annotations

import pytest
import torch

import helios
import helios.plugins
from helios.core.registry import Registry
from helios.plugins import PLUGIN_REGISTRY, CUDAPlugin, create_plugin
from tests.support.quiet import Quiet


def test_a_registered_plugin_is_created_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """A RuntimeError."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CUDAPlugin.plugin_id == "cuda"
    with pytest.raises(RuntimeError, match="CUDA"):
        CUDAPlugin()


@pytest.mark.shows("K5", "S70")
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
