"""What was rebuilt in training, or has moved unseen, is named at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from helios.errors import StateError
from tests.state.owners import Owner, network, started


def _swap_optimizer(owner: Any) -> None:
    owner.optimizer = torch.optim.SGD(owner.net.parameters(), lr=0.1)


def _prune(owner: Any) -> None:
    torch.nn.utils.prune.random_unstructured(owner.net[0], "weight", 0.5)  # type: ignore[no-untyped-call]


def _append(owner: Any) -> None:
    owner.net.append(nn.Linear(1, 1))


def _widen(owner: Any) -> None:
    owner.net[3] = nn.Linear(4, 2)


def _add_strangers(owner: Any) -> None:
    owner.optimizer.add_param_group({"params": torch.zeros(2, requires_grad=True)})


_REBUILT = {
    "another optimizer": (_swap_optimizer, "optimizer (Adam after setup, SGD now)", "saved by SGD"),
    "pruning": (_prune, "net.0.weight (parameter after setup, nothing now)", None),
    "a layer more": (_append, "net.4 (nothing after setup, a new Linear now)", "net"),
    "another size": (
        _widen,
        "optimizer (updates tensors that no attribute of the model holds: net.3.bias (old), "
        "net.3.weight (old))",
        r"net\.3\.weight",
    ),
    "a group of strangers": (_add_strangers, "model holds: optimizer.param_groups[1]", "optimizer"),
}


@pytest.mark.parametrize("name", _REBUILT)
def test_what_was_rebuilt_in_training_is_named_at_once(name: str, said: list[str]) -> None:
    """A checkpoint that cannot be resumed is not written without a word."""
    rebuild, words, refusal = _REBUILT[name]

    def make() -> Any:
        net = network()
        return Owner(net=net, optimizer=torch.optim.Adam(net.parameters()))

    owner = make()
    discovery = started(owner)
    discovery.capture()
    assert not said
    rebuild(owner)
    discovery.capture()
    state = discovery.capture()
    (text,) = said
    assert words.removesuffix(")") in text
    assert "a resume from this state fails" in text
    assert words in "; ".join(f"{path} ({what})" for path, what in state["misfits"].items())
    if refusal is not None:
        with pytest.raises(StateError, match=f"(?s){refusal}"):
            started(make()).restore(state)
