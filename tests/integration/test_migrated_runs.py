"""A run of helios-ml goes on after its migration, and from there on as exactly as any other."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.checkpoint import loading
from helios.errors import IncompatibleCheckpointError
from helios.migration.folder_migration import Result, migrate_checkpoints
from helios.state import TrainingState
from tests.support import old_files as old
from tests.support import runs

MID = "1.1.0/linear_epoch_2_iter_8.pth"
RICH = "1.4.1/linear_epoch_4_iter_8.pth"
TRAINED = [name for name in old.FILES if not name.startswith("1.0.0")]


class Kept(old.Model):
    """Keeps a copy of what was loaded, before training moves it."""

    def load_state_dict(self, state_dict: dict[str, Any], fast_init: bool = False) -> None:
        super().load_state_dict(copy.deepcopy(state_dict), fast_init)
        self.loaded = state_dict if fast_init else copy.deepcopy(state_dict)


def options_of(name: str) -> tuple[str, int, dict[str, Any]]:
    """Return unit, total steps and further options of the run that wrote a golden file."""
    if name in (RICH, "2.0.1/linear_epoch_4_iter_8.pth"):
        return "iteration", 13, {"accumulation_steps": 2}
    if name.startswith(("0.3.0", "2.0.1")):
        return "epoch", 4, {}
    return "iteration", 14, {}


def start(root: Path, name: str, *, until: int | None = None, **more: Any) -> Kept:
    """Start, or go on with, the run of a golden file; ``until`` ends it by an error."""
    unit, total, options = options_of(name)
    model = Kept(old.names_for(name))

    def fail(state: TrainingState) -> None:
        if until is not None and state.global_iteration >= until:
            raise KeyboardInterrupt

    model.before_end = fail
    trainer = old.make_trainer(root, unit, total, **options | more)
    if until is None:
        assert trainer.fit(model, old.Data())
    else:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(model, old.Data())
    return model


def migrated(root: Path, name: str) -> Path:
    path = old.lay_out(root, name)
    assert migrate_checkpoints(path, backs_up=False)[0].result is Result.MIGRATED
    return path


def newest(root: Path) -> dict[str, Any]:
    path = helios.find_last_checkpoint(root / "linear")
    assert path is not None
    return loading.load(path).payload


@pytest.mark.shows("S26", "S39")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TRAINED)
def test_every_release_goes_on_with_its_bits_and_is_exact_from_there(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = migrated(tmp_path / "whole", name)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    begun = loading.load(path).payload["training_state"]["global_iteration"]
    whole = start(tmp_path / "whole", name)
    assert "order of samples, and so the losses, differ" in capsys.readouterr().err
    assert old.is_same(old.raw_model(old.GOLDEN / name), whole.loaded)
    assert min(whole.records) == begun + 1

    # By epochs the first checkpoint of the new package comes after five batches.
    first = start(tmp_path / "cut", name, until=begun + 4 + 3 * (options_of(name)[0] == "epoch"))
    assert "order of samples" in capsys.readouterr().err
    second = start(tmp_path / "cut", name)
    assert "order of samples" not in capsys.readouterr().err
    assert first.records | second.records == whole.records
    ends = [newest(tmp_path / place) for place in ("whole", "cut")]
    assert runs.digest(ends[0]["model"]) == runs.digest(ends[1]["model"])
    assert ends[0]["cursor"] == ends[1]["cursor"]
    assert "migrated_from" not in ends[0]


@pytest.mark.shows("S26")
def test_the_number_of_replicas_is_free_once(tmp_path: Path) -> None:
    path = migrated(tmp_path, "1.1.0/linear_epoch_1_iter_4.pth")

    class Automatic(Kept):
        def train_step(self, batch: Any, state: TrainingState) -> Any:
            _, features, wanted = batch
            self._loss_items["loss"] = torch.zeros(())
            self.ids = []
            return (self.net(features)[:, 0] - wanted).square().mean()

    trainer = old.make_trainer(tmp_path, "iteration", 5, num_replicas=2)
    assert trainer.fit(Automatic(), old.Data(80))
    payload = newest(tmp_path)
    assert payload["num_replicas"] == 2
    # Four batches of 8 on each of two replicas lay before it.
    assert payload["cursor"]["sample"] == 5 * 8 * 2
    assert loading.read_sidecar(path) is not None
    with pytest.raises(helios.errors.RunMismatchError, match="2 replicas"):
        old.make_trainer(tmp_path, "iteration", 6, num_replicas=3).fit(Automatic(), old.Data(80))


@pytest.mark.parametrize("name", [MID, RICH])
def test_validation_and_test_take_a_migrated_checkpoint(tmp_path: Path, name: str) -> None:
    path = migrated(tmp_path, name)
    unit, total, options = options_of(name)
    for call in ("validate", "test"):
        model = Kept(old.names_for(name))
        trainer = old.make_trainer(tmp_path, unit, total, **options)
        getattr(trainer, call)(model, old.Data())
        assert old.is_same(old.raw_model(old.GOLDEN / name), model.loaded)
    network = torch.nn.Linear(4, 1, bias=name != RICH)
    state = helios.load_checkpoint(path)
    assert isinstance(state["training_state"], TrainingState)
    if name != RICH:
        helios.load_weights(path, network)
        assert torch.equal(network.weight, state["model"]["net"]["weight"])


@pytest.mark.shows("S20")
def test_an_unmigrated_file_stops_every_call_and_stays(tmp_path: Path) -> None:
    path = old.lay_out(tmp_path, MID)
    for call in ("fit", "validate", "test"):
        trainer = old.make_trainer(tmp_path, "iteration", 14)
        with pytest.raises(IncompatibleCheckpointError, match="python -m chkpt_migrator"):
            getattr(trainer, call)(Kept(), old.Data())
    assert [p.name for p in path.parent.glob("*.pth*")] == [path.name]
