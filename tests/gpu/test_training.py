"""Trainings on a GPU: exact resumes, several replicas on one device, precisions, compilation.

Each runs in a process of its own, since deterministic algorithms must be chosen before CUDA starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from tests.distributed.test_elastic import Interrupt
from tests.support.elastic import Elastic, assert_same, read_bits, train
from tests.support.token_run import EXACT_GPU, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def make_setting(num_replicas: int, **options: Any) -> Elastic:
    given = {"use_cpu": None, **EXACT_GPU, **options}
    return Elastic(num_replicas=num_replicas, total_steps=9, options=given)


def test_the_level_is_elastic_with_deterministic_algorithms_only(tmp_path: Path) -> None:
    levels = []
    for name, is_deterministic in (("exact", True), ("plain", False)):
        setting = make_setting(2, enable_deterministic=is_deterministic)
        assert start(train, tmp_path / name, setting) == 0
        newest = helios.find_last_checkpoint(tmp_path / name / "elastic")
        assert newest is not None
        levels.append(json.loads(newest.with_suffix(".json").read_text())["level"])
    assert levels == ["elastic", "order"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_bits_of_one(tmp_path: Path) -> None:
    one = make_setting(2)
    two = make_setting(2, gpus=[0, 1])
    assert start(train, tmp_path / "one", one) == 0
    assert start(train, tmp_path / "two", two) == 0
    assert_same(read_bits(tmp_path / "two"), read_bits(tmp_path / "one"))
    assert start(train, tmp_path / "both", two, Interrupt(3, 1)) == 0
    assert start(train, tmp_path / "both", one) == 0
    assert_same(read_bits(tmp_path / "both"), read_bits(tmp_path / "one"))
