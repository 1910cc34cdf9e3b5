"""Parts of a tree are timed while they are encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from helios.storage import codec
from helios.storage.encoding_cost import Metering
from helios.storage.staging import HostBuffers
from tests.storage.test_weights_only import is_same
from tests.support.clock import Hands


def _encoder(clock: Hands, arrays: list[int], seconds: float, count: int) -> Callable[[Any], str]:
    def encode(part: Any) -> str:
        clock.time += seconds
        arrays.extend([0] * count)
        return f"code of {part}"

    return encode


def test_a_part_counts_its_own_time_and_its_share_of_the_arrays() -> None:
    clock, arrays, seconds = Hands(), [0], dict[str, float]()
    parts = {"a": "first", "b": "second"}
    meters = {
        id(part): lambda taken, name=name: seconds.__setitem__(name, taken)
        for name, part in parts.items()
    }
    metering = Metering(meters, lambda: len(arrays), clock)
    assert metering.run(_encoder(clock, arrays, 2.0, 3), parts["a"]) == "code of first"
    metering.run(_encoder(clock, arrays, 1.0, 0), parts["b"])

    def write() -> None:
        clock.time += 8.0

    metering.finish(write)
    assert seconds == {"a": 2.0 + 3 * 2.0, "b": 1.0}


def test_a_part_inside_of_a_part_counts_there() -> None:
    clock, seconds = Hands(), list[float]()
    inner, outer = ["inner"], ["outer"]
    metering = Metering({id(inner): seconds.append, id(outer): seconds.append}, lambda: 0, clock)

    def encode(part: Any) -> str:
        assert id(inner) not in metering.waiting
        clock.time += 1.0
        return "code"

    assert id(outer) in metering.waiting
    metering.run(encode, outer)
    assert id(inner) in metering.waiting
    metering.finish(lambda: None)
    assert seconds == [1.0]


def test_meters_change_nothing_of_a_code() -> None:
    part = {"rows": [np.arange(3), (1, 2)], "again": [1]}
    tree = {"model": part, "alias": part["rows"], "other": part["again"]}
    counted: list[float] = []
    meters = {id(part["rows"]): counted.append, id(part): counted.append}
    assert is_same(codec.encode(tree, where="", meters=meters), codec.encode(tree, where=""))
    code = codec.capture(tree, safe_types=(), buffers=HostBuffers(pins=False), meters=meters).code
    assert is_same(codec.decode(code), tree)
    assert len(counted) == 2
    assert min(counted) > 0
