"""The level tells the truth: what is missing, whose word it rests on, what lowers it."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import helios
from helios.cli import main
from helios.errors import RunMismatchError, StateError
from helios.state import TrainingState
from tests.distributed.train_script import Module, parse
from tests.support.models import Fitting
from tests.support.ranks import run_ranks

REASON = (
    "its state does not restore the next batch: its state_dict() must hold everything that the "
    "next batch depends on"
)


LOST = f"data: Buffered ({REASON})"


class Ordered:
    """A loader with state: sixteen batches, each with noise of its own."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < 16:
            self.position += 1
            yield torch.tensor([self.position]), torch.full((1, 5), random.random())
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Buffered(Ordered):
    """Reads ahead, as a shuffle buffer does, and its state leaves the buffer out."""

    def __iter__(self) -> Iterator[Any]:
        waiting: list[Any] = []
        for batch in super().__iter__():
            waiting.append(batch)
            if len(waiting) > 2:
                yield waiting.pop(0)
        yield from waiting


class Data(Module):
    def __init__(self, kind: type[Ordered]) -> None:
        super().__init__(parse([]))
        self.kind = kind

    def train_dataloader(self) -> Any:
        return self.kind()


class Simple(Fitting):
    """One weight, and a log of what it was trained on."""

    unsaved = ("log",)
    part = 1

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        loss: torch.Tensor = super().train_step(batch, state)
        self.log.append((batch[0].tolist(), loss.item(), torch.rand(1).item()))
        return loss


def fit(
    folder: Path,
    kind: type[Ordered] = Ordered,
    *,
    model: helios.Model | None = None,
    **options: Any,
) -> helios.Model:
    model = model or Simple()
    settings = {
        "train_unit": "iteration",
        "total_steps": 4,
        "chkpt_frequency": 2,
        "chkpt_root": folder,
        "use_cpu": True,
        **options,
    }
    assert helios.Trainer(**settings).fit(model, Data(kind))
    return model


def sidecars(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "net").glob("*_iter_*.json"))
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.shows("S46")
def test_a_state_that_is_not_kept_makes_the_level_incomplete_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, Buffered)
    shown = capsys.readouterr().err
    assert f"reproducibility: incomplete (lacks {LOST})" in shown
    assert "WARNING - The state of Buffered does not restore the next batch" in shown
    first, second = sidecars(tmp_path)
    for sidecar in (first, second):
        assert (sidecar["level"], sidecar["claims"]) == ("incomplete", [])
        assert sidecar["missing"] == {"data: Buffered": REASON}
    path = next((tmp_path / "net").glob("*_iter_4.pth"))
    assert main(["ls", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count(f"{path.name} lacks {LOST}.") == 1
    assert main(["inspect", str(path)]) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "level incomplete" in shown
    assert REASON in shown


@pytest.mark.shows("S46")
def test_a_trial_changes_no_bit_of_the_run(tmp_path: Path) -> None:
    tried = fit(tmp_path)
    untried = fit(tmp_path / "other", chkpt_frequency=None)
    assert tried.log == untried.log
    assert torch.equal(tried.net.weight, untried.net.weight)


@pytest.mark.shows("S45")
def test_an_incomplete_checkpoint_can_be_refused_before_anything_is_written(tmp_path: Path) -> None:
    rule = r"on_incomplete=\"raise\".*one of iteration 2 lacks data: Buffered .*unsaved = "
    with pytest.raises(StateError, match=rule):
        fit(tmp_path, Buffered, on_incomplete="raise")
    assert list((tmp_path / "net").glob("*.pth*")) == []


class Losing(Simple):
    """Keeps something that nobody can save."""

    is_losing = True

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        if self.is_losing:
            self.lost = threading.Lock()


@pytest.mark.shows("S44", "S72")
def test_what_a_model_loses_is_in_the_sidecar_and_warned_of_at_the_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, model=Losing())
    for each in sidecars(tmp_path):
        assert (each["level"], list(each["missing"])) == ("incomplete", ["lost"])
    assert "reproducibility:" not in capsys.readouterr().err
    fit(tmp_path, model=Losing(), total_steps=6)
    shown = capsys.readouterr().err
    assert shown.count("The checkpoint of iteration 4 is incomplete: it lacks lost (") == 1
    assert "Training changed lost" not in shown, "it was named at the load"
    assert "reproducibility: incomplete (lacks lost (" in shown
    assert "resumed without: lost" in sidecars(tmp_path)[-1]["changes"]


def _lose(rank: int, folder: Path) -> str:
    model = Losing()
    model.is_losing = rank == 1
    try:
        fit(folder, model=model, on_incomplete="raise", num_replicas=2)
    except StateError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.shows("S45")
def test_what_the_model_of_one_rank_loses_is_refused_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(_lose, 2, tmp_path)
    assert first == second
    assert "iteration 2 lacks lost (" in first
    assert list((tmp_path / "net").glob("*.pth*")) == []


IMPORTS_INDUCTOR = pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")


class Compiled(Simple):
    backend: Any = "inductor"
    is_in_place = False

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        if self.is_in_place:
            self.net.compile(backend=self.backend)
        else:
            self.fast = torch.compile(self.net, backend=self.backend)

    def train_step(self, batch: Any, state: TrainingState) -> torch.Tensor:
        # Not by the compiled network: to compile takes longer than the rest of the test.
        return nn.functional.linear(batch[1], self.net.weight).square().mean()


@pytest.mark.shows("S47")
@IMPORTS_INDUCTOR
@pytest.mark.parametrize(
    ("backend", "level", "is_in_place"), [("inductor", "order", True), ("eager", "restart", False)]
)
def test_inductor_lowers_the_level_and_is_named_where_exact_bits_were_asked_for(
    backend: str,
    level: str,
    is_in_place: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Compiled()
    model.backend, model.is_in_place = backend, is_in_place
    fit(tmp_path, model=model, enable_deterministic=True)
    shown = capsys.readouterr().err
    assert (f"reproducibility: {level} (" in shown) is (level == "order")
    assert "WARNING" not in shown
    assert {each["level"] for each in sidecars(tmp_path)} == {level}


@pytest.mark.shows("P25")
@IMPORTS_INDUCTOR
def test_a_start_that_must_be_complete_refuses_a_lower_level(tmp_path: Path) -> None:
    def train(backend: str, total_steps: int, **options: Any) -> None:
        model = Compiled()
        model.backend = backend
        fit(tmp_path, model=model, total_steps=total_steps, **options)

    train("eager", 4)
    before = {path.name: path.read_bytes() for path in (tmp_path / "net").iterdir()}
    with pytest.raises(RunMismatchError, match=r"'restart'.* order"):
        train("inductor", 6, on_incomplete="raise")
    assert {path.name: path.read_bytes() for path in (tmp_path / "net").iterdir()} == before
    train("eager", 6, on_incomplete="raise")
    train("inductor", 8)
    # The run has had the lower level since then.
    train("inductor", 10, on_incomplete="raise")


@pytest.mark.shows("S46")
def test_a_state_that_is_kept_rests_on_a_word_that_was_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    word = "claimed by Ordered, tried at the first start"
    fit(tmp_path)
    assert [(each["level"], each["claims"]) for each in sidecars(tmp_path)] == [
        ("restart", [word])
    ] * 2
    fit(tmp_path, total_steps=6)
    assert sidecars(tmp_path)[-1]["claims"] == [word]
    capsys.readouterr()
    assert main(["ls", "--json", str(tmp_path)]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["folders"]
    assert {tuple(each["sidecar"]["claims"]) for each in listed["files"]} == {(word,)}
