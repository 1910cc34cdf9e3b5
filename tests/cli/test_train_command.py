"""``helios.run`` and ``helios train``: command lines that train and evaluate."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import helios
from helios.cli import main
from helios.errors import ArgumentError, ArgumentTypeError, RunMismatchError
from helios.plugins import EMA, NaNGuard
from helios.start.options import ROWS
from tests import codebase
from tests.leaks import forget_interruptions
from tests.support.command_line import Data, Net, train
from tests.support.scripts import call

_OPTIONS = ("--trainer.use_cpu", "true", "--trainer.print_banner", "false")


def fit(root: Path, *words: str, **defaults: Any) -> Any:
    """Train for an epoch, if nothing else is said."""
    given = {"chkpt_root": root, "max_epochs": 1} | defaults
    return helios.run(Net, Data, ["fit", *_OPTIONS, *words], **given)


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


# Of each kind one: the words after the name, the value, and what the argument needs beside it.
_PASSED: dict[str, tuple[list[str], Any, dict[str, Any]]] = {
    "run_name": (["a-name"], "a-name", {}),
    "valid_frequency": (["null"], None, {}),
    "chkpt_frequency": (["10min"], "10min", {"chkpt_root": "runs"}),
    "gpus": (["null"], None, {}),
    "engine": (
        ["helios.Engine", "--trainer.engine.device=cpu", "--trainer.engine.precision=bf16"],
        helios.Engine("cpu", precision="bf16"),
        {},
    ),
    "precision": (["bf16"], helios.Precision.BF16, {}),
    "plugins": (
        [
            *('[{"class_path": "helios.plugins.NaNGuard"}]', "--trainer.plugins+=EMA"),
            "--trainer.plugins.decay=0.5",
        ],
        [NaNGuard(), EMA(0.5)],
        {},
    ),
    "store": (
        [
            *('{"keep_last": 2}', "--trainer.store.keep_best.count=1"),
            *("--trainer.store.keep_best.metric=loss", "--trainer.store.keep_best.mode=min"),
        ],
        helios.CheckpointStore(keep_last=2, keep_best=helios.KeepBest(1, "loss", mode="min")),
        {},
    ),
    "signals": (
        ['{"numbers": ["SIGTERM", 10]}', "--trainer.signals.grace=60"],
        helios.Signals((signal.SIGTERM, 10), grace=60.0),
        {},
    ),
    "nproc": (["2"], 2, {"num_replicas": 2}),
    "allow_changes": (["[params.model.lr, batch_size]"], ["params.model.lr", "batch_size"], {}),
    "batch_limits": (["{training: 3}"], {helios.Phase.TRAINING: 3}, {}),
    "params": (["{note: {a: 1}}"], {"note": {"a": 1}}, {}),
}


def comparable(trainer: helios.Trainer) -> dict[str, Any]:
    """Return the options of a trainer, with objects as what they are made of."""
    found = {name: getattr(trainer._options, name) for name in ROWS}
    for name in ("engine", "plugins"):
        made = found[name] if isinstance(found[name], tuple) else [found[name]]
        kept = [each for each in made if type(each).__name__ != "ConfigFile"]
        found[name] = [(type(each), describe(each)) for each in kept]
    return found


def describe(made: Any) -> Any:
    if isinstance(made, helios.Engine):
        return made.device, made.precision
    return getattr(made, "_decay", None)


@pytest.mark.parametrize("name", _PASSED)
def test_each_kind_of_argument_of_the_trainer_goes_to_a_file_and_back(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made: list[helios.Trainer] = []

    def note(self: helios.Trainer, model: helios.Model, data: helios.DataModule) -> bool:
        made.append(self)
        return True

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(helios.Trainer, "fit", note)
    first, value, needed = _PASSED[name]
    length = {"max_epochs": 5}
    words = [f"--trainer.{name}", *first]
    for other, each in {**needed, **length}.items():
        words += [f"--trainer.{other}", str(each)]
    assert helios.run(Net, Data, ["fit", *words])
    with pytest.raises(SystemExit, match="0"):
        helios.run(Net, Data, ["fit", *words, "--print_config"])
    Path("printed.yaml").write_text(capsys.readouterr().out)
    assert helios.run(Net, Data, ["fit", "--config", "printed.yaml"])
    params = {
        "model": {"width": 6, "lr": 0.01, "save_name": "net"},
        "data": {"batch_size": 4, "length": 32, "token": ""},
    }
    passed = {**needed, **length, name: value}
    passed["params"] = {**passed.get("params", {}), **params}
    expected = comparable(helios.Trainer(**passed))
    assert [comparable(each) for each in made] == [expected, expected]
    if name != "gpus":  # Only a machine with GPUs has others than its default.
        plain = helios.Trainer(**{**needed, **length, "params": params})
        assert expected[name] != comparable(plain)[name]


_MISTAKES = {
    "--model.lrr 3": "There is no option --model.lrr. Did you mean --model.lr?",
    "--lr=3 --epochs 3": "option --lr. Did you mean --model.lr?\nThere is no option --epochs. "
    "Did you mean --trainer.max_epochs?",
    "--model.lr fast": "Parser key \"model.lr\":\n  Expected a <class 'float'>. Got value: fast",
    "--trainer.precision bf17": 'must be "fp32", "bf16" or "fp16", got',
    "--trainer.plugins+=EarlyStopping --trainer.plugins.metric loss": "are required: mode",
    "--config typo.yaml": "There is no option --model.widht. Did you mean --model.width?",
}


@pytest.mark.parametrize("words", _MISTAKES)
def test_a_mistake_names_option_and_value_before_anything_is_created(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("typo.yaml").write_text("model: {widht: 3}\n")
    Data.made.clear()
    with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
        fit(tmp_path / "runs", *words.split())
    assert _MISTAKES[words] in str(caught.value)
    assert Data.made == []
    assert not Path("runs").exists()


@dataclasses.dataclass(frozen=True)
class Optimizer:
    rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


class Shape(enum.Enum):
    WIDE = 1
    DEEP = 2


class Nested(Net):
    def __init__(
        self,
        optimizer: Optimizer = Optimizer(),
        act: nn.Module | None = None,
        shape: Shape = Shape.WIDE,
        free=None,  # type: ignore[no-untyped-def]
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self.made = (optimizer, act, shape, free)


def test_arguments_may_be_objects_and_come_back_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    setup = Net.setup

    def note(self: Any) -> None:
        setup(self)
        made.append((*self.made[::2], self.made[1].negative_slope, self.made[3], self.width))

    monkeypatch.setattr(Nested, "setup", note, raising=False)
    words = [
        "--model.optimizer.rate",
        "0.3",
        "--model.act",
        "torch.nn.LeakyReLU",
        "--model.shape",
        "DEEP",
    ]
    words += ["--model.act.negative_slope", "0.2", "--model.free", "1e-3", "--model.width", "4"]
    given = {"chkpt_root": tmp_path, "max_epochs": 1}
    assert helios.run(Nested, Data, ["fit", *_OPTIONS, *words], **given)
    again = ["--config", str(tmp_path / "net" / "config.yaml"), "--trainer.max_epochs", "2"]
    assert helios.run(Nested, Data, ["fit", *_OPTIONS, *again], **given)
    assert made == [(Optimizer(0.3), Shape.DEEP, 0.2, 1e-3, 4)] * 2


def test_the_command_and_the_length_are_asked_for() -> None:
    with pytest.raises(ArgumentError, match=r"fit, validate, test, predict, but got nothing"):
        helios.run(Net, Data, [])
    with pytest.raises(ArgumentError, match=r"got 'tets'. Try: helios.run test"):
        helios.run(Net, Data, ["tets"])
    with pytest.raises(ArgumentError, match=r"Pass e.g. --trainer.max_epochs 10"):
        helios.run(Net, Data, ["fit"])


def test_files_are_read_in_their_order_and_words_win(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("model: {width: 3, lr: 1e-3}\ndata: {batch_size: 16}\n")
    (tmp_path / "two.yaml").write_text("model: {width: 4}\n")
    files = [f"--config={tmp_path / name}.yaml" for name in ("one", "two")]
    assert fit(tmp_path, *files, "--data.batch_size", "8")
    found = read(tmp_path / "net" / "config.yaml")
    assert found["model"] == {"width": 4, "lr": 1e-3, "save_name": "net"}
    assert found["data"]["batch_size"] == 8


def test_the_four_commands_return_what_the_trainer_does(tmp_path: Path) -> None:
    assert fit(tmp_path) is True
    evaluated = {
        name: helios.run(Net, Data, [name, *_OPTIONS, *words], chkpt_root=tmp_path)
        for name, words in (
            ("validate", ()),
            ("test", ("--checkpoint", str(helios.find_last_checkpoint(tmp_path / "net")))),
            ("predict", ("--checkpoint", "newest")),
        )
    }
    assert evaluated["validate"] == evaluated["test"] != {}
    assert len(evaluated["predict"]) == 8
    trainer = helios.Trainer(chkpt_root=tmp_path, use_cpu=True, print_banner=False)
    predicted = trainer.predict(Net(), Data())
    assert all(map(torch.equal, predicted, evaluated["predict"]))
    untrained = ["test", *_OPTIONS, "--checkpoint", "null"]
    assert helios.run(Net, Data, untrained, chkpt_root=tmp_path) != evaluated["test"]


def test_other_values_are_refused_and_leave_the_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "net" / "config.yaml"
    fit(tmp_path)
    before = file.read_bytes()
    longer = ("--trainer.max_epochs", "2")
    with pytest.raises(RunMismatchError, match=r"params.model.lr: 0.01 -> 0.5"):
        fit(tmp_path, *longer, "--model.lr", "0.5")
    assert file.read_bytes() == before
    allowed = "--trainer.allow_changes+=params.model.lr"
    fit(tmp_path, *longer, "--model.lr", "0.5", allowed)
    assert read(file)["model"]["lr"] == 0.5
    assert read(file)["trainer"]["allow_changes"] == []
    assert (tmp_path / "net" / "config-1.yaml").read_bytes() == before
    assert fit(tmp_path, "--config", str(file), "--trainer.max_epochs", "3")
    fit(tmp_path, "--model.lr", "0.1", "--trainer.max_epochs", "4", allowed)
    assert read(tmp_path / "net" / "config-2.yaml")["model"]["lr"] == 0.5
    assert sorted(path.name for path in file.parent.glob("*.yaml")) == [
        *("config-1.yaml", "config-2.yaml", "config.yaml")
    ]


def test_secrets_are_not_written_and_must_be_passed_again(tmp_path: Path) -> None:
    file = tmp_path / "net" / "config.yaml"
    fit(tmp_path, "--data.token", "hunter2", "--trainer.params", '{"api_key": "hunter2"}')
    for path in (tmp_path / "net").iterdir():
        assert b"hunter2" not in path.read_bytes(), path
    again = ("--config", str(file), "--trainer.max_epochs", "2")
    with pytest.raises(ArgumentError, match=r"--data.token is a secret"):
        fit(tmp_path, *again)
    assert fit(tmp_path, *again, "--data.token", "other", "--trainer.params", "null")


@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
def test_an_interruption_ends_with_the_code_for_another_try(
    tmp_path: Path, on_interrupt: str
) -> None:
    class Stopped(Net):
        def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
            if state.global_iteration == 3:
                signal.raise_signal(signal.SIGTERM)
            return super().train_step(batch, state)

    words = ["fit", *_OPTIONS, f"--trainer.signals.on_interrupt={on_interrupt}"]
    with pytest.raises(SystemExit) as caught:
        helios.run(Stopped, Data, words, chkpt_root=tmp_path, max_epochs=1)
    assert caught.value.code == 75
    forget_interruptions()
    assert helios.run(Stopped, Data, words, chkpt_root=tmp_path, max_epochs=1) is True


def start(*command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(codebase.ROOT), **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


_SCRIPT = str(codebase.ROOT / "tests" / "support" / "command_line.py")
_forked = functools.partial(call, train)
_alone = functools.partial(start, sys.executable, _SCRIPT)
_by_torchrun = functools.partial(
    start, sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", _SCRIPT
)
_TRAINED = ("fit", "--trainer.max_epochs=2", "--trainer.num_replicas=2", "--data.batch_size=2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert _forked(*_TRAINED, folder=folder).returncode == 0
    return folder / "runs" / "net"


@pytest.mark.parametrize(
    ("command", "words", "code"),
    [
        pytest.param(_forked, (), -9, id="forked"),
        pytest.param(_alone, (), -9, id="alone", marks=pytest.mark.full),
        pytest.param(_alone, ("--trainer.nproc=2",), 1, id="nproc", marks=pytest.mark.full),
        pytest.param(_by_torchrun, (), 1, id="torchrun", marks=pytest.mark.full),
    ],
)
def test_a_killed_command_continues_with_equal_bits(
    undisturbed: Path, tmp_path: Path, command: Any, words: tuple[str, ...], code: int
) -> None:
    words = (*_TRAINED, *words)
    killed = command(*words, folder=tmp_path, KILL_AT="11")
    assert killed.returncode == code, killed.stderr
    assert (code == -9) or "SIGKILL" in killed.stderr or "-9" in killed.stderr
    run = tmp_path / "runs" / "net"
    assert len([*run.glob("*.pth")]) == 1
    again = command(*words, folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "Resumed from" in again.stderr
    assert main(["diff", str(undisturbed), str(run)]) == 0
    newest = [str(helios.find_last_checkpoint(each)) for each in (undisturbed, run)]
    assert main(["diff", *newest]) == 0
    written = [read(each / "config.yaml") for each in (undisturbed, run)]
    for each in written:
        del each["trainer"]["nproc"]
    assert written[0] == written[1]


def test_a_wrong_command_line_ends_with_2_and_a_refused_start_with_1(
    undisturbed: Path, tmp_path: Path
) -> None:
    wrong = _forked("fit", "--trainer.max_epochs", "-1", folder=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr == (
        "command_line.py: error: --trainer.max_epochs must be None or a positive int, got -1. Omit "
        "it for the default.\n"
    )
    assert [*tmp_path.iterdir()] == []
    shutil.copytree(undisturbed.parent, tmp_path / "runs")
    refused = _forked(*_TRAINED, "--model.lr=0.5", folder=tmp_path)
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
    assert "command_line.py: error: " in refused.stderr
    assert "pass --trainer.resume never" in refused.stderr
    words = ("--model.lr=0.5", "--trainer.allow_changes+=params.model.lr", "--trainer.max_epochs=3")
    allowed = _forked(*_TRAINED, *words, folder=tmp_path)
    assert "(--trainer.allow_changes+=optimizer takes the new one)" in allowed.stderr


@pytest.fixture
def kept_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    return tmp_path


_NAMES = ("tests.support.command_line:Net", "tests.support.command_line:Data")


def test_the_command_trains_classes_by_their_names(
    kept_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = ("--trainer.chkpt_root", "runs", *_OPTIONS)
    assert main(["train", *_NAMES, "fit", "--trainer.max_epochs", "1", *root]) == 0
    capsys.readouterr()
    config = ("--config", "runs/net/config.yaml")
    assert main(["train", "--json", *_NAMES, "validate", *config]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command"] == "validate"
    assert found["result"]["loss"] > 0


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("nowhere.at_all:Net", "a:B"), "no module 'nowhere' for nowhere.at_all:Net"),
        (("tests.support.command_line", "a:B"), "must be given as package.module:Class"),
        (("tests.support.command_line:Ned", "a:B"), "no class 'Ned'. Did you mean Net?"),
        ((_NAMES[0], "tests.support.command_line:Net"), "a class derived from DataModule"),
    ],
)
def test_a_class_that_is_not_found_is_named(
    kept_path: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, str], text: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", *names, "fit"])
    assert text in capsys.readouterr().err
