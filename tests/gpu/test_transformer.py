"""A transformer on a GPU: kills, loader workers with pinned memory, compilers, other devices."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.engines.precision import Precision
from helios.state import TrainingState
from tests.support.elastic import KillRank
from tests.support.quiet import Quiet
from tests.support.token_run import EXACT_GPU, NAME, TokenRun, read_tokens, start_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def make_run(*, num_workers: int = 0, averages: bool = False, **options: Any) -> TokenRun:
    return TokenRun({**EXACT_GPU, **options}, num_workers=num_workers, averages=averages)


def read_sidecar(folder: Path) -> dict[str, Any]:
    newest = helios.find_last_checkpoint(folder / NAME)
    assert newest is not None
    sidecar: dict[str, Any] = json.loads(newest.with_suffix(".json").read_text())
    return sidecar


def assert_kill_changes_nothing(folder: Path, run: TokenRun, expected: dict[str, Any]) -> None:
    """Kill the run in the middle of its last epoch, go on, and compare."""
    kill = KillRank("on_backward_end", run.last - 1, None)
    assert start_tokens(folder, run, kill) == -signal.SIGKILL
    assert read_sidecar(folder)["epoch"] == run.num_epochs - 1
    assert start_tokens(folder, run) == 0
    found = read_tokens(folder)
    assert [name for name in expected if found[name] != expected[name]] == []


_RUNS = {
    "fp32": make_run(),
    "bf16, saves that block": make_run(
        precision="bf16", store=helios.CheckpointStore(is_async=False)
    ),
    "fp16, skipped steps, accumulation, EMA": make_run(
        averages=True, precision=Precision.fp16(2.0**34, growth_interval=2), accumulation_steps=2
    ),
    "fp32, workers": make_run(num_workers=2),
    "bf16, workers, three replicas, EMA": make_run(
        num_workers=2, averages=True, precision="bf16", num_replicas=3
    ),
    "fp32, aot_eager": TokenRun(EXACT_GPU, backend="aot_eager"),
}


@pytest.mark.parametrize("name", _RUNS)
def test_a_killed_transformer_goes_on_with_the_same_bits(tmp_path: Path, name: str) -> None:
    run = _RUNS[name]
    assert start_tokens(tmp_path / "whole", run) == 0
    assert_kill_changes_nothing(tmp_path / "killed", run, read_tokens(tmp_path / "whole"))


def test_a_worker_that_dies_beside_the_thread_that_pins_changes_no_bit(tmp_path: Path) -> None:
    run = make_run(num_workers=2)
    assert start_tokens(tmp_path / "whole", make_run()) == 0
    killed = TokenRun(run.options, num_workers=2, kills_worker=True)
    assert start_tokens(tmp_path / "killed", killed) == 0
    assert (tmp_path / "killed" / "a worker has died").exists()
    expected, found = read_tokens(tmp_path / "whole"), read_tokens(tmp_path / "killed")
    different = [name for name in expected if found[name] != expected[name]]
    assert different == ["data"]  # it names the file that the worker has left


def test_a_network_that_inductor_compiles_has_the_level_order(tmp_path: Path) -> None:
    run = TokenRun(EXACT_GPU, backend="inductor")
    kill = KillRank("on_backward_end", run.last - 1, None)
    assert start_tokens(tmp_path, run, kill) == -signal.SIGKILL
    assert start_tokens(tmp_path, run) == 0
    assert read_sidecar(tmp_path)["level"] == "order"
    assert len(read_tokens(tmp_path)["ledger"]) > run.last


def test_a_run_goes_on_on_another_device_and_comes_back(tmp_path: Path) -> None:
    machines = []
    for num_epochs, options in ((1, {"use_cpu": True}), (2, EXACT_GPU), (3, {"use_cpu": True})):
        run = TokenRun({"precision": "fp32", **options}, averages=True, num_epochs=num_epochs)
        assert start_tokens(tmp_path, run) == 0
        newest = helios.find_last_checkpoint(tmp_path / NAME)
        assert newest is not None
        machines.append(helios.load_checkpoint(newest)["machine"]["device"])
        assert read_sidecar(tmp_path)["epoch"] == num_epochs
    assert machines[0] == machines[2] != machines[1]


class WaitsForNothing(Quiet):
    """Lets PyTorch raise an error if anything waits for the GPU in some iterations."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.first, self.last = first, last

    def on_training_batch_start(self, state: TrainingState) -> None:
        if state.global_iteration == self.first:
            torch.cuda.set_sync_debug_mode("error")

    def on_training_batch_end(self, state: TrainingState, should_log: bool) -> None:
        if state.global_iteration == self.last:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_between_saves_and_logs_the_host_does_not_wait(tmp_path: Path, num_replicas: int) -> None:
    """What steps change is looked for in iterations at powers of two."""
    run = TokenRun(
        {"gpus": [0], "num_replicas": num_replicas, "clip_norm": 1.0},
        num_workers=1,
        averages=True,
        num_epochs=1,
        num_samples=128 * 8 * num_replicas,
    )
    assert start_tokens(tmp_path, run, WaitsForNothing(70, 120)) == 0
