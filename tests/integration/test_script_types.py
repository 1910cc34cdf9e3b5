"""A script keeps values of its own types while it changes the number of its processes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.support.scripts import call

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import dataclasses
import enum
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import helios


class Stage(enum.Enum):
    WARM = 1
    MAIN = 2


@dataclasses.dataclass
class Progress:
    stage: Stage = Stage.WARM
    epoch: int = 0


class Data(helios.DataModule):
    def setup(self):
        x = torch.linspace(-1, 1, 16).unsqueeze(1)
        params = helios.DataLoaderParams(batch_size=4, shuffle=True)
        self._train_dataset = self._create_dataset(TensorDataset(x, x.sin()), params)


class Line(helios.Model):
    def setup(self, fast_init=False):
        self.net = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.progress = Progress()

    def on_training_epoch_end(self, current_epoch):
        self.progress.stage = Stage.MAIN
        self.progress.epoch = current_epoch

    def train_step(self, batch, state):
        return (self.net(batch[0]) - batch[1]).square().mean()


if __name__ == "__main__":
    model, (epochs, nproc) = Line("line"), map(int, Path("next.txt").read_text().split())
    trainer = helios.Trainer(
        total_steps=epochs,
        num_replicas=2,
        nproc=nproc,
        chkpt_frequency=1,
        chkpt_root="runs",
        use_cpu=True,
    )
    trainer.fit(model, Data())
"""


def run_script() -> None:
    runpy.run_path(str(Path("train.py").resolve()), run_name="__main__")


@pytest.mark.shows("P112")
@pytest.mark.parametrize("order", [(1, 2), pytest.param((2, 1), marks=pytest.mark.full)], ids=str)
def test_a_run_with_types_of_its_script_changes_processes(
    order: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python imports the script under another name in the processes that it has started."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for epochs, nproc in enumerate(order, 1):
        Path("next.txt").write_text(f"{epochs} {nproc}")
        done = call(run_script)
        assert done.returncode == 0, done.stderr
        assert "WARNING" not in done.stderr
    assert (tmp_path / "runs" / "line" / "line_epoch_2_iter_4.pth").is_file()
