"""Comparisons of runs cover the scores of validations, and name what they do not cover."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import helios
from helios.best import BestValidation
from helios.checkpoint.sidecar import Sidecar
from helios.cli.commands import main
from helios.ledger import Replay, diff, verify
from helios.ledger.book import RunScores, read_scores
from helios.ledger.compare import SCORES, LineComparison
from helios.ledger.line import TAIL_BYTES, seal
from tests.ledger import test_buffers

TOTAL, EVERY = 12, 4
TICKS = itertools.count()


class Data(helios.DataModule):
    """A line; ``shift`` moves the targets of the validation only."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.shift = shift

    def setup(self) -> None:
        x = torch.linspace(-1, 1, 24).unsqueeze(1)
        params = helios.DataLoaderParams(batch_size=4, shuffle=True)
        self._train_dataset = self._create_dataset(TensorDataset(x, 2 * x), params)
        params = helios.DataLoaderParams(batch_size=8)
        self._valid_dataset = self._create_dataset(TensorDataset(x, 2 * x + self.shift), params)


class Net(helios.Model):
    """Its buffer counts in validations only.

    Args:
        factor: the buffer at the beginning.
        measures: whether a score differs in each validation.
        rate: the learning rate.
    """

    def __init__(self, *, factor: float = 1.0, measures: bool = False, rate: float = 0.1) -> None:
        super().__init__("net")
        self.factor, self.measures, self.rate = factor, measures, rate

    def setup(self, *, fast_init: bool = False) -> None:
        self.net = nn.Linear(1, 1)
        self.net.register_buffer("factor", torch.tensor(self.factor))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=self.rate)

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        x, y = batch
        return {"error": ((self.net(x) * self.net.factor - y).square().sum(), len(x))}

    def on_validation_end(self, validation_cycle: int) -> None:
        super().on_validation_end(validation_cycle)
        if self.measures:
            self._val_scores["seconds"] = float(next(TICKS))


class Exempt(Net):
    unscored = ("seconds",)


def make_trainer(folder: Path, **options: Any) -> helios.Trainer:
    frequencies = {"valid_frequency": EVERY, "chkpt_frequency": 3}
    return test_buffers.make_trainer(folder, **frequencies | {"total_steps": TOTAL} | options)


def train(
    folder: Path, model: helios.Model | None = None, data: Data | None = None, **options: Any
) -> Path:
    make_trainer(folder, **options).fit(model or Net(), data or Data())
    return folder / "net"


def replay(folder: Path, model: helios.Model, data: Data | None = None, **options: Any) -> Replay:
    return make_trainer(folder.parent).replay(model, data or Data(), **options)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("known"))


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with other targets in its validations."""
    return train(tmp_path_factory.mktemp("shifted"), data=Data(0.5))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with a score that differs between equal runs, and is not exempt."""
    return train(tmp_path_factory.mktemp("measured"), Net(measures=True))


@pytest.mark.shows("P131")
def test_other_validation_data_is_a_difference(tmp_path: Path) -> None:
    models, shifts = (Net(), Net()), (0.0, 0.5)
    runs = [
        train(tmp_path / str(shift), model, Data(shift), total_steps=EVERY)
        for model, shift in zip(models, shifts, strict=True)
    ]
    found = diff(*runs)
    assert not found.is_equal
    assert (found.iteration, found.what, found.num_equal) == (EVERY, [SCORES], EVERY - 1)
    assert found.may_begin_earlier
    places = [2 * number / 23 - 1 for number in range(24)]
    for table, model, shift in zip(found.details["scores"], models, shifts, strict=True):
        weight, bias = model.net.weight.item(), model.net.bias.item()
        errors = [(weight * x + bias - 2 * x - shift) ** 2 for x in places]
        assert table == {"error": pytest.approx(math.fsum(errors) / 24, rel=1e-5)}


@pytest.mark.shows("P131")
def test_scores_are_compared_where_both_have_validated(known: Path, tmp_path: Path) -> None:
    rare = train(tmp_path / "rare", valid_frequency=6)
    found = diff(known, rare)
    assert (found.is_equal, found.num_scored) == (True, 1)
    expected = "scores after 3 iterations were not compared: only one of the runs has"
    assert any(text.startswith(expected) for text in found.not_compared)
    never = train(tmp_path / "never", valid_frequency=None)
    found = diff(known, never)
    assert (found.is_equal, found.num_scored) == (True, 0)
    assert any("after 3 iterations were not compared" in text for text in found.not_compared)


@pytest.mark.shows("P131")
def test_a_score_is_exempt_by_name(measured: Path, tmp_path: Path) -> None:
    again = train(tmp_path / "again", Net(measures=True))
    found = diff(measured, again)
    assert (found.iteration, found.what) == (EVERY, [SCORES])
    assert {*found.details["scores"][0]} == {"seconds"}
    exempt = [train(tmp_path / name, Exempt(measures=True)) for name in ("a", "b")]
    for pair in (exempt, [measured, exempt[0]]):
        found = diff(*pair)
        assert (found.is_equal, found.num_scored) == (True, 3)
        assert "the score 'seconds' was not compared: it is unscored" in found.not_compared
    # The others are compared as before.
    other = train(tmp_path / "c", Exempt(measures=True), Data(0.5))
    assert {*diff(exempt[0], other).details["scores"][0]} == {"error"}


def split(run: Path) -> tuple[list[bytes], list[bytes]]:
    """Return the lines of a ledger: the chain, and the scores beside it."""
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    scores = [line for line in lines if line.startswith(b'{"scores"')]
    return [line for line in lines if line not in scores], scores


@pytest.mark.shows("P135")
def test_the_chain_is_the_same_with_other_validations_or_none(
    known: Path, shifted: Path, measured: Path, tmp_path: Path
) -> None:
    chain, scores = split(known)
    assert (len(chain), len(scores)) == (TOTAL + 2, 3)
    never = train(tmp_path / "never", valid_frequency=None)
    assert split(never) == (chain, [])
    for other in (shifted, measured, train(tmp_path / "rare", valid_frequency=6)):
        assert split(other)[0] == chain
        assert split(other)[1] != scores
        assert verify(other).hash == verify(never).hash == verify(known).hash


@pytest.mark.shows("P135")
def test_a_kill_between_an_iteration_and_its_scores_leaves_the_same_ledger(
    tmp_path: Path,
) -> None:
    whole = train(tmp_path / "whole", chkpt_frequency=EVERY)
    ledger = (whole / "ledger.jsonl").read_bytes()
    places = [found.start() for found in re.finditer(b'{"scores"', ledger)]
    for cut in (*places, places[0] + 20, places[1] + 20):
        folder = tmp_path / str(cut)
        run = Path(shutil.copytree(whole, folder / "net"))
        for path in run.glob("*.pth"):
            mark = json.loads(path.with_suffix(".json").read_text())["ledger"]
            if mark["size"] > cut:
                path.unlink()
                path.with_suffix(".json").unlink()
        (run / "ledger.jsonl").write_bytes(ledger[:cut])
        train(folder, chkpt_frequency=EVERY)
        assert (run / "ledger.jsonl").read_bytes() == ledger
        assert main(["verify", str(run)]) == 0


@pytest.mark.shows("P135")
@pytest.mark.parametrize(
    ("change", "place"),
    [("number", 6), ("moved", 7), ("repeated", 7), ("removed", None), ("added", 5)],
    ids=lambda value: str(value),
)
def test_verify_finds_each_change_of_scores(
    change: str, place: int | None, known: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(known, tmp_path / "net"))
    path = run / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    # After the header and four iterations.
    line = lines[5]
    assert b'"after":4' in line
    if change == "number":
        lines[5] = line.replace(b'"error":"3', b'"error":"4')
    elif change == "moved":
        lines[5:7] = [lines[6], line]
    elif change == "repeated":
        lines.insert(5, line)
    elif change == "removed":
        lines.pop(5)
    else:
        lines.insert(4, seal(line[:-TAIL_BYTES].decode(), json.loads(lines[3])["h"])[0])
    path.write_bytes(b"".join(lines))
    assert main(["verify", str(run)]) == 1
    findings = verify(path).findings
    assert place is None or any(f"line {place}" in text for text in findings)


@pytest.mark.shows("P131")
def test_a_replay_compares_scores(known: Path) -> None:
    found = replay(known, Net(), start=0)
    assert (found.is_equal, found.num_scored) == (True, 3)
    assert found.not_compared == []
    found = replay(known, Net(), Data(0.5), start=0)
    assert not found.is_equal
    assert (found.iteration, found.what) == (EVERY, [SCORES])
    assert found.may_begin_earlier
    # From a checkpoint on, and up to the first validation after it that differs.
    found = replay(known, Net(), Data(0.5), start=6)
    assert (found.begins_after, found.iteration) == (6, 8)


@pytest.mark.shows("P131")
@pytest.mark.parametrize("place", ["sidecar", "best"])
def test_verify_finds_a_changed_score(
    place: str, known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(known, tmp_path / "net")
    assert main(["verify", str(run)]) == 0
    assert "; 1 validation with the scores of its checkpoints)" in capsys.readouterr().out
    (path,) = run.glob("*iter_12.json")
    if place == "sidecar":
        sidecar = Sidecar.from_json(path.read_text(), name=path.name)
        sidecar.metrics["error"] *= 1 + 2**-52
        path.write_text(sidecar.to_json())
    else:
        sidecar = Sidecar.from_json(path.read_text(), name=path.name)
        error = read_scores(run / "ledger.jsonl").by_iteration[8]["error"]
        best = BestValidation("error", "min", iteration=8, scores={"error": error / 2})
        changed = Sidecar(**{**vars(sidecar), "best": best})
        path.write_text(changed.to_json())
    assert main(["verify", str(run)]) == 1
    expected = "after iteration 8" if place == "best" else "after iteration 12"
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        (math.nan, math.nan, True),
        (0.1, math.nextafter(0.1, 1), False),
        (0.0, -0.0, False),
    ],
    ids=str,
)
def test_scores_are_equal_if_their_bits_are(one: float, other: float, *, is_equal: bool) -> None:
    found = LineComparison(num_equal=1)
    found.compare_scores(*(RunScores({1: {"error": x}}) for x in (one, other)))
    assert (found.iteration is None) is is_equal
