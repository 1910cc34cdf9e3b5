"""After ``fit`` a sharded network is loaded for an evaluation, whatever a script does to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import helios
from helios.core.sharded_tensors import local_of
from tests.integration.test_model_in_hand import Data, Net, by_hand, make
from tests.support.ranks import run_ranks


class Cut(Net):
    def shard(self) -> Sequence[nn.Module]:
        return [self.net[0], self.net[3]]


def _test_changed(rank: int, root: Path) -> dict[str, Any]:
    """Train, change each weight, and test."""
    if dist.get_world_size() == 1:
        dist.destroy_process_group()
    trainer = make(root, num_replicas=2, sharding="full")
    model, data = Cut(), Data()
    assert trainer.fit(model, data)
    error, count = model.metrics["error"], model.num_setups
    with torch.no_grad():
        for parameter in model.net.parameters():
            local_of(parameter).fill_(100.0)
    trainer.test(model, data)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    errors = error, model.test_scores["error"]
    return {"errors": errors, "num_setups": model.num_setups - count, "x": data.x}


@pytest.mark.shows("P132")
def test_an_omitted_checkpoint_is_the_newest(tmp_path: Path) -> None:
    results = run_ranks(_test_changed, 2, tmp_path)
    path = helios.find_last_checkpoint(tmp_path / "net")
    assert path is not None
    plain, data = Net(), Data()
    plain.setup()
    plain.net.load_state_dict(helios.load_checkpoint(path)["model"]["objects"]["net"])
    data.x = results[0]["x"]
    expected, _ = by_hand(plain.net, data)
    for result in results:
        before, after = result["errors"]
        assert after == before == pytest.approx(expected)
        assert result["num_setups"] == 1
