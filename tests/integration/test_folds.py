"""Cross-validation around fit: finished folds are known again, the one under way goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

import helios
from helios.state import TrainingState
from tests.support.kills import KillAt, run_in_child
from tests.support.runs import digest

_FOLDS = 4
_EPOCHS = 3
_BATCHES = 4  # of 15 samples in each epoch of each fold
Scores = list[tuple[float, str]]


class Fold(helios.DataModule):
    def __init__(self, number: int) -> None:
        self.number = number

    def setup(self) -> None:
        draw = torch.Generator().manual_seed(0)
        data = [(index, torch.randn(3, generator=draw)) for index in range(20)]
        parts = [part.tolist() for part in torch.randperm(20, generator=draw).chunk(_FOLDS)]
        rest = [index for n, part in enumerate(parts) if n != self.number for index in part]
        params = helios.DataLoaderParams(batch_size=4, shuffle=True)
        self._train_dataset = self._create_dataset(Subset(data, rest), params)
        self._valid_dataset = self._create_dataset(Subset(data, parts[self.number]), params)


class Classifier(helios.Model):
    unsaved = ("trained",)

    def __init__(self, save_name: str) -> None:
        super().__init__(save_name)
        self.trained: list[int] = []

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        if not fast_init:
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)

    def train_step(self, batch: Any, state: TrainingState) -> Tensor:
        ids, features = batch
        self.trained.append(state.global_iteration)
        return (self.net(features) - ids[:, None] / 20).square().mean()

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        ids, features = batch
        return {"error": ((self.net(features) - ids[:, None] / 20).abs().sum(), len(ids))}


def _cross_validate(
    root: Path, *, kill: tuple[int, KillAt] | None = None, run_name: str = ""
) -> tuple[Scores, dict[int, list[int]]]:
    """Return score and digest of the weights of each fold, and the iterations of each."""
    scores, trained = [], {}
    for fold in range(_FOLDS):
        trainer = helios.Trainer(
            run_name,
            total_steps=_EPOCHS,
            valid_frequency=1,
            chkpt_frequency=1,
            chkpt_root=root,
            store=helios.CheckpointStore(is_async=False),
            use_cpu=True,
            print_banner=False,
            plugins=[kill[1]] if kill is not None and kill[0] == fold else [],
        )
        model = Classifier(f"fold-{fold}")
        assert trainer.fit(model, Fold(fold))
        scores.append((model.metrics["error"], digest(model.net.state_dict())))
        trained[fold] = model.trained
    return scores, trained


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Scores:
    scores, trained = _cross_validate(tmp_path_factory.mktemp("undisturbed"))
    assert all(len(seen) == _EPOCHS * _BATCHES for seen in trained.values())
    assert len({digest for _, digest in scores}) == _FOLDS
    return scores


@pytest.mark.parametrize("run_name", ["", "study"])
def test_a_kill_inside_a_fold_costs_no_bit_and_no_fold(
    run_name: str, whole: Scores, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command again: two folds are finished, the third goes on, the fourth begins."""

    kill = (2, KillAt("on_backward_end", _BATCHES + 2))

    def killed() -> Any:
        return _cross_validate(tmp_path, kill=kill, run_name=run_name)

    assert run_in_child(killed, tmp_path / "outcome") == -9
    assert sorted(path.name for path in tmp_path.glob("fold-*")) == ["fold-0", "fold-1", "fold-2"]
    capsys.readouterr()
    scores, trained = _cross_validate(tmp_path, run_name=run_name)
    assert scores == whole
    rest = list(range(_BATCHES + 1, _EPOCHS * _BATCHES + 1))
    assert trained == {0: [], 1: [], 2: rest, 3: list(range(1, _EPOCHS * _BATCHES + 1))}
    said = [line for line in capsys.readouterr().err.splitlines() if "Nothing to do" in line]
    assert len(said) == 2
    for fold, line in enumerate(said):
        assert f"fold-{fold}" in line


def test_a_finished_study_trains_nothing_and_gives_all_scores(
    whole: Scores, tmp_path: Path
) -> None:
    _cross_validate(tmp_path)
    scores, trained = _cross_validate(tmp_path)
    assert scores == whole
    assert not any(trained.values())


def test_a_kill_between_two_folds_costs_nothing(whole: Scores, tmp_path: Path) -> None:
    """The first moment of a fold, at which there is no checkpoint yet."""

    def killed() -> Any:
        return _cross_validate(tmp_path, kill=(1, KillAt("on_fit_start", 0)))

    assert run_in_child(killed, tmp_path / "outcome") == -9
    scores, trained = _cross_validate(tmp_path)
    assert scores == whole
    assert trained[0] == []
    assert len(trained[1]) == _EPOCHS * _BATCHES
