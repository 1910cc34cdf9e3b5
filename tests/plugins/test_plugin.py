"""Plugins: ids, flags, defaults and the registry."""

from __future__ import annotations

import pytest
import torch

import helios
import helios.plugins
from helios.plugins import CUDAPlugin
from tests.support.quiet import Quiet


def test_the_plugin_for_cuda_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert not any(vars(Pruning("pruning").unique_overrides).values())
