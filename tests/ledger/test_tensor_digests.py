"""The digests of a full ledger: what is named, and what each of them covers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from helios.ledger.tensor_digests import TensorDigests
from helios.state import TrainingState


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


class Subject:
    """A network of two layers, an optimizer, and the digests of both."""

    def __init__(self) -> None:
        self.layers = {"first": nn.Linear(2, 3), "last": nn.Linear(3, 1)}
        self.weights = {f"{name}.weight": layer.weight for name, layer in self.layers.items()}
        self.optimizer = torch.optim.SGD(self.weights.values(), lr=0.5)
        self.draws = torch.Generator().manual_seed(1)
        self.digests = TensorDigests(
            reads_weights=True,
            find_weights=lambda: self.weights,
            read_generators=lambda: {"torch": self.draws.get_state()},
            gather=list,
        )
        self.digests.open(lambda optimizer, *_: self.digests.before_step(optimizer))

    def backward(self) -> None:
        self.optimizer.zero_grad()
        layers = self.layers.values()
        nn.Sequential(*layers)(torch.ones(1, 2)).sum().backward()

    def begin(self, batch: Any = 0, iteration: int = 2) -> None:
        self.digests.see([batch])
        self.digests.begin_turn(iteration)

    def end(self) -> dict[str, Any]:
        self.digests.exchange()
        found: dict[str, Any] = json.loads("{" + self.digests.describe(TrainingState())[1:] + "}")
        return found

    def describe(self, batch: Any) -> dict[str, list[str]]:
        self.begin(batch)
        (found,) = self.end()["batch"]
        return found  # type: ignore[no-any-return]


@pytest.fixture
def subject() -> Iterator[Subject]:
    """Return a subject whose hooks are removed at the end."""
    made = Subject()
    yield made
    made.digests.close()


@pytest.mark.shows("P37")
@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.ones(2, 3), {"batch": "float32 (2, 3)"}),
        ((torch.ones(2), torch.ones(1)), {"batch[0]": "float32 (2,)", "batch[1]": "float32 (1,)"}),
        ({"b": [torch.ones(2)], "a": "x"}, {"batch['a']": "str", "batch['b'][0]": "float32 (2,)"}),
        (
            Pair(torch.ones(1).int().numpy(), [1]),
            {"batch.left": "int32 (1,)", "batch.right": "list"},
        ),
        ([], {"batch": "list"}),
        ({object(): torch.ones(1)}, {"batch": "unseen dict"}),
        ([torch.ones(1), object()], {"batch[0]": "float32 (1,)", "batch[1]": "unseen object"}),
    ],
    ids=["tensor", "tuple", "dict", "dataclass", "empty", "keys of any type", "object"],
)
def test_each_tensor_of_a_batch_is_named_as_code_reaches_it(
    batch: Any, expected: dict[str, str], subject: Subject
) -> None:
    found = subject.describe(batch)
    assert {path: form for path, (_, form) in found.items()} == expected
    assert all(len(digest) == 16 for digest, _ in found.values())


def test_one_value_changes_the_digest_of_its_tensor_only(subject: Subject) -> None:
    before = subject.describe({"x": torch.zeros(4), "y": torch.zeros(4)})
    after = subject.describe({"y": torch.tensor([0.0, 0, 1e-45, 0]), "x": torch.zeros(4)})
    assert list(before) == list(after)
    assert [path for path in before if before[path] != after[path]] == ["batch['y']"]


def test_a_container_that_holds_itself_ends(subject: Subject) -> None:
    batch: list[Any] = [torch.ones(1)]
    batch.append(batch)
    assert list(subject.describe(batch))[:2] == ["batch[0]", "batch[1][0]"]


@pytest.mark.shows("P37")
def test_gradients_are_those_before_clipping_in_the_order_of_backward(subject: Subject) -> None:
    found = []
    for limit in (1.0, 0.1):
        subject.begin()
        subject.backward()
        subject.digests.take_gradients(subject.optimizer)
        nn.utils.clip_grad_norm_(subject.weights.values(), limit)
        with torch.no_grad():
            kept = {name: weight.clone() for name, weight in subject.weights.items()}
            subject.optimizer.step()
            found.append(subject.end())
            for name, weight in subject.weights.items():
                weight.copy_(kept[name])
    assert list(found[0]["gradients"]) == ["last.weight", "first.weight"]
    assert found[0]["gradients"] == found[1]["gradients"]
    assert found[0]["parameters"] != found[1]["parameters"]


@pytest.mark.shows("P37")
def test_a_step_that_the_model_makes_itself_is_seen_each_time(subject: Subject) -> None:
    subject.begin()
    for _ in range(2):
        subject.backward()
        subject.optimizer.step()
    found = subject.end()
    names = ["last.weight", "first.weight"]
    assert list(found["gradients"]) == [*names, *(f"{name}, update 2" for name in names)]
    assert list(found["parameters"]) == list(subject.weights)


def test_a_foreign_optimizer_is_not_seen(subject: Subject) -> None:
    subject.begin()
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    torch.optim.SGD([other], lr=1.0).step()
    assert "gradients" not in subject.end()


def test_no_step_is_watched_after_the_end(subject: Subject) -> None:
    subject.digests.close()
    subject.begin()
    subject.backward()
    subject.optimizer.step()
    assert "gradients" not in subject.end()


def test_a_sparse_gradient_is_read(subject: Subject) -> None:
    table = subject.weights["table"] = nn.Embedding(5, 2, sparse=True).weight
    optimizer = torch.optim.SGD([table], lr=0.1)
    found = []
    for row in (1, 2, 1):
        subject.begin()
        optimizer.zero_grad()
        nn.functional.embedding(torch.tensor([row, row]), table, sparse=True).sum().backward()
        subject.digests.take_gradients(optimizer)
        found.append(subject.end()["gradients"]["table"])
    assert found[0] == found[2] != found[1]


def test_generators_are_those_before_the_step(subject: Subject) -> None:
    found = []
    for _ in range(2):
        subject.begin()
        torch.rand(1, generator=subject.draws)
        found.append(subject.end()["generators"])
    assert found[0] != found[1]
    subject.draws.manual_seed(1)
    subject.begin()
    assert subject.end()["generators"] == found[0]


def test_the_first_weights_are_in_the_first_line_only(subject: Subject) -> None:
    subject.begin(iteration=1)
    first = subject.end()
    assert list(first["initial"]) == list(subject.weights)
    subject.begin(iteration=2)
    assert "initial" not in subject.end()
