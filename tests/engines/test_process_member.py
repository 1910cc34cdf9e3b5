"""Who a process is among others, and what they tell each other by name."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helios.engines.device import sync_to_device
from helios.engines.engine import Engine
from helios.errors import ArgumentError, RankError, UsageError
from helios.replicas.reduction_tree import tree_sum
from tests.support.ranks import run_ranks

SIZES = pytest.mark.parametrize("num_ranks", [2, 3])


def describe(engine: Engine) -> tuple[Any, ...]:
    return (
        engine.rank,
        engine.local_rank,
        engine.world_size,
        engine.backend,
        engine.is_ddp,
        engine.is_master_process,
        engine.is_worker_process,
    )


def noisy(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers whose sum depends on its order."""
    generator = torch.Generator().manual_seed(rank)
    return ((torch.rand(50, generator=generator) - 0.5) * 10.0 ** (rank * 3)).to(dtype)


@pytest.mark.shows("C9", "E1", "E4")
def test_a_lone_process_is_its_own_master() -> None:
    assert describe(Engine("cpu")) == (-1, -1, 1, None, False, True, False)


@pytest.mark.shows("E9", "E14", "E15")
def test_a_lone_process_waits_for_nobody() -> None:
    engine, metrics, done, tensor = Engine("cpu"), {"loss": 1.0}, [], torch.ones(2)
    engine.barrier()
    assert engine.sync_tensor(tensor, None) is engine.sync_tensor(tensor, "sum") is tensor
    with engine.ddp_sync_run():
        done.append(1)
    assert done == [1]
    assert engine.sync_metrics(metrics, weight=3) is metrics
    with pytest.raises(ZeroDivisionError), engine.ddp_sync_run():
        raise ZeroDivisionError


@pytest.mark.shows("E13")
def test_an_unknown_mode_and_a_weight_below_zero_are_errors_everywhere() -> None:
    with pytest.raises(ArgumentError, match=r'sync_tensor\(mode=\.\.\.\) must be "sum", "mean"'):
        Engine("cpu").sync_tensor(torch.ones(1), "max")
    with pytest.raises(ArgumentError, match=r"sync_metrics\(weight=\.\.\.\) must be a number"):
        Engine("cpu").sync_metrics({"loss": 1.0}, -1)


def _describe_rank(rank: int) -> Any:
    return describe(Engine("cpu"))


@pytest.mark.shows("H51", "E5", "E43")
@SIZES
def test_a_rank_knows_its_place(num_ranks: int) -> None:
    assert run_ranks(_describe_rank, num_ranks) == [
        (rank, rank, num_ranks, "gloo", True, rank == 0, rank > 0) for rank in range(num_ranks)
    ]


def _sync(rank: int) -> dict[str, Any]:
    engine = Engine("cpu")
    own = torch.tensor([rank + 1.0, 0.0])
    counted = torch.full((rank, 2), rank, dtype=torch.bfloat16)
    found = {
        "sum": engine.sync_tensor(own, "sum"),
        "mean": engine.sync_tensor(own, "mean"),
        "all": engine.sync_tensor(counted, "all"),
        "integers": engine.sync_tensor(torch.tensor(rank + 1), "sum"),
        "their mean": engine.sync_tensor(torch.tensor(rank), "mean"),
        "order": engine.sync_tensor(noisy(rank), "sum"),
        "of a graph": engine.sync_tensor(nn.Parameter(own.clone()) * 2, "sum"),
        "own": own,
    }
    for mode, tensor in ((None, own), ("max", own), ("sum", own[:rank]), ("mean", own.to(int))):
        if mode == "mean" and rank == 0:
            tensor = own
        try:
            engine.sync_tensor(tensor, mode)
        except (ArgumentError, UsageError) as error:
            found[f"error {mode}"] = str(error)
    return found


@pytest.mark.shows("E10", "E11", "E12", "E13", "E43")
@SIZES
def test_tensors_are_summed_averaged_and_listed(num_ranks: int) -> None:
    ranks = range(num_ranks)
    total = num_ranks * (num_ranks + 1) / 2
    for rank, found in enumerate(run_ranks(_sync, num_ranks)):
        assert found["sum"].tolist() == [total, 0.0]
        assert found["mean"].tolist() == [total / num_ranks, 0.0]
        assert [part.shape for part in found["all"]] == [(other, 2) for other in ranks]
        assert all((part == other).all() for other, part in enumerate(found["all"]))
        assert {part.dtype for part in found["all"]} == {torch.bfloat16}
        assert (found["integers"].item(), found["integers"].dtype) == (total, torch.int64)
        assert found["their mean"].item() == sum(ranks) / num_ranks
        assert found["their mean"].dtype is torch.float32
        assert torch.equal(found["order"], tree_sum([noisy(other) for other in ranks]))
        assert found["of a graph"].tolist() == [2 * total, 0.0]
        assert not found["of a graph"].requires_grad
        assert found["own"].tolist() == [rank + 1.0, 0.0]
        assert "with several processes, got None" in found["error None"]
        assert "got 'max'" in found["error max"]
        assert "one type and shape" in found["error sum"]
        assert "one type and shape" in found["error mean"]


def _metrics(rank: int) -> Any:
    engine = Engine("cpu")
    own = {"loss": float(rank), "score": torch.tensor(2.0 * rank)}
    if rank == 1:
        own["only here"] = 7
    first = engine.sync_metrics(own, weight=rank + 1)
    second = engine.sync_metrics({"loss": 1.0})
    try:
        engine.sync_metrics({"loss": 1.0}, weight=0)
    except UsageError as error:
        return first, second, str(error)
    return None


@pytest.mark.shows("E14", "E43")
@SIZES
def test_metrics_are_means_by_weight(num_ranks: int) -> None:
    weights = range(1, num_ranks + 1)
    loss = sum(rank * weight for rank, weight in enumerate(weights)) / sum(weights)
    for first, second, error in run_ranks(_metrics, num_ranks):
        assert first == {"loss": loss, "only here": 7.0, "score": 2 * loss}
        assert second == {"loss": 1.0}
        assert "must be positive on at least one process for ['loss']" in error


def _take_turns(rank: int, folder: str) -> Any:
    engine, place = Engine("cpu"), Path(folder)
    with engine.ddp_sync_run():
        seen = sorted(path.name for path in place.iterdir())
        if rank == 0:
            (place / "data").write_text("downloaded")
    for bad in (0, 1):
        begun, error = False, ""
        try:
            with engine.ddp_sync_run():
                begun = True
                if rank == bad:
                    raise FileNotFoundError("no net")
        except (FileNotFoundError, RankError) as found:
            error = f"{type(found).__name__}: {found}"
        seen += [begun, error]
    # Nobody is lost: the group works on.
    return seen, engine.sync_tensor(torch.ones(1), "sum").item()


@pytest.mark.shows("E15", "E43")
@SIZES
def test_rank_0_goes_first_and_its_failure_is_everybodys(num_ranks: int, tmp_path: Path) -> None:
    """Nobody waits for a rank that has failed."""
    results = run_ranks(_take_turns, num_ranks, str(tmp_path))
    own = "FileNotFoundError: no net"
    given_up = "RankError: ddp_sync_run() was aborted because its block failed on rank"
    for rank, (seen, total) in enumerate(results):
        *files, begun_0, error_0, begun_1, error_1 = seen
        assert files == ([] if rank == 0 else ["data"])
        assert (begun_0, begun_1, total) == (rank == 0, True, num_ranks)
        assert error_0.startswith(own if rank == 0 else f"{given_up} 0: {own}")
        assert error_1.startswith(own if rank == 1 else f"{given_up} 1: {own}")


def _set_up(rank: int, folder: str, count: int) -> Any:
    torch.distributed.destroy_process_group()
    engine = Engine("cpu")
    before = engine.rank
    engine.setup_process(rank, count, meeting=Path(folder, "meeting").as_uri())
    engine.setup_process(rank, count)
    found = (before, describe(engine), engine.sync_tensor(torch.tensor(rank), "sum").item())
    engine.cleanup_process()
    engine.cleanup_process()
    after = engine.rank
    # What run_ranks expects to leave.
    store = torch.distributed.FileStore(str(Path(folder, "again")), count)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
    torch.distributed.barrier()  # Who leaves while another rank connects fails that one.
    engine.deinit_components()
    return *found, after, engine.rank


@pytest.mark.shows("E6", "E19", "E31", "E43")
@SIZES
def test_a_process_joins_and_leaves_by_hand(num_ranks: int, tmp_path: Path) -> None:
    """A group that somebody else has made is not left."""
    results = run_ranks(_set_up, num_ranks, str(tmp_path), num_ranks)
    total = num_ranks * (num_ranks - 1) // 2
    for rank, found in enumerate(results):
        place = (rank, rank, num_ranks, "gloo", True, rank == 0, rank > 0)
        assert found == (-1, place, total, -1, rank)


Point = collections.namedtuple("Point", "x y")


@pytest.mark.shows("E1", "E7", "E8")
def test_everything_that_can_be_moved_is_moved() -> None:
    """Containers keep their types, and what came in is not changed."""
    meta = torch.device("meta")
    table = np.array([(1, 2.5)], dtype=[("id", "i4"), ("size", "f8")])
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    value = {
        "tensor": torch.ones(2),
        "point": Point(torch.ones(1), "text"),
        "array": np.arange(3),
        "table": table,
        "words": np.array(["a", "b"]),
        "network": nn.Linear(1, 1),
        "optimizer": optimizer,
    }
    moved = sync_to_device(value, meta)
    assert moved["tensor"].device == moved["point"].x.device == meta
    assert type(moved["point"]) is Point
    assert (moved["array"].device, moved["array"].dtype) == (meta, torch.int64)
    assert {name: part.dtype for name, part in moved["table"].items()} == {
        "id": torch.int32,
        "size": torch.float64,
    }
    assert moved["words"] is value["words"]
    assert moved["network"] is value["network"]
    assert moved["network"].weight.device == meta
    assert moved["optimizer"] is optimizer
    assert value["tensor"].device.type == "cpu"
    assert type(value["array"]) is np.ndarray


@pytest.mark.shows("E38")
def test_an_engine_is_found_for_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    engine = Engine.auto(precision="bf16", clip_norm=1.0)
    assert (engine.device.type, engine.precision.value) == ("cpu", "bf16")
    assert engine._automatic_options == ["Trainer(clip_norm=...)"]
    with pytest.raises(UsageError, match=r"Engine\.auto\(use_cpu=False\) must find a GPU"):
        Engine.auto(use_cpu=False)
    with pytest.raises(ArgumentError, match=r"Engine\.auto\(gpus=\.\.\.\) must be None with"):
        Engine.auto(use_cpu=True, gpus=[0])
    with pytest.raises(ArgumentError, match=r"Engine\.auto\(gpus=\.\.\.\) must name GPUs of"):
        Engine.auto(gpus=[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert Engine.auto(gpus=[3, 1]).device == torch.device("cuda:3")
    assert Engine.auto(use_cpu=True).device == torch.device("cpu")
    assert type(type("Own", (Engine,), {}).auto()).__name__ == "Own"
