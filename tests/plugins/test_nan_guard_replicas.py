"""A NaN of one replica: every process does and says the same, however many carry the replicas."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.errors import UsageError
from helios.plugins.nan_guard import NaNGuard
from helios.state import TrainingState
from tests.support.elastic import (
    Elastic,
    ElasticData,
    ElasticModel,
    assert_same,
    make_trainer,
    read_bits,
)
from tests.support.quiet import Quiet
from tests.support.ranks import run_ranks
from tests.support.runs import digest

NAN = float("nan")


class Broken(ElasticModel):
    """Its loss is NaN for some samples: through the weights, or beside them.

    Args:
        kind: ``"deep"``: the gradient is NaN, too; ``"flat"``: it is not; ``"gradient"``: it is,
            and the loss is not.
        bad: ids of the samples.
    """

    unsaved = ("log", "setting", "kind", "bad")

    def __init__(self, setting: Elastic, folder: Path, kind: str, bad: tuple[int, ...]) -> None:
        super().__init__(setting, folder)
        self.kind, self.bad = kind, bad

    def train_step(self, batch: Any, state: TrainingState) -> Any:
        ids, images = batch
        loss = super().train_step((ids, images), state)
        if not set(self.bad).isdisjoint(ids.tolist()):
            if self.kind == "deep":
                loss = loss + self.body[1](images.expand(-1, 4, -1, -1) * NAN).sum()
            elif self.kind == "flat":
                loss = loss + NAN
            else:
                loss.register_hook(lambda gradient: gradient * NAN)
        return loss


class Witness(Quiet):
    """Writes what each process has seen of the updates."""

    unsaved = ("folder",)

    def __init__(self, folder: Path) -> None:
        super().__init__("witness")
        self.folder = folder

    def on_optimizer_step_end(self, optimizer: torch.optim.Optimizer, committed: bool) -> None:
        with (self.folder / f"updates-{self.context.rank}.jsonl").open("a") as file:
            file.write(json.dumps([self.context.state.global_iteration, committed]) + "\n")


class Messages(logging.Handler):
    """Keeps what a guard warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _work(rank: int, folder: str, setting: Elastic, options: dict[str, Any]) -> dict[str, Any]:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    guard = NaNGuard(options["action"], options["checks"])
    model, messages = Broken(setting, path, options["kind"], options["bad"]), Messages()
    logger = logging.getLogger("helios.plugins.nan_guard")
    logger.addHandler(messages)
    error = ""
    trainer = make_trainer(path, setting, guard, Witness(path))
    try:
        trainer.fit(model, ElasticData(setting))
    except UsageError as found:
        error = str(found)
    finally:
        logger.removeHandler(messages)
    return {
        "error": error,
        "messages": messages.texts,
        "skipped": guard.num_skipped,
        "model": digest(model.discovery.capture()["objects"]),
    }


def _train(
    folder: Path, setting: Elastic, count: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    if count == 1:
        return [_work(0, str(folder), setting, options)]
    return run_ranks(_work, count, str(folder), setting, options)


def _is_same_on_all(folder: Path, found: list[dict[str, Any]]) -> bool:
    files = [path.read_text() for path in sorted(folder.glob("updates-*.jsonl"))]
    for part in found[1:]:
        part["messages"] = found[0]["messages"]  # others log nothing
    return found == found[:1] * len(found) and files == files[:1] * len(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("action", "kind", "checks"),
    [
        ("skip", "deep", "both"),
        ("skip", "flat", "loss"),
        ("skip", "gradient", "gradients"),
        ("raise", "flat", "both"),
        ("stop", "deep", "loss"),
    ],
)
def test_all_processes_decide_and_say_the_same(
    tmp_path: Path, action: str, kind: str, checks: str
) -> None:
    setting = Elastic(total_steps=4, accumulation=2)
    options = {"action": action, "kind": kind, "checks": checks, "bad": (7,)}
    expected = _train(tmp_path / "1", setting, 1, options)
    assert expected[0]["messages"] or expected[0]["error"]
    folder = tmp_path / "3"
    found = _train(folder, setting, 3, options)
    assert found[0] == expected[0]
    assert _is_same_on_all(folder, found)
    if action != "raise":
        assert_same(read_bits(folder), read_bits(tmp_path / "1"))
