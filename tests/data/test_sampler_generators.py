"""Generators that samplers hold: found, saved and put back."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler, Sampler, TensorDataset

from helios.data.sampler_generators import OwnGenerators, find_generators
from helios.storage import codec


class Around(Sampler[int]):
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


@pytest.mark.shows("S66")
def test_generators_are_found_in_samplers_inside_samplers() -> None:
    inner, outer = torch.Generator(), random.Random(1)
    stock = BatchSampler(RandomSampler(range(4), generator=inner), 2, drop_last=False)
    around = Around(batches=stock, shuffler=outer, name="around")
    assert find_generators(around) == {"batches.sampler.generator": inner, "shuffler": outer}
    assert find_generators(RandomSampler(range(4))) == {}
    assert find_generators([[0, 1]]) == {}


@pytest.mark.shows("S66")
def test_generators_are_found_in_containers_and_objects_of_a_sampler() -> None:
    one, other = torch.Generator(), random.Random(1)
    around = Around(tools={"draw": [0, one]}, holder=SimpleNamespace(draw=other))
    assert find_generators(around) == {"tools.draw.1": one, "holder.draw": other}


def test_generators_of_data_sets_and_networks_are_not_the_samplers() -> None:
    data, net = TensorDataset(torch.zeros(2)), nn.Dropout()
    data.draw, net.draw = torch.Generator(), torch.Generator()  # type: ignore[attr-defined]
    assert find_generators(Around(data_source=data, net=net, rows=[[data.draw]] * 200)) == {}  # type: ignore[attr-defined]


@pytest.mark.shows("S74")
def test_a_generator_that_the_class_of_its_sampler_declares_is_left_out() -> None:
    class Declaring(Around):
        unsaved = ("jitter",)

    inner, outer = torch.Generator(), random.Random(1)
    around = Around(inner=Declaring(jitter=outer, order=inner), jitter=outer)
    assert find_generators(around) == {"inner.order": inner, "jitter": outer}


def test_the_default_generator_is_the_trainers() -> None:
    assert find_generators(RandomSampler(range(4), generator=torch.default_generator)) == {}


def test_a_sampler_that_holds_itself_comes_to_an_end() -> None:
    endless = Around()
    endless.inner = endless
    assert find_generators(endless) == {}


def _draw(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    return [generator.random() for _ in range(3)]


@pytest.mark.parametrize(
    "generator",
    [
        torch.Generator().manual_seed(3),
        random.Random(3),
        np.random.default_rng(3),
        np.random.Generator(np.random.MT19937(3)),
        np.random.RandomState(3),
    ],
)
def test_a_generator_goes_on_from_its_saved_state(generator: Any) -> None:
    generators = OwnGenerators({"own": generator})
    _draw(generator)
    state = codec.decode(codec.encode(generators.state_dict(), where=""))
    following = _draw(generator)
    assert _draw(generator) != following
    generators.load_state_dict(state)
    assert _draw(generator) == following


def test_the_state_of_another_kind_is_left_out() -> None:
    state = OwnGenerators({"own": random.Random(3)}).state_dict()
    generator = torch.Generator().manual_seed(4)
    OwnGenerators({"own": generator, "new": random.Random(5)}).load_state_dict(state)
    assert generator.initial_seed() == 4
