"""Audits with several processes: another process computes the gradient again, a third decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helios import Audit
from helios.audit.step_audit import find_turn
from helios.state import TrainingState
from tests.support.audited import NAME, FaultyModel, always, fit_rank, never, on_rank_1
from tests.support.elastic import Elastic, ElasticData, assert_same, make_trainer, read_bits
from tests.support.ranks import run_ranks
from tests.support.warned import collect_warnings

OFTEN = Audit(every=1)
NO_VALIDATION = {"valid_frequency": None}


def count_steps(folder: Path) -> int:
    """Return how often ``train_step`` was called in all processes."""
    return sum(len(path.read_text().splitlines()) for path in folder.glob("turns-*.jsonl"))


@pytest.mark.shows("P14")
@pytest.mark.parametrize(
    ("num_replicas", "num_processes", "options"),
    [
        pytest.param(3, 2, {"precision": "bf16"}),
        pytest.param(4, 3, {}, marks=pytest.mark.full),
        pytest.param(3, 3, {}, marks=pytest.mark.full),
        pytest.param(2, 2, {"precision": "fp16"}, marks=pytest.mark.full),
    ],
)
def test_audited_processes_have_the_bits_and_events_of_those_without_audits(
    tmp_path: Path, num_replicas: int, num_processes: int, options: dict[str, Any]
) -> None:
    setting = Elastic(
        num_replicas=num_replicas,
        accumulation=2,
        total_steps=8,
        num_workers=int(not options),
        options=options,
    )
    plain, found = (
        run_ranks(fit_rank, num_processes, tmp_path / name, setting, never, {"audit": audit})
        for name, audit in (("plain", None), ("audited", OFTEN))
    )
    assert found == plain
    assert [each[:3] for each in found] == [([], "", 0)] * num_processes
    assert_same(read_bits(tmp_path / "audited"), read_bits(tmp_path / "plain"))
    num_windows = [event[0] for event in found[0][3]].count("on_training_step_end")
    assert num_windows >= 6
    assert count_steps(tmp_path / "audited") == count_steps(tmp_path / "plain") + num_windows


@pytest.mark.full
def test_thousands_of_audits_over_processes_find_nothing(tmp_path: Path) -> None:
    options = {**NO_VALIDATION, "chkpt_frequency": 1000}
    setting = Elastic(num_replicas=4, accumulation=2, total_steps=1000, options=options)
    more = {"audit": OFTEN, "hears": False}
    for each in run_ranks(fit_rank, 3, tmp_path, setting, never, more, timeout=900):
        assert each[:3] == ([], "", 0)


@pytest.mark.shows("P15")
def test_the_rank_that_computes_wrongly_each_time_is_found_and_named(tmp_path: Path) -> None:
    setting = Elastic(num_replicas=3, total_steps=6, options=NO_VALIDATION)
    run_ranks(fit_rank, 3, tmp_path / "plain", setting, on_rank_1, {})
    found = run_ranks(fit_rank, 3, tmp_path / "audited", setting, on_rank_1, {"audit": OFTEN})
    turns = [
        find_turn(number, num_replicas=3, num_processes=3, accumulation_steps=1)
        for number in range(6)
    ]
    expected = [place for place, turn in enumerate(turns) if 1 in (turn.owner, turn.auditor)]
    warnings = found[0][0]
    assert len(warnings) == len(expected) >= 3
    for number, text in zip(expected, warnings, strict=True):
        turn = turns[number]
        assert f"step {number + 1}: the gradient of replica {turn.replica} differs" in text
        assert f" {NAME}: " in text
        assert f" on rank {turn.owner} (" in text
        assert f" on rank {turn.auditor} (" in text
        assert f"A third computation, on rank {turn.third} (" in text
        assert ": rank 1 (" in text
        assert "has computed wrongly." in text
    # A warning changes no bit: training continues with the first gradients.
    assert_same(read_bits(tmp_path / "audited"), read_bits(tmp_path / "plain"))


@pytest.mark.shows("P19")
def test_a_strict_audit_ends_all_processes_at_the_same_place(tmp_path: Path) -> None:
    setting = Elastic(num_replicas=2, total_steps=6, options=NO_VALIDATION)
    more = {"audit": Audit(every=2, on_mismatch="raise")}
    found = run_ranks(fit_rank, 2, tmp_path, setting, on_rank_1, more)
    (error, code), other = ((each[1], each[2]) for each in found)
    assert (error, code) == other
    assert "Iteration 2, step 2: the gradient of replica 0 differs" in error
    assert "There is no third process to decide which one is right." in error
    assert code == 1


@pytest.mark.shows("P16")
def test_a_fault_that_all_ranks_have_is_not_found(tmp_path: Path) -> None:
    """The limit of an audit: what errs in the same way everywhere looks right."""
    setting = Elastic(num_replicas=2, total_steps=3, options=NO_VALIDATION)
    for each in run_ranks(fit_rank, 2, tmp_path, setting, always, {"audit": OFTEN}):
        assert each[:3] == ([], "", 0)


class Own(FaultyModel):
    """Its step changes an attribute, or communicates, from some iteration on."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.count = 0

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        if state.global_iteration <= 3:
            self.count += 1
        loss = super().train_step(batch, state) * self.count
        if state.global_iteration > 3:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            self._loss_items["mean"] = mean
        return loss


def fit_own(rank: int, folder: Path, setting: Elastic, audit: Audit | None) -> list[str]:
    folder.mkdir(exist_ok=True, parents=True)
    trainer = make_trainer(folder, setting, audit=audit)
    with collect_warnings() as warnings:
        trainer.fit(Own(setting, folder, never), ElasticData(setting))
    return [text for text in warnings if "Audit" in text]


@pytest.mark.shows("P21")
def test_steps_that_change_attributes_stay_in_their_process_and_those_that_communicate_too(
    tmp_path: Path,
) -> None:
    setting = Elastic(num_replicas=2, total_steps=6, options=NO_VALIDATION)
    run_ranks(fit_own, 2, tmp_path / "plain", setting, None)
    first, second = run_ranks(fit_own, 2, tmp_path / "audited", setting, OFTEN)[0]
    assert "train_step changes count." in first
    assert second.endswith("train_step is not audited: the step communicates with other processes.")
    assert_same(read_bits(tmp_path / "audited"), read_bits(tmp_path / "plain"))
    # Of six steps the first is watched only, and the last three cannot be repeated.
    assert count_steps(tmp_path / "audited") == count_steps(tmp_path / "plain") + 2
