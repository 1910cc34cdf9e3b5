"""The tutorial's loop for long sequences: its hidden state comes through every resume."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import helios
from helios.state import TrainingState
from tests.loops.recorded import record
from tests.support.resume import resume_everywhere
from tests.support.runs import Outcome

_PAGE = Path(__file__).resolve().parents[2] / "docs/recipes/tbptt.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ROWS, _CHUNK, _SPLIT, _CHUNKS = 3, 6, 2, 7


def _tutorial() -> dict[str, Any]:
    """Return what the classes of the page are: users copy them, so they are what is tested."""
    names: dict[str, Any] = {}
    for block in _BLOCK.findall(_PAGE.read_text("utf-8")):
        if re.search(r"^class (TBPTTLoop|Rows)\b", block, re.MULTILINE):
            exec(compile(block, str(_PAGE), "exec"), names)
    return names


_NAMES = _tutorial()
Carrying, Rows = _NAMES["TBPTTLoop"], _NAMES["Rows"]


class MarkedRows(Rows):  # type: ignore[misc, valid-type]
    """Chunks that know their index; the rows begin new sequences at different times."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chunk, row = divmod(index, _ROWS)
        is_start = torch.tensor(chunk % (3 + row) == 0)
        # Laid along time, as all that is cut along it.
        ids = torch.full((_CHUNK, 1), index)
        return super().__getitem__(index) | {"is_start": is_start, "ids": ids}


class Sequences(helios.DataModule):
    def setup(self) -> None:
        inputs = torch.rand(_ROWS, _CHUNK * _CHUNKS, 1, generator=torch.Generator().manual_seed(3))
        rows = MarkedRows(inputs, inputs.roll(1, dims=1), _CHUNK)
        self._train_dataset = self._create_dataset(
            rows, helios.DataLoaderParams(batch_size=_ROWS, shuffle=False)
        )


class Recurrent(helios.Model):
    """Notes the samples and the losses of every piece."""

    unsaved = ("records", "pieces")

    def __init__(self) -> None:
        super().__init__("recurrent")
        self.records: dict[int, tuple[list[int], str]] = {}
        self.pieces: list[tuple[list[int], bool, float]] = []

    def setup(self, fast_init: bool = False) -> None:
        self.lstm = nn.LSTM(1, 4, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 1))
        weights = [*self.lstm.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.Adam(weights, lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, gamma=0.9)

    def train_step(self, batch: Any, state: TrainingState) -> dict[str, Any]:
        assert batch["inputs"].shape == (_ROWS, _SPLIT, 1)
        outputs, hidden = self.lstm(batch["inputs"], batch["hidden"])
        loss = nn.functional.mse_loss(self.head(outputs).float(), batch["targets"])
        has_past = batch["hidden"] is not None
        self.pieces.append((batch["ids"][:, 0, 0].tolist(), has_past, loss.item()))
        return {"loss": loss, "hidden": hidden}

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        mean = self.loss_items["loss"].item()
        self.records[state.global_iteration] = (self.pieces[-1][0], repr((mean, self.pieces)))
        self.pieces = []


def _train(folder: Path | None, loop: Any, **options: Any) -> Outcome:
    options = {"train_unit": "iteration", "total_steps": 11, "random_seed": 2} | options

    def connect(trainer: helios.Trainer) -> None:
        trainer.fit_loop.epoch_loop.connect(batch_loop=loop)

    return record(folder, Recurrent(), Sequences(), prepare=connect, **options)


@pytest.mark.shows("L21", "L35")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options", [{}, {"train_unit": "epoch", "total_steps": 3}], ids=["iterations", "epochs"]
)
def test_a_carried_state_resumes_everywhere(options: dict[str, Any], tmp_path: Path) -> None:
    whole = resume_everywhere(lambda folder: _train(folder, Carrying(_SPLIT), **options), tmp_path)
    places = [ids for ids, _ in list(whole.records.values())[:_CHUNKS]]
    assert places == [[3 * chunk, 3 * chunk + 1, 3 * chunk + 2] for chunk in range(_CHUNKS)]
