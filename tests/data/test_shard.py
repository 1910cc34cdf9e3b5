"""The part of the data that a process fetches: what it may be."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from helios.data.source import NO_BATCH, Shard
from helios.errors import ArgumentError


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((0, range(1), True), r"num_replicas=...\) must be a positive int, got 0"),
        ((2.0, range(1), True), "got 2.0"),
        ((True, range(1), True), "got True"),
        ((2, range(0), True), r"block=...\) must be a range of replicas from 0 to 1"),
        ((2, range(3), True), r"got range\(0, 3\)"),
        ((2, range(-1, 1), True), r"got range\(-1, 1\)"),
        ((4, range(3, -1, -2), True), r"got range\(3, -1, -2\)"),
        ((2, [0, 1], True), r"got \[0, 1\]"),
        ((2, range(2), 1), r"pads=...\) must be True or False, got 1"),
    ],
)
def test_a_share_that_cannot_be_is_refused(fields: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Shard(*fields)


def test_what_stands_for_no_batch_is_the_same_object_in_every_process() -> None:
    assert pickle.loads(pickle.dumps([NO_BATCH]))[0] is NO_BATCH
