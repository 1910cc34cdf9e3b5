"""What differs from the start that wrote the checkpoint is found, and said in one warning."""

from __future__ import annotations

import dataclasses
import functools
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import helios
from helios.errors import RunMismatchError
from tests.integration.test_declared_params import Data


@dataclasses.dataclass
class Config:
    width: int = 8
    device: Any = dataclasses.field(default_factory=object)


class Model(helios.Model):
    """A model whose setup is a function of its own, with an attribute of any kind."""

    unsaved = ("build", "ignored")

    def __init__(self, build: Callable[[Any], None] | None = None, value: Any = 0.1) -> None:
        super().__init__("line")
        self.build = sgd() if build is None else build
        self.value = self.ignored = value
        self.seen = 0

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        self.build(self)

    def train_step(self, batch: torch.Tensor, state: helios.TrainingState) -> torch.Tensor:
        self.seen += 1
        return self.net(batch.unsqueeze(1).float()).square().mean()


def fit(root: Path, total: int, model: helios.Model, data: Any = None, **options: Any) -> None:
    chosen: dict[str, Any] = {"train_unit": "iteration", "ledger": "off"} | options
    trainer = helios.Trainer(
        total_steps=total,
        chkpt_root=root,
        use_cpu=True,
        print_banner=False,
        chkpt_frequency=1,
        **chosen,
    )
    assert trainer.fit(model, data or Data())


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines that one warning has listed."""
    lines = capsys.readouterr().err.splitlines()
    begins = [n for n, line in enumerate(lines) if "WARNING" in line and line.endswith(":")]
    assert len(begins) <= 1
    listed = lines[begins[0] + 1 :] if begins else []
    ends = [n for n, line in enumerate(listed) if not line.startswith("  ")]
    return [line.strip() for line in listed[: ends[0] if ends else None]]


def sgd(**given: Any) -> Callable[[Any], None]:
    def build(model: Any) -> None:
        model.optimizer = torch.optim.SGD(model.net.parameters(), **{"lr": 0.1} | given)

    return build


def groups(**second: Any) -> Callable[[Any], None]:
    def build(model: Any) -> None:
        first, other = (part.parameters() for part in model.net)
        model.optimizer = torch.optim.SGD([{"params": first}, {"params": other, **second}], lr=0.1)

    return build


def scheduled(kind: Any, *args: Any, **given: Any) -> Callable[[Any], None]:
    def build(model: Any) -> None:
        model.optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1, momentum=0.9)
        model.scheduler = kind(model.optimizer, *args, **given)

    return build


def nested(total: int, gamma: float) -> Callable[[Any], None]:
    def build(model: Any) -> None:
        model.optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
        model.warmup = lr_scheduler.LinearLR(model.optimizer, total_iters=total)
        after = lr_scheduler.ExponentialLR(model.optimizer, gamma=gamma)
        model.scheduler = lr_scheduler.SequentialLR(model.optimizer, [model.warmup, after], [2])

    return build


def decay(step: int, rate: float) -> float:
    return rate**step


L = lr_scheduler
SETTINGS: list[tuple[Any, Any, str]] = [
    (sgd(), sgd(lr=0.2), "optimizer.lr: 0.1 -> 0.2"),
    (sgd(), sgd(lr=torch.tensor(0.5)), "optimizer.lr: 0.1 -> 0.5"),
    (groups(lr=1.0), groups(lr=2.0), "optimizer.param_groups.1.lr: 1.0 -> 2.0"),
    (scheduled(L.StepLR, 2), scheduled(L.StepLR, 3), "scheduler.step_size: 2 -> 3"),
    (
        scheduled(L.LambdaLR, functools.partial(decay, rate=0.9)),
        scheduled(L.LambdaLR, functools.partial(decay, rate=0.8)),
        "scheduler.lr_lambdas: [{'args': [], 'function': 'tests.integration.",
    ),
    (
        nested(3, 0.9),
        nested(4, 0.9),
        "warmup.total_iters, scheduler.schedulers.0.total_iters: 3 -> 4",
    ),
]


@pytest.mark.parametrize(("old", "new", "text"), SETTINGS)
def test_a_setting_that_is_not_taken_is_said_at_each_start(
    old: Any, new: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for total in (1, 2):
        fit(tmp_path, total, Model(old))
    assert said(capsys) == []
    for total in (3, 4):
        fit(tmp_path, total, Model(new))
        lines = [line for line in said(capsys) if line.startswith(text)]
        assert len(lines) == 1
        assert "the run keeps " in lines[0]
        assert 'allow_changes=("optimizer",)' in lines[0]
    fit(tmp_path, 5, Model(old))
    assert said(capsys) == []


VALUES: list[tuple[Any, Any, str]] = [
    (0.1, 0.2, "model.value: 0.1 -> 0.2"),
    (Config(8), Config(9), "model.value.width: 8 -> 9"),
    ({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, "model.value.a.c: not set -> 2"),
    (list(range(999)), list(range(998)), "model.value: 'list of "),
]


@pytest.mark.parametrize(("old", "new", "text"), VALUES)
def test_an_attribute_that_differs_is_said_once(
    old: Any, new: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, 1, Model(value=old))
    fit(tmp_path, 2, Model(value=new))
    (line,) = said(capsys)
    assert line.startswith(text)
    fit(tmp_path, 3, Model(value=new))
    assert said(capsys) == []


class Folder(Data):
    def __init__(self, root: str, num_workers: int = 0) -> None:
        self.root, self.num_workers = root, num_workers


class Rated(Model):
    """Passes an argument on to its optimizer, as most scripts do."""

    def __init__(self, lr: float) -> None:
        super().__init__(sgd(lr=lr))
        self.lr = lr


def test_what_training_has_changed_is_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Moving(Model):
        def on_training_step_start(self, state: helios.TrainingState) -> None:
            self.value["a"].append(2)

    build = scheduled(lr_scheduler.OneCycleLR, 0.5, total_steps=9)
    model = Moving(build, value={"a": [1]})
    for total in (2, 4, 4):
        fit(tmp_path, total, model)
    fit(tmp_path, 4, Moving(build, value={"a": [1]}))
    assert said(capsys) == []


def test_a_finished_run_refuses_other_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Folder("/scratch/1/data", 1)
    fit(tmp_path, 1, Rated(0.1), data)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    for options in ({}, {"allow_changes": ("optimizer",)}):
        with pytest.raises(RunMismatchError) as raised:
            fit(tmp_path, 1, Rated(0.2), data, **options)
        for word in ("optimizer.lr, model.lr: 0.1 -> 0.2", "save_name", "resume='never'"):
            assert word in str(raised.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
    capsys.readouterr()
    # A folder that was moved, and other workers, are no difference.
    fit(tmp_path, 1, Rated(0.1), Folder("/scratch/2/data", 0))
    assert said(capsys) == []


SCRIPT = """
import functools
import torch
import helios

def scaled(factor):
    def decorate(function):
        @functools.wraps(function)
        def scale(*given):
            return function(*given) * factor
        return scale
    return decorate

class Data(helios.DataModule):
    def setup(self):
        params = helios.DataLoaderParams(batch_size=2, shuffle=True)
        self._train_dataset = self._create_dataset(list(range(8)), params)

class Net(helios.Model):
    def setup(self, fast_init=False):
        self.net = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    @scaled(0.5)
    def train_step(self, batch, state):
        weight = 1 if state.global_iteration in {1, 2} else 2
        return weight * self.net(batch.unsqueeze(1).float()).square().mean()

    def test_step(self, batch, step):
        return {"error": (1.0, 1)}

def main(total, root, **options):
    trainer = helios.Trainer(
        train_unit="iteration", total_steps=total, chkpt_frequency=1, chkpt_root=root,
        use_cpu=True, print_banner=False, ledger="off", **options)
    trainer.fit(Net("net"), Data())
"""
STEP = "Net.train_step() has other code"
_NEW = "    def on_fit_end(self): pass\n\n    def test_step"
EDITS: list[tuple[str, str, list[str]]] = [
    ("weight = 1 if", "weight = 1.0 if", [STEP]),
    ("{1, 2}", "{1, 3}", [STEP]),
    ("{1, 2}", "{2, 1}", []),
    ("@scaled(0.5)", "@scaled(0.25)", [STEP]),
    ("    def test_step", _NEW, ["Net.on_fit_end() has other code"]),
    ('{"error": (1.0, 1)}', '{"error": (2.0, 1)}', []),
    ("state):", 'state):\n        """A step."""', []),
    ("def scaled", "# A comment.\n\n\ndef scaled", []),
    ("batch_size=2, shuffle=True", "\n            batch_size=2,\n            shuffle=True,\n", []),
]


def run_cell(text: str, number: int) -> dict[str, Any]:
    """Run code as a notebook does: its text is in no file."""
    path = f"<ipython-input-{number}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, path, "exec"), scope)
    return scope


@pytest.mark.parametrize(("old", "new", "lines"), EDITS)
def test_an_edited_method_is_named(
    old: str, new: str, lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in SCRIPT
    run_cell(SCRIPT, 1)["main"](2, tmp_path)
    assert said(capsys) == []
    edited = run_cell(SCRIPT.replace(old, new), 2)["main"]
    for total in (3, 3):
        # The second start finds that nothing has changed since the first one.
        edited(total, tmp_path)
        assert said(capsys) == lines
        lines = []
