"""``Trainer(params=...)``: what is declared defines the run, and a contradiction stops a start."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import os
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.errors import ArgumentError, RunMismatchError
from tests.support.kills import run_in_child


class Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=4)
        self._train_dataset = self._create_dataset(list(torch.linspace(-1, 1, 8)), params)


class Line(helios.Model):
    def __init__(self, name: str = "line") -> None:
        super().__init__(name)
        self.trained: list[int] = []

    unsaved = ("trained",)

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_step(self, batch: torch.Tensor, state: helios.TrainingState) -> torch.Tensor:
        self.trained.append(state.global_iteration)
        return self.net(batch.unsqueeze(1).float()).square().mean()


def fit(
    root: Path, total: int, params: Any = None, *, name: str = "line", **options: Any
) -> list[int]:
    """Train, and return the iterations of this start."""
    chosen = {"train_unit": "iteration", "chkpt_frequency": 1} | options
    trainer = helios.Trainer(
        total_steps=total,
        chkpt_root=root,
        use_cpu=True,
        print_banner=False,
        params=params,
        **chosen,
    )
    model = Line(name)
    trainer.fit(model, Data())
    return model.trained


def newest_options(root: Path, name: str = "line") -> dict[str, Any]:
    """Return what the newest sidecar says of the run's options."""
    paths = (root / name).glob("*_iter_*.json")
    newest = max(paths, key=lambda path: int(path.stem.rpartition("_")[2]))
    found: dict[str, Any] = json.loads(newest.read_text())["options"]
    return found


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Net:
    width: int = 8
    bias: bool = True


def base() -> dict[str, Any]:
    return {
        "lr": 3e-3,
        "epochs": 3,
        "amp": False,
        "color": Color.RED,
        "layers": [1, 2, 3],
        "tags": {"b", "a"},
        "root": Path("data"),
        "act": nn.ReLU,
        "net": Net(),
        "opt": {"kind": "sgd", "group": {"lr": 1.0}},
        "ids": list(range(1000)),
        "flag": "1",
    }


CHANGES: list[tuple[str, Any, str]] = [
    ("lr", 1e-3, "params.lr: 0.003 -> 0.001"),
    ("color", Color.BLUE, "params.color: 'Color.RED' -> 'Color.BLUE'"),
    ("tags", {"a"}, "params.tags: ['a', 'b'] -> ['a']"),
    ("act", nn.GELU, "params.act: 'torch.nn.modules.activation.ReLU' -> 'torch.nn"),
    ("net", Net(16), "params.net.width: 8 -> 16"),
    ("opt", {"kind": "sgd", "group": {"lr": 2.0}}, "params.opt.group.lr: 1.0 -> 2.0"),
    ("ids", list(range(1, 1001)), "params.ids: 'list of "),
    ("flag", 1, "params.flag: '1' -> 1"),
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    fit(folder, 3, base())
    return folder


@pytest.mark.shows("P121")
@pytest.mark.parametrize(("name", "value", "text"), CHANGES)
def test_another_declared_value_stops_an_unfinished_and_a_finished_run(
    name: str, value: Any, text: str, begun: Path
) -> None:
    names = sorted(path.name for path in (begun / "line").iterdir())
    for total in (6, 3):
        with pytest.raises(RunMismatchError) as raised:
            fit(begun, total, base() | {name: value})
        assert text in str(raised.value)
    assert sorted(path.name for path in (begun / "line").iterdir()) == names


def test_equal_values_in_another_form_do_not_stop_a_run(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    same = base() | {
        "epochs": 3.0,
        "layers": (1, 2, 3),
        "net": {"bias": True, "width": 8},
        "opt": argparse.Namespace(group=types.SimpleNamespace(lr=1), kind="sgd"),
        "root": "data",
    }
    assert fit(tmp_path, 4, dict(reversed(same.items()))) == [4]


@pytest.mark.parametrize("allowed", ["params", "params.lr", "params.opt"])
def test_an_allowed_change_goes_on_and_is_recorded(
    allowed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nested = allowed.startswith("params.opt")
    before, after = ({"opt": {"lr": lr}} if nested else {"lr": lr} for lr in (0.1, 0.2))
    fit(tmp_path, 2, before)
    assert fit(tmp_path, 4, after, allow_changes=(allowed,)) == [3, 4]
    name = "opt.lr" if nested else "lr"
    assert f"as allowed: params.{name}: 0.1 -> 0.2" in capsys.readouterr().err
    assert newest_options(tmp_path)["params"] == {name: 0.2}
    # From then on the new value defines the run.
    with pytest.raises(RunMismatchError, match=r"0\.2 -> 0\.1"):
        fit(tmp_path, 5, before)


class Rated(Line):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=self.lr)


def test_what_a_refused_rate_says_to_allow_takes_the_new_rate(tmp_path: Path) -> None:
    def rate_of(total: int, lr: float, *allowed: str) -> float:
        model = Rated(lr)
        options = {"chkpt_frequency": 1, "params": {"lr": lr}, "allow_changes": allowed}
        trainer = helios.Trainer(
            max_steps=total, chkpt_root=tmp_path, use_cpu=True, print_banner=False, **options
        )
        trainer.fit(model, Data())
        found: float = model.optimizer.param_groups[0]["lr"]
        return found

    rate_of(2, 0.1)
    with pytest.raises(RunMismatchError, match=r'allow_changes=\("params\.lr", "optimizer"\)'):
        rate_of(4, 0.2)
    assert rate_of(4, 0.2, "params.lr", "optimizer") == 0.2


@pytest.mark.shows("P121")
def test_a_finished_run_is_never_relabelled(tmp_path: Path) -> None:
    fit(tmp_path, 3, {"lr": 0.1})
    before = newest_options(tmp_path)
    with pytest.raises(RunMismatchError, match=r"Nothing is left to train.*0\.1 -> 0\.2"):
        fit(tmp_path, 3, {"lr": 0.2}, allow_changes=("params",))
    assert newest_options(tmp_path) == before
    assert fit(tmp_path, 3, {"lr": 0.1}) == []


@pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL")
def test_a_run_that_was_killed_at_its_end_is_not_relabelled(tmp_path: Path) -> None:
    def killed() -> None:
        from helios.checkpoint.store import RunFolder

        def die(*_: object) -> None:
            os.kill(os.getpid(), 9)

        RunFolder.mark_finished = die  # type: ignore[assignment]
        fit(tmp_path, 3, {"lr": 0.1})

    assert run_in_child(killed, tmp_path / "outcome") == -9
    with pytest.raises(RunMismatchError, match="Nothing is left to train"):
        fit(tmp_path, 3, {"lr": 0.2}, allow_changes=("params",))


@pytest.mark.shows("P121")
@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_stages_that_a_run_has_passed_may_differ_where_it_is_allowed(
    unit: str, tmp_path: Path
) -> None:
    stages = [(2, {"lr": 0.1}), (4, {"lr": 0.2, "new": 1}), (6, {"lr": 0.3})]

    def script(*allowed: str) -> list[int]:
        options: dict[str, Any] = {"train_unit": unit, "allow_changes": allowed}
        return [len(fit(tmp_path, total, params, **options)) for total, params in stages]

    length = {"iteration": 1, "epoch": 2}[unit]
    assert script("params.lr") == [2 * length] * 3
    assert script("params.lr") == [0, 0, 0]
    with pytest.raises(RunMismatchError, match=r"params.lr: 0.3 -> 0.1"):
        script()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (3, "got int"),
        ({"a": {"b": nn.Linear(1, 1)}}, "got a Linear in params.a.b"),
        ({"a": [1, torch.zeros(1)]}, "got a list in params.a"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_name(given: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=r"Trainer\(params=") as raised:
        helios.Trainer(params=given)
    assert text in str(raised.value)


@pytest.mark.parametrize("name", ["params.rl", "parms.lr"])
def test_a_typo_in_allow_changes_is_refused(name: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="allow_changes"):
        fit(tmp_path, 1, {"lr": 0.1}, allow_changes=(name,))
