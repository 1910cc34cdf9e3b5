"""``helios replay``: a script is run up to its fit, which repeats a part of its run."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from helios.cli import main
from helios.start.replay import ReplayRequest
from tests.ledger.test_replay import contents
from tests.support.ranks import let_launcher_start_from_server
from tests.support.terminals import run_on_terminal

SCRIPT = """\
import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import helios
from neighbour import RATE


class Data(helios.DataModule):
    def setup(self):
        x = torch.linspace(-1, 1, 40).unsqueeze(1)
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(TensorDataset(x, x.sin()), params)


class Sine(helios.Model):
    def __init__(self, name, arguments):
        super().__init__(name)
        self.arguments = arguments

    unsaved = ("arguments",)

    def setup(self, fast_init=False):
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=RATE)

    def train_step(self, batch, state):
        x, y = batch
        loss = (self.net(x) - y).square().mean() * self.arguments.factor
        self.loss_items["loss"] = loss.detach()
        return loss


parser = argparse.ArgumentParser()
parser.add_argument("--root", type=Path)
parser.add_argument("--factor", type=float, default=1.0)
parser.add_argument("--fails", action="store_true")
parser.add_argument("--catches", action="store_true")
parser.add_argument("--stages", default="one")


def train(name, arguments):
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=8,
        chkpt_frequency=3,
        chkpt_root=arguments.root,
        num_replicas=2,
        use_cpu=True,
        print_banner=False,
    )
    model = Sine(name, arguments)
    try:
        print("trained:", trainer.fit(model, Data()))
    except helios.HeliosError:
        if not arguments.catches:
            raise
    trainer.test(model, Data())
    (arguments.root.parent / f"after-{name}").touch()


if __name__ == "__main__":
    arguments = parser.parse_args()
    print("the script prints")
    if arguments.fails:
        raise KeyError("planted")
    for stage in filter(None, arguments.stages.split(",")):
        train(stage, arguments)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a script and its two runs."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "neighbour.py").write_text("RATE = 0.05\n")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "runs").mkdir()
    words = [str(folder / "train.py"), "--root", str(folder / "runs"), "--stages", "one,two"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        patch.syspath_prepend(folder)
        runpy.run_path(words[0], run_name="__main__")
    sys.modules.pop("neighbour", None)
    return folder


class Ran:
    """What a command gave, and whether it touched the runs."""

    def __init__(
        self, folder: Path, capsys: pytest.CaptureFixture[str], *words: str, rest: str = ""
    ) -> None:
        for mark in folder.glob("after-*"):
            mark.unlink()
        before, path, argv = contents(folder / "runs"), sys.path[:], sys.argv
        root = str(folder / "runs")
        self.code = main(
            ["replay", str(folder / "train.py"), *words, "--", "--root", root, *rest.split()]
        )
        self.out, self.err = capsys.readouterr()
        assert contents(folder / "runs") == before
        assert (sys.path, sys.argv, ReplayRequest.current) == (path, argv, None)
        sys.modules.pop("neighbour", None)
        self.marks = sorted(mark.name for mark in folder.glob("after-*"))

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.mark.shows("P59")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "equal: iterations 4 to 8, with the end of the run"),
        (("--start", "0"), "equal: iterations 1 to 8, with the end of the run"),
        (("--stop", "5"), "equal: iterations 4 to 5"),
    ],
    ids=str,
)
def test_an_equal_part_exits_with_0(
    words: tuple[str, ...], line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(folder, capsys, *words)
    assert ran.code == 0, ran.err
    begin, first, *rest = ran.out.splitlines()
    assert (first, ran.err.partition("\n")[0]) == (line, "the script prints")
    assert ("buffers were not compared" in rest) is ("end of the run" not in line)
    expected = "the first iteration" if "0" in words else "one_epoch_1_iter_"
    assert begin.startswith(f"replayed from {expected}")


@pytest.mark.shows("P59")
def test_a_difference_exits_with_1_and_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(folder, capsys, rest="--factor 2")
    assert ran.code == 1, ran.err
    assert "different from iteration 4 on, first in: losses" in ran.out


@pytest.mark.shows("P59")
@pytest.mark.parametrize(
    ("words", "rest", "message"),
    [
        ((), "--stages ,", "without the call of Trainer.fit"),
        (("--run", "three"), "--stages one", "after these calls: fit of 'one', testing of 'one'"),
        (("--start", "8"), "", "must be below 8"),
        (("--nproc", "3"), "", "can use at most 2 processes"),
        ((), "--fails", "failed with KeyError: 'planted'"),
    ],
    ids=str,
)
def test_what_cannot_be_compared_exits_with_2(
    words: tuple[str, ...],
    rest: str,
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran = Ran(folder, capsys, *words, rest=rest)
    assert (ran.code, "helios replay: " in ran.err, message in ran.err) == (2, True, True), ran.err


@pytest.mark.shows("P59")
@pytest.mark.parametrize(
    "words", [[], pytest.param(["--nproc", "2"], marks=pytest.mark.full)], ids=str
)
def test_a_module_is_repeated_as_python_runs_it(
    words: list[str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    text = SCRIPT.replace("from neighbour", "from .neighbour")
    (package / "train.py").write_text(text)
    (package / "neighbour.py").write_text("RATE = 0.05\n")
    monkeypatch.chdir(tmp_path)
    path, argv, main_module = sys.path[:], sys.argv, sys.modules["__main__"]
    code = main(
        ["replay", *words, "--json", "-m", "package.train", "--", "--root", str(folder / "runs")]
    )
    out, err = capfd.readouterr()
    assert code == 0, err
    assert json.loads(out)["num_equal"] == 8
    assert (sys.path, sys.argv, sys.modules["__main__"]) == (path, argv, main_module)
    for name in ("package", "package.neighbour"):
        del sys.modules[name]


@pytest.mark.shows("P34")
def test_a_run_of_one_process_is_repeated_on_two(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_launcher_start_from_server(monkeypatch)
    ran = Ran(folder, capfd, "--nproc", "2", "--json")
    assert ran.code == 0, ran.err
    assert (ran.json["is_equal"], ran.json["num_equal"], ran.json["has_ended"]) == (True, 8, True)


@pytest.mark.shows("P146")
def test_a_replay_shows_how_far_it_is_on_a_terminal_only(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [sys.executable, "-m", "helios", "replay", str(folder / "train.py"), "--json"]
    words += ["--", "--root", str(folder / "runs")]
    printed, shown = run_on_terminal(words)
    assert b"steps: 100%|" in shown
    ran = Ran(folder, capfd, "--json")
    assert "%|" not in ran.out + ran.err
    assert json.loads(printed) == ran.json
