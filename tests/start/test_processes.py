"""How many processes carry how many replicas, and who says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.distributed.process_groups import DistributedInfo
from helios.engines.engine import Engine
from helios.errors import ArgumentError, RunMismatchError, UsageError
from helios.launch.launcher import Launch, LaunchKind
from helios.start.options import Options
from helios.start.processes import (
    Stored,
    choose_processes,
    choose_replicas,
    device_for,
)
from tests.start.test_arguments import make, set_gpus
from tests.support.runs import IndexModule, Setting, SmallModel, train

_ALONE = Launch()
_PATH = Path("run_epoch_1_iter_1.pth")


def started(kind: LaunchKind, count: int, local_rank: int = 0) -> Launch:
    return Launch(kind, DistributedInfo(local_rank, local_rank, count, count))


def stored(count: int | None) -> Stored | None:
    return None if count is None else Stored(count, _PATH)


def _count(options: Options, place: Launch) -> int:
    return choose_processes(options, place, None)


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpus(monkeypatch, 0)


@pytest.mark.shows("H48", "S33")
@pytest.mark.parametrize(
    ("num_gpus", "options", "kept", "expected"),
    [
        (0, {}, None, (1, 1)),
        (0, {"num_replicas": 4}, None, (1, 4)),
        (0, {"nproc": 2, "num_replicas": 4}, None, (2, 4)),
        (0, {"nproc": 2}, 4, (2, 4)),
        (2, {}, None, (2, 2)),
        (4, {"gpus": [1, 3]}, None, (2, 2)),
        (4, {"num_replicas": 6}, None, (4, 6)),
        (4, {}, 1, (1, 1)),
    ],
)
def test_a_plain_start_follows_the_run_then_the_arguments_then_the_machine(
    num_gpus: int,
    options: dict[str, Any],
    kept: int | None,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_gpus(monkeypatch, num_gpus)
    arguments = make(**options)
    count = choose_processes(arguments, _ALONE, stored(kept))
    assert (count, choose_replicas(arguments, _ALONE, stored(kept), count)) == expected


@pytest.mark.shows("H48", "E29")
@pytest.mark.parametrize("kind", [LaunchKind.TORCHRUN, LaunchKind.SRUN])
@pytest.mark.parametrize(
    ("options", "kept", "expected"),
    [({}, None, 3), ({"nproc": 3}, 5, 5), ({"num_replicas": 4}, None, 4)],
)
def test_a_launcher_decides_the_number_of_processes(
    kind: LaunchKind, options: dict[str, Any], kept: int | None, expected: int
) -> None:
    arguments, place = make(**options), started(kind, 3)
    count = choose_processes(arguments, place, stored(kept))
    assert count == 3
    assert choose_replicas(arguments, place, stored(kept), count) == expected


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpus(monkeypatch, 2)
    with pytest.raises(ArgumentError, match=r"at most the number of GPUs.* got 3"):
        _count(make(nproc=3), _ALONE)
    with pytest.raises(ArgumentError, match=r"or 1 with your own engine"):
        _count(make(nproc=2, engine=Engine("cuda:1")), _ALONE)


@pytest.mark.shows("S33")
@pytest.mark.parametrize(
    ("options", "kept", "place", "words"),
    [
        ({"nproc": 3}, 2, _ALONE, r"as started: run_.*Trainer\(nproc=3\)"),
        ({"num_replicas": 2}, None, started(LaunchKind.SRUN, 3), "num_replicas is 2.*srun has"),
    ],
)
def test_more_processes_than_replicas_are_refused(
    options: dict[str, Any], kept: int | None, place: Launch, words: str
) -> None:
    arguments = make(**options)
    with pytest.raises(UsageError, match=rf"A run of 2 replicas .*{words}"):
        choose_replicas(arguments, place, stored(kept), 3)


@pytest.mark.shows("S31")
def test_the_number_of_replicas_never_changes() -> None:
    with pytest.raises(
        RunMismatchError, match=r"started with 4 replicas .*must not change.*start a new run"
    ):
        choose_replicas(make(num_replicas=2), _ALONE, stored(4), 1)


@pytest.mark.shows("H48", "E32")
def test_each_process_of_a_machine_has_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """H48."""
    set_gpus(monkeypatch, 4)
    second = started(LaunchKind.TORCHRUN, 2, local_rank=1)
    assert device_for(make(gpus=[2, 3]), second) == torch.device("cuda:3")
    assert device_for(make(use_cpu=True), second) == torch.device("cpu")
    assert device_for(make(engine=Engine("cuda:0")), second) == torch.device("cuda:0")
    # SLURM may show a task its own GPU only.
    set_gpus(monkeypatch, 1)
    alone = started(LaunchKind.SRUN, 2, local_rank=1)
    assert device_for(make(), alone) == torch.device("cuda:0")


_SHARED = Setting(total_steps=2, validates=False, valid_frequency=None)


def _fit(folder: Path, **options: Any) -> bool:
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=4,
        chkpt_root=folder,
        random_seed=_SHARED.seed,
        use_cpu=True,
        print_banner=False,
        **options,
    )
    return trainer.fit(SmallModel(_SHARED), IndexModule(_SHARED))


@pytest.mark.shows("S33")
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_replicas": 3}, RunMismatchError, "started with 2 replicas .*small_epoch_1_iter_2"),
        ({"nproc": 3}, UsageError, r"A run of 2 replicas .*Trainer\(nproc=3\)"),
    ],
)
def test_a_run_refuses_another_number_of_replicas_before_anything_starts(
    options: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    train(tmp_path, _setting(num_replicas=2))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=words):
        _fit(tmp_path, **options)
    assert sorted(tmp_path.rglob("*")) == before
    assert _fit(tmp_path) is True


def _setting(**options: Any) -> Setting:
    return Setting(**{**vars(_SHARED), "options": options})
