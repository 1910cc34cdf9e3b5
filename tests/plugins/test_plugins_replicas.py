"""Ready-made plugins over four replicas: the same bits, decisions and events for every P.

One training holds them all; what each of them logs, decides and saves is compared between one
process and several, without a break and with restarts on other numbers of processes.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.hooks.context import Context
from helios.hooks.events import CHANNELS
from helios.plugins import (
    EMA,
    SWA,
    EarlyStopping,
    GradientNormMonitor,
    HookContext,
    PipelineHooks,
    Plugin,
)
from helios.state import TrainingState
from tests.support.elastic import (
    Elastic,
    ElasticData,
    ElasticModel,
    assert_same,
    make_trainer,
    read_bits,
)
from tests.support.ranks import run_ranks
from tests.support.runs import digest

_IN_TURNS = ("on_model_forward", "on_model_backward")


class Diary(Plugin):
    """Writes all numbers and the scopes of each process; breaks off the run where it is told to."""

    unsaved = ("folder", "until")

    def __init__(self, folder: Path, until: int) -> None:
        super().__init__("diary")
        self.folder, self.until = folder, until

    def setup(self) -> None:
        """Nothing to prepare."""

    def write(self, name: str, line: Any) -> None:
        with (self.folder / f"{name}-{self.context.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_log(self, scalars: dict[str, float], state: TrainingState) -> None:
        self.write("logged", [state.global_iteration, scalars])

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        if state.global_iteration == self.until and self.context.rank == 0:
            self.context.interrupt("the test breaks off")


class Scope(HookContext):
    """Counts what it enters, and writes it down; in turns of replicas it only writes."""

    def __init__(self, channel: str, diary: Diary) -> None:
        self.channel, self.diary = channel, diary
        self.count = 0

    def on_enter(self, ctx: Context) -> None:
        place = [ctx.state.global_iteration, self.channel, ctx.phase.value]
        if self.channel in _IN_TURNS:
            self.diary.write("turns-of-scopes", [*place, ctx.replica, ctx.batch[0].tolist()])
            return
        if ctx.phase.value == "training":  # a process may have no batch in an evaluation
            self.count += not ctx.resumed
            self.diary.write("scopes", [*place, self.count])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def _plugins(folder: Path, until: int) -> list[Plugin]:
    diary = Diary(folder, until)
    hooks = PipelineHooks()
    for channel in CHANNELS:
        hooks.register(channel, Scope(channel, diary))
    return [
        EMA(decay=0.8, averages_buffers=True),
        SWA(start=2, every=2, averages_buffers=True, swaps_in=()),
        EarlyStopping("loss", mode="min", patience=2, min_delta=1.0),
        GradientNormMonitor(per_network=True, per_parameter=True),
        hooks,
        diary,
    ]


def _work(rank: int, folder: str, setting: Elastic, until: int = 0) -> dict[str, Any]:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    model = ElasticModel(setting, path)
    trainer = make_trainer(path, setting, *_plugins(path, until))
    if trainer.fit(model, ElasticData(setting)):
        trainer.test(model, ElasticData(setting))
    return dict(model.test_scores)


def _train(folder: Path, setting: Elastic, count: int, until: int = 0) -> list[dict[str, Any]]:
    if count == 1:
        return [_work(0, str(folder), setting, until)]
    return run_ranks(_work, count, str(folder), setting, until)


def _lines(folder: Path, name: str, rank: int = 0) -> list[Any]:
    return list(map(json.loads, (folder / f"{name}-{rank}.jsonl").read_text().splitlines()))


def _turns(folder: Path, count: int) -> Counter[str]:
    lines = [line for rank in range(count) for line in _lines(folder, "turns-of-scopes", rank)]
    return Counter(json.dumps(line) for line in lines if line[2] == "training")


def _states(folder: Path) -> dict[str, str]:
    """Return digests of the states of plugins in all checkpoints."""
    return {
        f"{path.name} {name}": digest(state)
        for path in sorted((folder / "elastic").glob("*.pth"))
        for name, state in helios.load_checkpoint(path)["plugins"].items()
    }


@pytest.mark.full
@pytest.mark.parametrize("accumulation", [1, 2])
def test_bits_numbers_and_events_are_those_of_one_process(
    tmp_path: Path, accumulation: int
) -> None:
    setting = Elastic(
        accumulation=accumulation,
        total_steps=40,
        options={"print_frequency": 1, "valid_frequency": 2},
    )
    whole = tmp_path / "1"
    scores = _train(whole, setting, 1)
    assert len(read_bits(whole).means) == 6 * accumulation  # ended by its own plugin
    logged = _lines(whole, "logged")
    names = {name for _, scalars in logged for name in scalars}
    assert {"grad_norm", "grad_norm/body", "grad_norm/head.weight", "valid/loss"} <= names
    for count in (2, 3, 4):
        folder = tmp_path / str(count)
        assert _train(folder, setting, count) == scores * count
        for rank in range(count):
            assert _lines(folder, "logged", rank) == logged
            assert _lines(folder, "scopes", rank) == _lines(whole, "scopes")
        assert _turns(folder, count) == _turns(whole, 1)
        assert _states(folder) == _states(whole)
        assert_same(read_bits(folder), read_bits(whole))


@pytest.mark.full
def test_others_go_on_with_what_plugins_have_kept(tmp_path: Path) -> None:
    options = {"print_frequency": 1, "valid_frequency": 2}
    setting = Elastic(accumulation=2, total_steps=40, options=options)
    whole = tmp_path / "whole"
    scores = _train(whole, setting, 1)
    for number, order in enumerate(((4, 1, 2, 3), (1, 3, 4, 2))):
        folder = tmp_path / str(number)
        for until, count in zip((2, 6, 8, 0), order, strict=True):
            found = _train(folder, setting, count, until)
        assert found == scores * count
        assert _lines(folder, "logged") == _lines(whole, "logged")
        last = {name: digest for name, digest in _states(whole).items() if "iter_12" in name}
        assert {name: _states(folder)[name] for name in last} == last
        assert_same(read_bits(folder), read_bits(whole))
