"""Full ledgers of whole trainings: the same file, whatever happened on the way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from torch.optim.optimizer import _global_optimizer_pre_hooks

from helios.cli.commands import main as command
from helios.ledger import diff, verify
from helios.ledger.book import FILE_NAME, read_lines
from helios.ledger.line import FULL, STEPS
from helios.plugins import Plugin
from tests.ledger.test_runs import Interrupt
from tests.support.resume import assert_equal, assert_equal_ledgers
from tests.support.runs import Outcome, Setting, train

SETTING = Setting(total_steps=9, chkpt_frequency=4, options={"ledger": FULL})
FEWER = dataclasses.replace(SETTING, options={})


def _lines(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"*/{FILE_NAME}")
    return [json.loads(line) for line in read_lines(path)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Outcome]]:
    """Return the folder and the outcome of an undisturbed run of each level."""
    found = {}
    for level, setting in ((FULL, SETTING), (STEPS, FEWER)):
        folder = tmp_path_factory.mktemp(level)
        found[level] = folder, train(folder, setting)
    return found


@pytest.fixture(scope="module")
def whole(runs: dict[str, tuple[Path, Outcome]]) -> Path:
    """Return the folder of an undisturbed run with a full ledger."""
    return runs[FULL][0]


@pytest.mark.shows("P36")
def test_a_full_ledger_changes_no_bit_and_holds_the_lines_of_the_other(
    runs: dict[str, tuple[Path, Outcome]],
) -> None:
    assert_equal(runs[FULL][1], runs[STEPS][1], since=0)
    for full, line in zip(_lines(runs[FULL][0]), _lines(runs[STEPS][0]), strict=True):
        assert {key: full[key] for key in line if key != "h"} == {
            key: value for key, value in line.items() if key != "h"
        }
    assert diff(runs[FULL][0], runs[STEPS][0]).is_equal
    assert verify(runs[FULL][0]).is_good


@pytest.mark.shows("P37")
def test_each_line_holds_what_its_iteration_computes(whole: Path) -> None:
    head, first, *lines, end = _lines(whole)
    assert head["level"] == FULL
    assert "parameters" not in end
    names = {f"net.{layer}.{kind}" for layer in (0, 1, 4) for kind in ("weight", "bias")}
    assert set(first["initial"]) == names
    for line in (first, *lines):
        (batch,), (generators,) = line["batch"], line["generators"]
        rows = 2 if line["at"][1] % 6 == 0 else 4
        assert [form for _, form in batch.values()] == [f"int64 ({rows},)", f"float32 ({rows}, 5)"]
        assert set(generators) == {"torch", "random", "numpy"}
        # The first layer is frozen in the first epoch.
        trained = names if line["at"][0] > 1 else {name for name in names if "net.0" not in name}
        assert set(line["gradients"]) == trained
        assert set(line["parameters"]) == names
        assert "initial" not in line or line is first


def test_clipping_changes_what_follows_the_gradients(whole: Path, tmp_path: Path) -> None:
    train(tmp_path, dataclasses.replace(SETTING, options={"ledger": FULL, "clip_norm": 1e-3}))
    clipped, first = _lines(tmp_path)[1], _lines(whole)[1]
    assert clipped["gradients"] == first["gradients"]
    assert clipped["parameters"] != first["parameters"]


@pytest.mark.shows("P38")
@pytest.mark.parametrize(
    "changes",
    [
        {"chkpt_frequency": 1},
        {"num_workers": 2},
        {"print_frequency": 3},
    ],
    ids=str,
)
def test_what_changes_no_bit_changes_no_line(
    changes: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    train(tmp_path, dataclasses.replace(SETTING, **changes))
    assert_equal_ledgers(tmp_path, whole)


@pytest.mark.shows("P38")
@pytest.mark.parametrize(
    "changes",
    [{"accumulation": 2}, {"is_manual": True}, {"unit": "epoch", "total_steps": 2}],
    ids=str,
)
def test_a_run_that_is_interrupted_has_the_same_lines(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    setting = dataclasses.replace(SETTING, **changes)
    train(tmp_path / "whole", setting)
    train(tmp_path / "cut", setting, Interrupt(4))
    train(tmp_path / "cut", setting)
    assert_equal_ledgers(tmp_path / "cut", tmp_path / "whole")
    *lines, _ = _lines(tmp_path / "whole")[1:]
    boundaries = [line for line in lines if line["at"][1] % setting.accumulation == 0]
    assert all("gradients" in line and "parameters" in line for line in boundaries)
    assert sum("gradients" in line for line in lines) >= len(boundaries)


@pytest.mark.shows("P39")
@pytest.mark.parametrize(("begun", "other"), [(SETTING, FEWER), (FEWER, SETTING)])
def test_a_ledger_keeps_its_level(
    begun: Setting,
    other: Setting,
    runs: dict[str, tuple[Path, Outcome]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(tmp_path, begun, Interrupt(4))
    capsys.readouterr()
    train(tmp_path, other)
    level = begun.options.get("ledger", STEPS)
    assert f'was begun with "{level}"' in capsys.readouterr().err
    assert_equal_ledgers(tmp_path, runs[level][0])
    assert verify(tmp_path).is_good


def test_a_branch_may_be_full(runs: dict[str, tuple[Path, Outcome]], tmp_path: Path) -> None:
    (path,) = runs[STEPS][0].glob("*/*_iter_4.pth")
    train(tmp_path, dataclasses.replace(SETTING, options={"ledger": FULL, "resume": path}))
    assert (_lines(tmp_path)[0]["after"], _lines(tmp_path)[0]["level"]) == (4, FULL)
    assert diff(runs[FULL][0], tmp_path).is_equal


def test_a_lost_full_ledger_stays_full(whole: Path, tmp_path: Path) -> None:
    train(tmp_path, SETTING, Interrupt(4))
    (path,) = tmp_path.glob(f"*/{FILE_NAME}")
    path.unlink()
    train(tmp_path, SETTING)
    found = diff(whole, tmp_path)
    assert (found.is_equal, found.begins_after, found.levels) == (True, 4, (FULL, FULL))


def test_what_both_hold_is_compared_if_only_one_is_full(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, dataclasses.replace(FEWER, seed=6))
    assert command(["diff", str(whole), str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "Only one of the ledgers is full" in printed
    assert "first in: order of the samples" in printed
    assert "first tensor" not in printed


def test_the_command_names_the_first_tensor(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, dataclasses.replace(SETTING, seed=6))
    assert command(["diff", str(whole), str(tmp_path)]) == 1
    assert "first tensor: batch[0], int64 (4,), and " in capsys.readouterr().out


@pytest.mark.parametrize("is_manual", [False, True])
def test_what_cannot_be_read_stops_nobody(
    is_manual: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(value: Any) -> None:
        raise ValueError("not like this")

    setting = dataclasses.replace(SETTING, is_manual=is_manual)
    whole = train(tmp_path / "whole", setting)
    monkeypatch.setattr("helios.ledger.tensor_digests.fingerprint", refuse)
    capsys.readouterr()
    assert_equal(train(tmp_path / "refused", setting), whole, since=0)
    assert capsys.readouterr().err.count("The ledger cannot read the batches") == 1
    assert verify(tmp_path / "refused").is_good


class Fail(Plugin):
    """Fails in an update."""

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_optimizer_step_end(self, optimizer: Any, committed: bool) -> None:
        assert _global_optimizer_pre_hooks
        raise RuntimeError("planted")


def test_no_hook_of_optimizers_is_left_after_a_run_that_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="planted"):
        train(tmp_path, SETTING, Fail("fail"))
    assert not _global_optimizer_pre_hooks
