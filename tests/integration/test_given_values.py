"""What constructors were given is compared at a resume, and every difference is said."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import inspect
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import helios
from helios.core.declared_values import arguments_of, describe_given
from helios.core.stored_values import stored_params
from tests.integration.test_declared_params import Data, newest_options


class Mode(enum.Enum):
    A = 1
    B = 2


class Model(helios.Model):
    """A model whose setup is a function of its own."""

    def __init__(self, build: Callable[[Any], None], dropout: Any = 0.1, **others: Any) -> None:
        super().__init__("line")
        self.build = build

    unsaved = ("build",)

    def setup(self, fast_init: bool = False) -> None:
        self.net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        self.build(self)

    def train_step(self, batch: torch.Tensor, state: helios.TrainingState) -> torch.Tensor:
        return self.net(batch.unsqueeze(1).float()).square().mean()


def fit(root: Path, total: int, model: helios.Model, data: Any = None, **options: Any) -> None:
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=total,
        chkpt_frequency=1,
        chkpt_root=root,
        use_cpu=True,
        print_banner=False,
        **options,
    )
    assert trainer.fit(model, data or Data())


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of the log that speak of changed values."""
    words = ("Changed since", "the run keeps", "trained with other values")
    lines = capsys.readouterr().err.splitlines()
    return [
        line.partition(" - ")[2]
        for line in lines
        if any(word in line for word in words) and "checkpoint: total_steps" not in line
    ]


def sgd(**given: Any) -> Callable[[Any], None]:
    def build(model: Any) -> None:
        model.optimizer = torch.optim.SGD(model.net.parameters(), **{"lr": 0.1} | given)

    return build


def adam(**given: Any) -> Callable[[Any], None]:
    def build(model: Any) -> None:
        model.optimizer = torch.optim.AdamW(model.net.parameters(), **given)

    return build


def groups(**second: Any) -> Callable[[Any], None]:
    def build(model: Any) -> None:
        first, other = (part.parameters() for part in model.net)
        table = [{"params": first}, {"params": other, **second}]
        model.optimizer = torch.optim.SGD(iter(table), lr=0.1)

    return build


def scheduled(kind: Any, *args: Any, **given: Any) -> Callable[[Any], None]:
    def build(model: Any) -> None:
        model.optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1, momentum=0.9)
        model.scheduler = kind(model.optimizer, *args, **given)

    return build


def nested(total: int, gamma: float, milestone: int) -> Callable[[Any], None]:
    def build(model: Any) -> None:
        model.optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
        model.warmup = lr_scheduler.LinearLR(model.optimizer, total_iters=total)
        after = lr_scheduler.ExponentialLR(model.optimizer, gamma=gamma)
        model.scheduler = lr_scheduler.SequentialLR(
            model.optimizer, [model.warmup, after], milestones=[milestone]
        )

    return build


def chained(factor: float) -> Callable[[Any], None]:
    def build(model: Any) -> None:
        model.optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
        parts = [
            lr_scheduler.ConstantLR(model.optimizer, factor=factor),
            lr_scheduler.ExponentialLR(model.optimizer, 0.9),
        ]
        model.scheduler = lr_scheduler.ChainedScheduler(parts)

    return build


def decay(step: int, rate: float) -> float:
    return rate**step


def other_decay(step: int) -> float:
    return 0.5**step


def constant(step: int) -> float:
    return 1.0


CASES: list[tuple[Any, Any, str, str, str]] = [
    (sgd(), sgd(lr=0.2), "optimizer.lr", "0.2", "0.1"),
    (sgd(), sgd(momentum=0.9), "optimizer.momentum", "0.9", "0"),
    (sgd(), sgd(weight_decay=0.5), "optimizer.weight_decay", "0.5", "0"),
    (sgd(momentum=0.9), sgd(momentum=0.9, nesterov=True), "optimizer.nesterov", "True", "False"),
    (sgd(), sgd(maximize=True), "optimizer.maximize", "True", "False"),
    (sgd(), sgd(lr=torch.tensor(0.5)), "optimizer.lr", "0.5", "0.1"),
    (adam(), adam(betas=(0.8, 0.999)), "optimizer.betas", "[0.8, 0.999]", "[0.9, 0.999]"),
    (adam(), adam(eps=1e-6), "optimizer.eps", "1e-06", "1e-08"),
    (adam(), adam(amsgrad=True), "optimizer.amsgrad", "True", "False"),
    (groups(lr=1.0), groups(lr=2.0), "optimizer.param_groups.1.lr", "2.0", "1.0"),
    (groups(lr=1.0), groups(), "optimizer.param_groups.1.lr", "0.1", "1.0"),
    (groups(), groups(momentum=0.9), "optimizer.param_groups.1.momentum", "0.9", "0"),
    (
        scheduled(lr_scheduler.StepLR, 2),
        scheduled(lr_scheduler.StepLR, 3),
        "scheduler.step_size",
        "3",
        "2",
    ),
    (
        scheduled(lr_scheduler.MultiStepLR, [2, 4]),
        scheduled(lr_scheduler.MultiStepLR, [3, 4]),
        "scheduler.milestones",
        "[3, 4]",
        "[2, 4]",
    ),
    (
        scheduled(lr_scheduler.ExponentialLR, 0.9),
        scheduled(lr_scheduler.ExponentialLR, gamma=0.8),
        "scheduler.gamma",
        "0.8",
        "0.9",
    ),
    (
        scheduled(lr_scheduler.CosineAnnealingLR, 5),
        scheduled(lr_scheduler.CosineAnnealingLR, 5, 0.01),
        "scheduler.eta_min",
        "0.01",
        "0.0",
    ),
    (
        scheduled(lr_scheduler.OneCycleLR, 0.5, total_steps=9),
        scheduled(lr_scheduler.OneCycleLR, 0.7, total_steps=9),
        "scheduler.max_lr",
        "0.7",
        "0.5",
    ),
    (
        scheduled(lr_scheduler.OneCycleLR, 0.5, total_steps=9),
        scheduled(lr_scheduler.OneCycleLR, 0.5, total_steps=12),
        "scheduler.total_steps",
        "12",
        "9",
    ),
    (
        scheduled(lr_scheduler.CyclicLR, 0.1, 0.5),
        scheduled(lr_scheduler.CyclicLR, 0.1, 0.6),
        "scheduler.max_lr",
        "0.6",
        "0.5",
    ),
    (
        scheduled(lr_scheduler.CosineAnnealingWarmRestarts, 3),
        scheduled(lr_scheduler.CosineAnnealingWarmRestarts, 4),
        "scheduler.T_0",
        "4",
        "3",
    ),
    (
        scheduled(lr_scheduler.PolynomialLR, power=1.0),
        scheduled(lr_scheduler.PolynomialLR, power=2.0),
        "scheduler.power",
        "2.0",
        "1.0",
    ),
    (
        scheduled(lr_scheduler.LambdaLR, functools.partial(decay, rate=0.9)),
        scheduled(lr_scheduler.LambdaLR, functools.partial(decay, rate=0.8)),
        "scheduler.lr_lambda.rate",
        "0.8",
        "0.9",
    ),
    (nested(3, 0.9, 2), nested(4, 0.9, 2), "scheduler.schedulers.0.total_iters", "4", "3"),
    (nested(3, 0.9, 2), nested(3, 0.8, 2), "scheduler.schedulers.1.gamma", "0.8", "0.9"),
    (nested(3, 0.9, 2), nested(3, 0.9, 3), "scheduler.milestones", "[3]", "[2]"),
    (chained(0.5), chained(0.25), "scheduler.schedulers.0.factor", "0.25", "0.5"),
]


ARGUMENTS: list[tuple[Any, Any, str]] = [
    (0.1, 0.2, "0.1 -> 0.2"),
    (False, True, "False -> True"),
    ("a", "b", "a -> b"),
    (None, 1, "None -> 1"),
    (Mode.A, Mode.B, "Mode.A -> Mode.B"),
    ([1, (2, 3)], [1, (2, 4)], "[1, [2, 3]] -> [1, [2, 4]]"),
    ({1, 2}, {2, 3}, "[1, 2] -> [2, 3]"),
    (nn.ReLU, nn.GELU, "torch.nn.modules.activation.ReLU -> torch.nn.modules.activation.GELU"),
    (Path("a"), Path("b"), "a -> b"),
    (torch.float32, torch.bfloat16, "torch.float32 -> torch.bfloat16"),
    ("a\nb", "", "'a\\nb' -> ''"),
]


class Part:
    """What a case sets up."""

    net: nn.Module


class Many(helios.Model):
    """A model with an optimizer for each case, and an argument for each other case."""

    def __init__(self, builds: Any, **arguments: Any) -> None:
        super().__init__("line")
        self.builds = builds

    unsaved = ("builds",)

    def setup(self, fast_init: bool = False) -> None:
        self.nets = nn.ModuleList()
        self.parts: dict[str, dict[str, Any]] = {}
        for number, build in enumerate(self.builds):
            part = Part()
            part.net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
            self.nets.append(part.net)
            build(part)
            made = {name: value for name, value in vars(part).items() if name != "net"}
            self.parts[f"case{number}"] = made

    def train_step(self, batch: torch.Tensor, state: helios.TrainingState) -> None:
        outputs = [net(batch.unsqueeze(1).float()) for net in self.nets]
        torch.stack(outputs).square().mean().backward()
        for made in self.parts.values():
            made["optimizer"].step()
            made["optimizer"].zero_grad()


@pytest.fixture(scope="module")
def two_starts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the second start says of all cases."""
    folder, lines = tmp_path_factory.mktemp("many"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("helios")
    level = logger.level
    for side in (0, 1):
        arguments = {f"case{number}": each[side] for number, each in enumerate(ARGUMENTS)}
        model = Many([each[side] for each in CASES], **arguments)
        if side == 1:
            logger.setLevel(logging.INFO)
            logger.addHandler(handler)
        try:
            fit(folder, side + 1, model, ledger="off")
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
    return lines


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_setting_that_is_not_taken_is_said_with_both_values(
    number: int, two_starts: list[str]
) -> None:
    (line,) = [line for line in two_starts if "the run keeps" in line]
    *shown, remedy = line.split("; ")
    assert remedy == 'allow_changes=("optimizer",) takes the new values'
    _, _, name, new, old = CASES[number]
    own = [text for text in shown if text.startswith(f"parts.case{number}.")]
    assert own == [f"parts.case{number}.{name}: setup() has {new}, the run keeps {old}"]
    assert len(shown) == len(CASES)


def _not_taken(name: str, new: str, old: str) -> str:
    return (
        f"WARNING - {name}: setup() has {new}, the run keeps {old}; "
        'allow_changes=("optimizer",) takes the new value'
    )


def test_a_setting_that_is_not_taken_is_said_at_each_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for total in (1, 2):
        fit(tmp_path, total, Model(sgd()))
    assert said(capsys) == []
    for total in (3, 4):
        fit(tmp_path, total, Model(sgd(lr=0.2)))
        assert said(capsys) == [_not_taken("optimizer.lr", "0.2", "0.1")]
    fit(tmp_path, 5, Model(sgd()))
    assert said(capsys) == []


def test_a_finished_run_says_what_is_new_in_its_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, 1, Model(sgd(), 0.1))
    fit(tmp_path, 1, Model(sgd(lr=0.2), 0.5), allow_changes=("optimizer",))
    (line,) = said(capsys)
    assert "Nothing to do" in line
    values = "optimizer.lr 0.1 -> 0.2, model.dropout 0.1 -> 0.5"
    assert f"It was trained with other values: {values}." in line


def test_several_settings_are_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, 1, Model(sgd()))
    fit(tmp_path, 2, Model(sgd(lr=0.2, momentum=0.5)))
    assert said(capsys) == [
        "WARNING - optimizer.lr: setup() has 0.2, the run keeps 0.1; optimizer.momentum: setup() "
        'has 0.5, the run keeps 0; allow_changes=("optimizer",) takes the new values'
    ]


def test_another_function_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, 1, Model(scheduled(lr_scheduler.LambdaLR, other_decay)))
    fit(tmp_path, 2, Model(scheduled(lr_scheduler.LambdaLR, constant)))
    (line,) = said(capsys)
    assert "scheduler.lr_lambda: setup() has tests." in line
    assert ".constant, the run keeps tests." in line


@pytest.mark.parametrize("number", range(len(ARGUMENTS)))
def test_arguments_of_the_model_are_taken_and_said(number: int, two_starts: list[str]) -> None:
    (line,) = [line for line in two_starts if line.startswith("Changed since the run began: ")]
    text = f"model.case{number} {ARGUMENTS[number][2]}"
    assert f" {text}," in line or line.endswith(f" {text}.")


class Folder(Data):
    def __init__(self, root: str, *names: str, size: int = 2) -> None:
        self.root = root


@dataclasses.dataclass
class Table(Data):
    columns: list[str]


class Bare(Data):
    """A data module without a constructor."""


class Mixin:
    def __init__(self, width: int) -> None:
        self.width = width


class Mixed(Data, Mixin):
    """A data module whose constructor is that of another class."""


def test_all_arguments_together_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, 1, Model(sgd(), 0.1, depth={"a": 1, "b": {"c": 2}}), Folder("a", "x"))
    fit(tmp_path, 2, Model(sgd(), 0.2, depth={"a": 1, "b": {"c": 3}}), Folder("b", "y", size=3))
    assert said(capsys) == [
        "INFO - Changed since the run began: model.dropout 0.1 -> 0.2, model.depth.b.c 2 -> 3, "
        "data.root a -> b, data.names ['x'] -> ['y'], data.size 2 -> 3."
    ]
    fit(tmp_path, 3, Model(sgd(), 0.2, depth={"a": 1, "b": {"c": 3}}), Folder("b", "y", size=3))
    assert said(capsys) == []


def test_another_name_of_the_run_is_no_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Named(Model):
        def __init__(self, name: str) -> None:
            super().__init__(sgd())
            self._save_name = name

    fit(tmp_path / "a", 1, Named("one"))
    fit(tmp_path / "b", 2, Named("two"), resume=tmp_path / "a/one/one_epoch_1_iter_1.pth")
    assert said(capsys) == []


def test_what_is_not_plain_counts_by_its_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, 1, Model(sgd(), nn.Linear(1, 2), many=[object()]))
    fit(tmp_path, 2, Model(sgd(), nn.Linear(1, 3), many=[object()]))
    assert said(capsys) == []
    fit(tmp_path, 3, Model(sgd(), nn.Identity(), many=[object()]))
    (line,) = said(capsys)
    assert "torch.nn.modules.linear.Linear -> torch.nn.modules.linear.Identity" in line


def test_a_setting_that_training_moves_is_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for total in (2, 4, 6):
        fit(tmp_path, total, Model(scheduled(lr_scheduler.OneCycleLR, 0.5, total_steps=9)))
    assert said(capsys) == []


def test_signatures_are_unchanged() -> None:
    assert (
        str(inspect.signature(Folder)) == "(root: 'str', *names: 'str', size: 'int' = 2) -> 'None'"
    )
    assert str(inspect.signature(Table)) == "(columns: 'list[str]') -> None"
    assert str(inspect.signature(Bare)) == "()"
    assert str(inspect.signature(Mixed)) == "(width: 'int') -> 'None'"
    assert str(inspect.signature(helios.Model)).startswith("(save_name: 'str')")
    assert list(inspect.signature(Model).parameters) == ["build", "dropout", "others"]


def test_constructors_are_called_as_before() -> None:
    assert Table(["a"]).columns == ["a"]
    assert arguments_of(Table(["a"])) == {"columns": ["a"]}
    assert Mixed(3).width == 3
    assert arguments_of(Mixed(3)) == {"width": 3}
    assert arguments_of(Bare()) == {}
    with pytest.raises(TypeError):
        Folder()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Bare(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="abstract"):
        helios.DataModule()  # type: ignore[abstract]


class Lazy(list[int]):
    """A list that is read from a disk that fails."""

    def __iter__(self) -> Any:
        raise OSError("of the test")


class Silent(Data):
    """Keeps its arguments to itself when it is made."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls)

    def __init__(self, rate: float = 0.1) -> None:
        self.rate = rate


class Handed(Data):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, rate: float = 0.1) -> None:
        self.rate = rate


@dataclasses.dataclass(slots=True)
class Slotted(Data):
    rate: float = 0.1


def test_classes_with_a_new_of_their_own_and_slots_are_made_as_before() -> None:
    assert Silent(0.5).rate == Handed(0.5).rate == Slotted(0.5).rate == 0.5
    assert arguments_of(Silent(0.5)) == {}
    assert arguments_of(Handed(0.5))["rate"] == 0.5
    assert arguments_of(Slotted(0.5)) == {"rate": 0.5}


def test_copies_and_pickles_have_the_arguments_of_the_original() -> None:
    for copied in (copy.copy(Table(["a"])), copy.deepcopy(Table(["a"]))):
        assert arguments_of(copied) == {"columns": ["a"]}
    assert arguments_of(pickle.loads(pickle.dumps(Table(["a"])))) == {"columns": ["a"]}


def test_no_argument_stops_a_constructor() -> None:
    endless: list[Any] = []
    endless.append(endless)
    given = {"lazy": Lazy([1]), "huge": 10**5000, "endless": endless, "rate": 0.1}
    found = describe_given(given)
    assert found["lazy"].endswith(".Lazy")
    assert found["huge"] == "builtins.int"
    assert found["rate"] == 0.1


def test_a_long_table_is_stored_as_its_length_and_a_hash() -> None:
    words = {f"word {number}": number for number in range(1000)}
    (one,) = describe_given({"vocabulary": words}).values()
    (same,) = describe_given({"vocabulary": dict(reversed(words.items()))}).values()
    (other,) = describe_given({"vocabulary": words | {"word 3": 4}}).values()
    assert one.startswith("dict of 1000 (")
    assert one == same != other


def test_keys_have_no_addresses() -> None:
    key = nn.Linear(1, 1)
    assert describe_given({"a": {constant: 1, key: 2, Mode.A: 3, 4: 5}}) == {
        f"a.{__name__}.constant": 1,
        "a.torch.nn.modules.linear.Linear": 2,
        "a.Mode.A": 3,
        "a.4": 5,
    }


def test_constructors_of_optimizers_are_put_back(tmp_path: Path) -> None:
    before = {kind: kind.__init__ for kind in (torch.optim.SGD, lr_scheduler.StepLR)}
    seen: list[str] = []

    def build(model: Any) -> None:
        seen.append(str(inspect.signature(torch.optim.SGD)))
        raise RuntimeError("in setup")

    with pytest.raises(RuntimeError, match="in setup"):
        fit(tmp_path, 1, Model(build))
    assert {kind: kind.__init__ for kind in before} == before
    assert seen == [str(inspect.signature(torch.optim.SGD))]


def test_secrets_of_constructors_are_stored_nowhere(tmp_path: Path) -> None:
    secret = "hunter2-hunter2"
    fit(tmp_path, 1, Model(sgd(), f"https://me:{secret}@host", api_key=secret))
    assert stored_params(newest_options(tmp_path)) == {}
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
