"""Buffers and parameters that are views of something larger, or overlap, do so after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helios.errors import StateError
from helios.plugins import Plugin
from tests.ordinary.harness import WIDTH, Case, Regression, assert_ordinary, train
from tests.state_graph.owners import Owner, started, through_a_file


class Net(nn.Module):
    """A layer and two buffers, one of which scales what the layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.zeros(3))
        self.register_buffer("other", torch.arange(8.0))
        self.scale: Tensor
        self.other: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs) * (1 + self.scale.mean())
        return out


class Sharing(Regression):
    """Lets tensors look at other memory at the second iteration, and writes there from then on."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.large: Any = torch.arange(8.0)
        self.build()

    def make_net(self) -> nn.Module:
        return Net()

    def train_step(self, batch: Any, state: Any) -> Any:
        if state.global_iteration == 2:
            self.change()
        if state.global_iteration >= 2:
            self.write()
        return super().train_step(batch, state)

    def build(self) -> None:
        """Make what is special in setup."""

    def change(self) -> None:
        """Let tensors look elsewhere."""

    def write(self) -> None:
        self.large += 0.125


class OfATensor(Sharing):
    def change(self) -> None:
        self.net.scale = self.large[2:5]


class OfATensorWithSteps(Sharing):
    def change(self) -> None:
        self.net.scale = self.large[1:7:2]


class OfATensorExpanded(Sharing):
    def change(self) -> None:
        self.net.scale = self.large[2:3].expand(3)


class OfATensorWrittenByTheBuffer(OfATensor):
    def write(self) -> None:
        self.net.scale += 0.125


class OfANewTensor(Sharing):
    def change(self) -> None:
        self.large = torch.arange(8.0) * 2
        self.net.scale = self.large[2:5]


class OfATensorSinceSetup(Sharing):
    def build(self) -> None:
        self.net.scale = self.large[2:5]


class OfATensorMoved(OfATensorSinceSetup):
    def change(self) -> None:
        self.net.scale = self.large[1:4]


class OfATensorParted(OfATensorSinceSetup):
    def change(self) -> None:
        self.net.scale = self.net.scale.clone()


class OfTheFirstParted(OfATensorSinceSetup):
    """The tensor by which the larger one is found gets memory of its own, and another one stays."""

    def build(self) -> None:
        super().build()
        self.net.other = self.large[1:8]

    def change(self) -> None:
        self.net.scale = self.net.scale.clone()

    def write(self) -> None:
        super().write()
        self.net.scale *= 2


class OfTheFirstOfThreeParted(OfTheFirstParted):
    def build(self) -> None:
        super().build()
        self.net.register_buffer("third", self.large[3:6])
        self.large = None

    def write(self) -> None:
        self.net.other += 0.125
        self.net.scale *= 2


class OfAParameterParted(Sharing):
    def build(self) -> None:
        weight = self.net.layer.weight
        self.large = torch.arange(10.0) / 8
        weight.data, self.net.other = self.large[:6].view_as(weight), self.large[5:]

    def change(self) -> None:
        self.net.layer.weight.data = self.net.layer.weight.data.clone()


class OfTheLastPartedOfTied(Sharing):
    """Two are tied, and overlap a third one, which gets memory of its own."""

    def build(self) -> None:
        self.net.scale = self.net.other[2:5]
        self.net.register_buffer("tied", self.net.other[2:5])
        self.net.register_buffer("first", self.net.other[1:3])

    def change(self) -> None:
        self.net.other, self.net.first = self.net.other.clone(), self.net.first.clone()

    def write(self) -> None:
        self.net.scale += 0.125


class OfBytes(Sharing):
    """Of memory that ends within an element."""

    def change(self) -> None:
        self.large = torch.arange(15, dtype=torch.uint8)
        self.net.scale = self.large[:12].view(torch.float32)

    def write(self) -> None:
        self.large[12:] += 1


class TwoOfBytes(OfBytes):
    def change(self) -> None:
        super().change()
        self.net.other = self.large[4:12].view(torch.float32)


class OfHalves(OfBytes):
    def change(self) -> None:
        self.large = torch.zeros(7, dtype=torch.float16)
        self.net.scale = self.large[:6].view(torch.float32)


class OfALargerOne(OfATensorSinceSetup):
    """Both look at other memory, each where it looked from the other."""

    def change(self) -> None:
        memory = torch.arange(16.0) * 3
        self.large, self.net.scale = memory[:8], memory[2:5]


class OfAShiftedOne(Sharing):
    def build(self) -> None:
        memory = torch.arange(16.0)
        self.large, self.net.scale = memory[:8], memory[2:5]

    def change(self) -> None:
        memory = torch.arange(16.0) * 3
        self.large, self.net.scale = memory[2:10], memory[4:7]


class OfAnArray(Sharing):
    def build(self) -> None:
        self.large = np.arange(8, dtype=np.float32)

    def change(self) -> None:
        self.net.scale = torch.from_numpy(self.large)[2:5]


class OfABuffer(Sharing):
    def change(self) -> None:
        self.net.scale = self.net.other[2:5]

    def write(self) -> None:
        self.net.other += 0.125


class OfABufferSinceSetup(OfABuffer):
    def build(self) -> None:
        super().change()

    def change(self) -> None:
        """All is done."""


class OfABufferParted(OfABufferSinceSetup):
    def change(self) -> None:
        self.net.scale = self.net.scale.clone()


class OfABufferWithAView(OfABuffer):
    def build(self) -> None:
        self.head = self.net.scale[:2]

    def change(self) -> None:
        super().change()
        self.head = self.net.scale[:2]

    def write(self) -> None:
        self.head += 0.125


class OfThePartOfAParameter(Sharing):
    def change(self) -> None:
        self.net.scale = self.net.layer.weight.data[0, 1:4]

    def write(self) -> None:
        """The optimizer does."""


class Overlapping(Sharing):
    def change(self) -> None:
        memory = torch.arange(8.0)
        self.net.scale, self.net.other = memory[2:5], memory[3:8]

    def write(self) -> None:
        self.net.scale += 0.125


class OneForAll(Sharing):
    """Parameters that are parts of one vector, as evolution strategies have them."""

    def change(self) -> None:
        self.large = nn.utils.parameters_to_vector(self.net.parameters()).detach()
        nn.utils.vector_to_parameters(self.large, self.net.parameters())


class OfALooseParameter(Sharing):
    def build(self) -> None:
        self.loose = nn.Parameter(torch.zeros(3), requires_grad=False)

    def change(self) -> None:
        self.loose.data = self.large[2:5]


class GrownWithAView(Sharing):
    def build(self) -> None:
        self.head, self.same = self.net.scale[:2], self.net.scale

    def change(self) -> None:
        self.net.scale = torch.arange(7.0)
        self.head, self.same = self.net.scale[:2], self.net.scale

    def write(self) -> None:
        self.head += 0.125
        self.same += 0.125


class ExpandedInSetup(Sharing):
    def build(self) -> None:
        self.large = torch.zeros(1)
        self.net.scale = self.large.expand(3)


_SHARING = [
    OfATensor,
    OfATensorWithSteps,
    OfATensorExpanded,
    OfATensorWrittenByTheBuffer,
    OfANewTensor,
    OfATensorSinceSetup,
    OfATensorMoved,
    OfATensorParted,
    OfTheFirstParted,
    OfTheFirstOfThreeParted,
    OfAParameterParted,
    OfTheLastPartedOfTied,
    OfBytes,
    TwoOfBytes,
    OfHalves,
    OfALargerOne,
    OfAShiftedOne,
    OfAnArray,
    OfABuffer,
    OfABufferSinceSetup,
    OfABufferParted,
    OfABufferWithAView,
    OfThePartOfAParameter,
    Overlapping,
    OneForAll,
    OfALooseParameter,
    GrownWithAView,
    ExpandedInSetup,
]


@pytest.mark.shows("S56")
@pytest.mark.parametrize("model", _SHARING, ids=lambda model: model.__name__)
def test_tensors_of_networks_look_where_they_looked(model: type[Sharing], tmp_path: Path) -> None:
    assert_ordinary(Case(model), tmp_path)


def test_a_second_resume_gives_the_same_as_the_first(tmp_path: Path, said: list[str]) -> None:
    def make() -> Any:
        torch.manual_seed(1)
        return Owner(net=Net(), large=torch.arange(8.0))

    owner = make()
    discovery = started(owner)
    owner.net.scale = owner.large[2:5]
    for number in range(2):
        owner.large += 1
        state = through_a_file(discovery.capture(), tmp_path / str(number))
        owner = make()
        discovery = started(owner)
        discovery.restore(state)
        owner.net.scale += 1
        assert owner.large[2:5].tolist() == owner.net.scale.tolist()
    assert owner.large.tolist() == [2, 3, 6, 7, 8, 7, 8, 9]
    assert not said


def test_tensors_side_by_side_in_one_memory_are_no_block() -> None:
    owner = Owner(net=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    vector = nn.utils.parameters_to_vector(owner.net.parameters()).detach()
    nn.utils.vector_to_parameters(vector, owner.net.parameters())
    assert started(owner).capture()["layouts"]["homes"] == {}


class OfAnotherType(Sharing):
    def change(self) -> None:
        self.net.scale = self.net.other.view(torch.int32)[2:5].view(torch.float32)
        self.net.register_buffer("numbers", self.net.other.view(torch.int32))


def test_buffers_of_two_types_in_one_memory_are_refused_at_the_save(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="shares its memory with"):
        train(Case(OfAnotherType), tmp_path)


class AroundTheTensor(OfAnArray):
    def change(self) -> None:
        self.net.scale = torch.from_numpy(self.large[2:5])


class OfOneArray(AroundTheTensor):
    """Torch does not know that these overlap."""

    def change(self) -> None:
        large = np.arange(8, dtype=np.float32)
        self.net.scale = torch.from_numpy(large[:3])
        self.net.other = torch.from_numpy(large[1:4])


class Owning(Plugin):
    """Gives a network's buffer a part of its own memory."""

    def __init__(self) -> None:
        super().__init__("owning")
        self.large = torch.arange(8.0)

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        self.context.model.net.scale = self.large[2:5]
        self.large += 0.125


class Looking(Plugin):
    """Lets a buffer of its own network look at one of the model."""

    def __init__(self) -> None:
        super().__init__("looking")

    def setup(self) -> None:
        self.large = nn.BatchNorm1d(3)

    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        self.large.running_mean = self.context.model.net.other[2:5]


class LookingFromTheStart(Looking):
    def on_training_start(self) -> None:
        self.large.running_mean = self.context.model.net.other[2:5]


@pytest.mark.shows("S56")
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(AroundTheTensor), "make a tensor of the whole array"),
        (Case(OfOneArray), "make a tensor of the whole array"),
        (Case(Sharing, options=lambda _: {"plugins": [Owning()]}), "which another owner saves"),
        (Case(Sharing, options=lambda _: {"plugins": [Looking()]}), "which another owner saves"),
    ],
    ids=["an array around a tensor", "of one array", "of a plugin", "of a network of a plugin"],
)
def test_memory_that_cannot_be_shared_again_is_named(
    case: Case, reason: str, tmp_path: Path
) -> None:
    outcome = train(case, tmp_path)
    assert len(outcome.warnings) == 1
    assert reason in outcome.warnings[0]
    names = str([sidecar["missing"] for sidecar in outcome.sidecars])
    assert names.count("large") + names.count("net.other':") == len(outcome.sidecars)


class KeepingTheLoss(Plugin):
    """Keeps what another one keeps, too: each gets a tensor of its own with the same memory."""

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        self.loss = self.context.loss
        self.batch = self.context.batch[0].numpy()


def test_what_plugins_keep_to_read_is_saved_by_each(tmp_path: Path) -> None:
    plugins = [KeepingTheLoss("one"), KeepingTheLoss("other")]
    assert_ordinary(Case(Sharing, options=lambda _: {"plugins": plugins}), tmp_path)


def test_memory_that_each_start_shares_anew_is_not_named(tmp_path: Path) -> None:
    case = Case(Sharing, options=lambda _: {"plugins": [LookingFromTheStart()]})
    assert_ordinary(case, tmp_path)
