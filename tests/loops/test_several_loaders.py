"""Evaluation loops over one loader and over several (L32, L34)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helios.data.loader import create_dataloader
from helios.data.phase_sources import open_source
from helios.data.source import Source
from helios.engines.engine import Engine
from helios.errors import UsageError
from helios.hooks.bus import Bus
from helios.loops.evaluation import EvaluationLoop, PredictionLoop, TestingLoop, ValidationLoop
from helios.loops.loop import LoopStates
from helios.model.model import Model
from helios.run_parts import RunParts
from helios.run_state import RunState
from helios.terminal.progress import Display


class Reporter(Model):
    """Reports every call of a step, with the numbers that it was told."""

    def __init__(self) -> None:
        super().__init__("reporter")
        self.calls: list[tuple[Any, ...]] = []
        self.device = torch.device("cpu")
        self.net = nn.Dropout()

    def setup(self, fast_init: bool = False) -> None:
        """Nothing to build."""

    def _step(self, batch: Tensor, step: int, *which: int) -> dict[str, tuple[Any, Any]]:
        assert not self.net.training
        self.calls.append((batch.tolist(), step, *which))
        return {"score": (batch.sum(), len(batch))}

    def valid_step(self, batch: Any, step: int, dataloader_idx: int | None = None) -> Any:
        return self._step(batch, step, *([] if dataloader_idx is None else [dataloader_idx]))

    def test_step(self, batch: Any, step: int, dataloader_idx: int | None = None) -> Any:
        return self.valid_step(batch, step, dataloader_idx)

    def predict_step(self, batch: Any, step: int) -> Any:
        self._step(batch, step)
        return batch * 10


def _sources(*names: str) -> list[Source]:
    sources = []
    for number, name in enumerate(names):
        data = [100.0 * number + index for index in range(3)]
        loader, sampler = create_dataloader(data, batch_size=2)
        source = open_source(loader, sampler, run_seed=0, purpose=f"test-{number}")
        source.name = name
        sources.append(source)
    return sources


def _run(loop: EvaluationLoop, model: Reporter, *names: str) -> Any:
    engine = Engine("cpu")
    parts = RunParts(
        model=model,
        engine=engine,
        hooks=Bus(model=model, engine=engine),
        display=Display(),
        seed=0,
        loop_states=LoopStates(loop, "loop", carries=False),
        sources={loop.phase: _sources(*names)} if names else {},
        run=RunState(phase=loop.phase),
    )
    loop._attach(parts)
    try:
        return loop.run()
    finally:
        loop.teardown()


@pytest.mark.shows("L32")
@pytest.mark.parametrize("kind", [ValidationLoop, TestingLoop])
def test_one_loader_has_no_number(kind: type[EvaluationLoop]) -> None:
    """L32: the number of the loader is told only where there are several."""
    model = Reporter()
    assert _run(kind(), model, "") is True
    assert model.calls == [([0.0, 1.0], 0), ([2.0], 1)]
    scores = model.metrics if kind is ValidationLoop else model.test_scores
    assert scores == {"score": 1.0}


@pytest.mark.shows("L32")
@pytest.mark.parametrize("kind", [ValidationLoop, TestingLoop])
def test_several_loaders_are_walked_through_in_order(kind: type[EvaluationLoop]) -> None:
    """L32: steps count from 0 in each; each has scores of its own."""
    model = Reporter()
    assert _run(kind(), model, "near", "far") is True
    assert model.calls == [
        ([0.0, 1.0], 0, 0),
        ([2.0], 1, 0),
        ([100.0, 101.0], 0, 1),
        ([102.0], 1, 1),
    ]
    scores = model.metrics if kind is ValidationLoop else model.test_scores
    assert scores == {"score/near": 1.0, "score/far": 101.0}


@pytest.mark.shows("L34")
def test_predictions_are_a_list_and_of_several_loaders_a_list_for_each() -> None:
    """L34; a step that takes no number is told none."""

    def plain(tensors: list[Tensor]) -> list[list[float]]:
        return [tensor.tolist() for tensor in tensors]

    model = Reporter()
    assert plain(_run(PredictionLoop(), model, "")) == [[0.0, 10.0], [20.0]]
    near, far = _run(PredictionLoop(), model, "near", "far")
    assert plain(near) == [[0.0, 10.0], [20.0]]
    assert plain(far) == [[1000.0, 1010.0], [1020.0]]


def test_without_data_a_pass_is_skipped() -> None:
    """L2, H57."""
    model = Reporter()
    assert _run(ValidationLoop(), model) is None
    assert model.calls == []


@pytest.mark.shows("L31")
def test_a_loop_runs_again_from_the_first_loader() -> None:
    """L31: also after a pass that an error has cut off in the second one."""
    model, loop = Reporter(), ValidationLoop()

    class Failing(Reporter):
        def valid_step(self, batch: Any, step: int, dataloader_idx: int | None = None) -> Any:
            if dataloader_idx == 1:
                raise UsageError("cut off")

    with pytest.raises(UsageError, match="cut off"):
        _run(loop, Failing(), "near", "far")
    assert _run(loop, model, "near", "far") is True
    assert len(model.calls) == 4
    assert model.net.training
