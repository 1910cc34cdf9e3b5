"""Ledgers of whole trainings: the same file, whatever happened on the way."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.ledger import diff, verify
from helios.ledger.book import FILE_NAME, read_lines
from helios.ledger.line import read_float
from helios.state import TrainingState
from helios.storage import files
from tests.support.resume import assert_equal_ledgers
from tests.support.runs import Setting, train

SETTING = Setting(total_steps=14, chkpt_frequency=4)


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the chain."""
    (path,) = folder.glob(f"*/{FILE_NAME}")
    return [json.loads(line) for line in read_lines(path)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, SETTING)
    return folder


@pytest.mark.shows("P1")
def test_a_run_has_a_line_for_each_iteration_and_one_for_its_end(whole: Path) -> None:
    head, *lines, end = _lines(whole)
    assert head["after"] == 0
    assert [line["at"][1] for line in lines] == list(range(1, 15))
    assert end["end"] == 1
    assert all(None not in line["data"] and len(line["data"]) == 2 for line in lines)
    assert verify(whole).is_good
    assert verify(whole).has_ended


@pytest.mark.shows("P5")
@pytest.mark.parametrize(
    "changes",
    [
        {"chkpt_frequency": 1},
        {"chkpt_frequency": 100},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"print_frequency": 3},
        {"options": {"enable_progress_bar": True}},
        {"options": {"store": helios.CheckpointStore(is_async=False)}},
    ],
    ids=str,
)
def test_what_changes_no_bit_changes_no_line(
    changes: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    train(tmp_path, dataclasses.replace(SETTING, **changes))
    assert_equal_ledgers(tmp_path, whole)


def test_a_run_that_is_made_longer_goes_on_with_its_ledger(whole: Path, tmp_path: Path) -> None:
    train(tmp_path, dataclasses.replace(SETTING, total_steps=9))
    train(tmp_path, SETTING)
    assert_equal_ledgers(tmp_path, whole)


@pytest.mark.shows("P6")
@pytest.mark.parametrize("is_async", [True, False])
def test_no_checkpoint_is_saved_without_its_lines(
    is_async: bool, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that refuses the ledger alone: saves are refused with it, the training goes on."""
    write, seen = files.write, []

    def refuse(handle: Any, data: Any) -> int:
        is_due = Path(handle.name).name == FILE_NAME and len(seen) < 6
        if is_due:
            seen.append(sorted(path.name for path in tmp_path.glob("*/*.pth")))
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data)

    monkeypatch.setattr(files, "write", refuse)
    options = {"store": helios.CheckpointStore(is_async=is_async)}
    train(tmp_path, dataclasses.replace(SETTING, chkpt_frequency=2, options=options))
    assert len(seen) == 6
    assert not any(seen)
    assert list(tmp_path.glob("*/*.pth"))
    assert_equal_ledgers(tmp_path, whole)


def test_a_branch_begins_a_ledger_of_its_own(whole: Path, tmp_path: Path) -> None:
    (path,) = whole.glob("*/*_iter_8.pth")
    before = (path.with_name(FILE_NAME)).read_bytes()
    setting = dataclasses.replace(SETTING, options={"resume": path})
    train(tmp_path, setting)
    assert path.with_name(FILE_NAME).read_bytes() == before
    assert _lines(tmp_path)[0]["after"] == 8
    assert diff(whole, tmp_path).is_equal


def test_a_checkpoint_without_ledger_begins_one(tmp_path: Path) -> None:
    off = dataclasses.replace(SETTING, total_steps=8, options={"ledger": "off"})
    train(tmp_path, off)
    assert not list(tmp_path.glob(f"*/{FILE_NAME}"))
    train(tmp_path, SETTING)
    assert _lines(tmp_path)[0]["after"] == 8
    assert verify(tmp_path).is_good
    assert verify(tmp_path).begins_after == 8


class _Rounded(helios.Model):
    """Has a loss on each replica whose mean over two no float32 holds."""

    def __init__(self) -> None:
        super().__init__("rounded")
        self.means: list[float] = []

    unsaved = ("means",)

    def setup(self, fast_init: bool = False) -> None:
        self.net = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.0)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        return self.net(batch[0]).sum() * 0 + batch[0].sum()

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        self.means.append(float(self.loss_items["loss"]))


class _Two(helios.DataModule):
    def setup(self) -> None:
        samples = torch.utils.data.TensorDataset(torch.tensor([[1.0], [1 + 2**-23]]))
        self._train_dataset = self._create_dataset(samples, helios.DataLoaderParams(batch_size=1))


@pytest.mark.shows("P69")
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_losses_are_means_in_float64(accumulation_steps: int, tmp_path: Path) -> None:
    model = _Rounded()
    helios.Trainer(
        train_unit="iteration",
        total_steps=2,
        num_replicas=2,
        accumulation_steps=accumulation_steps,
        use_cpu=True,
        chkpt_root=tmp_path,
        chkpt_frequency=2,
        print_banner=False,
    ).fit(model, _Two())
    found = [read_float(line["loss"]["loss"]) for line in _lines(tmp_path) if "loss" in line]
    assert found == [1 + 2**-24] * 2 * accumulation_steps
    assert set(model.means) == {1.0}
