"""Weights taken out of checkpoints load into plain networks, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import helios
from helios.checkpoint import status
from helios.checkpoint.export import Weights, select_weights, write_weights
from helios.errors import ArgumentError, CheckpointError
from tests.support.models import Fitting


class Tied(nn.Module):
    """Two layers with one weight, a norm with buffers, and a transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.turned = nn.Parameter(torch.randn(3, 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x))) @ self.turned


class Data(helios.DataModule):
    def setup(self) -> None:
        data = TensorDataset(torch.arange(32.0).sin().view(8, 4))
        self._train_dataset = self._create_dataset(data, helios.DataLoaderParams(batch_size=4))


class One(Fitting):
    """A model with one network, compiled if wanted."""

    def __init__(self, *, is_compiled: bool = False) -> None:
        super().__init__("one")
        self.is_compiled = is_compiled

    def make_net(self) -> Any:
        net = Tied()
        return torch.compile(net, backend="eager") if self.is_compiled else net

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=0.1)


class Two(One):
    """Two networks, and a parameter of the model's own."""

    def setup(self, fast_init: bool = False) -> None:
        super().setup()
        self.heads = [nn.Linear(3, 2)]
        self.scale = nn.Parameter(torch.ones(1))
        self.optimizer.add_param_group({"params": [*self.heads[0].parameters(), self.scale]})

    def train_step(self, batch: Any, state: Any) -> torch.Tensor:
        return (self.heads[0](self.net(batch[0])) * self.scale).square().sum()


def train(model: helios.Model, root: Path, **options: Any) -> Path:
    """Train two steps, and return the checkpoint."""
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=2,
        chkpt_frequency=2,
        chkpt_root=root,
        use_cpu=True,
        print_banner=False,
        **options,
    )
    assert trainer.fit(model, Data())
    path = helios.find_last_checkpoint(root / model.save_name)
    assert path is not None
    return path


def content_of(path: Path) -> Any:
    found, tree = status.look_into(path)
    assert found.is_good
    return tree


def is_same(state: dict[str, Any], network: nn.Module) -> bool:
    own = network.state_dict()
    return list(state) == list(own) and all(torch.equal(state[key], own[key]) for key in own)


def export(path: Path, target: Path, **choice: Any) -> dict[str, Any]:
    """Export to both formats, see that they agree, and return what was read again."""
    weights = select_weights(content_of(path), **choice)
    plain, safe = target.with_suffix(".pt"), target.with_suffix(".safetensors")
    write_weights(plain, weights, kind="pt", metadata={})
    write_weights(safe, weights, kind="safetensors", metadata={"a": "b"})
    state, other = torch.load(plain, weights_only=True), load_file(safe)
    assert state.keys() == other.keys()
    assert all(torch.equal(state[key], other[key]) for key in state)
    assert all(state[key].dtype == other[key].dtype for key in state)
    return state


@pytest.mark.shows("S28", "U12")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_one_network_keeps_its_own_names_compiled_or_not(is_compiled: bool, tmp_path: Path) -> None:
    model = One(is_compiled=is_compiled)
    state = export(train(model, tmp_path), tmp_path / "out")
    net = model.net._orig_mod if is_compiled else model.net
    assert is_same(state, net)
    fresh = Tied()
    fresh.load_state_dict(state)
    assert is_same(state, fresh)


@pytest.mark.shows("S28")
def test_several_networks_stand_under_their_attributes(tmp_path: Path) -> None:
    model = Two()
    path = train(model, tmp_path)
    state = export(path, tmp_path / "all")
    expected = {f"net.{key}": value for key, value in model.net.state_dict().items()}
    expected |= {f"heads.0.{key}": value for key, value in model.heads[0].state_dict().items()}
    expected |= {"scale": model.scale.detach()}
    assert set(state) == set(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert is_same(export(path, tmp_path / "head", network="heads.0"), model.heads[0])
    with pytest.raises(ArgumentError, match=r"heads\.0.*got 'head'"):
        select_weights(content_of(path), network="head")


def weights_of(**tensors: torch.Tensor) -> Weights:
    return Weights(tensors)


def test_what_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    weights = weights_of(a=torch.zeros(2, 2).to_sparse())
    with pytest.raises(CheckpointError, match=r"cannot hold a, torch\.sparse_coo.*--to pt"):
        write_weights(tmp_path / "x", weights, kind="safetensors", metadata={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_full_disk_leaves_the_old_file_and_no_other(kind: str, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "x"
    path.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises((CheckpointError, OSError), match=r"File too large|os error 27"):
            write_weights(
                path, weights_of(a=torch.zeros(1 << 20)), kind=kind, metadata={}, replaces=True
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "old"
    assert [part.name for part in tmp_path.iterdir()] == ["x"]
