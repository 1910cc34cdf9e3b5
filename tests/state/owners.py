"""Owners of attributes to discover state in, and the way of a state through a file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from helios.state.anchors import path_of
from helios.state.discovery import Discovery
from helios.state.walk import GONE
from helios.storage import codec
from helios.storage.codes import TAG


class Owner:
    """Stands for a model after setup: nothing but attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Recorded(logging.Handler):
    """The messages of one logger, whatever is set up above it."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname}: {record.getMessage()}")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def started(owner: object, **options: Any) -> Discovery:
    """Return a discovery that regards what the owner has as made by setup."""
    discovery = Discovery(owner, **options)
    discovery.take_baseline()
    return discovery


def through_a_file(state: Any, path: Path) -> Any:
    with path.open("wb") as handle:
        codec.write_encoded(handle, codec.encode(state, where="model"))
    return codec.read(path)


def resumed(make: Callable[[], Any], state: dict[str, Any]) -> Any:
    """Return what setup makes, with the state restored."""
    owner = make()
    started(owner).restore(state)
    return owner


def changed(discovery: Discovery) -> dict[str, Any]:
    """Return the attributes that are saved because training changed them."""
    return saved_attributes(discovery.capture())


def saved_attributes(state: dict[str, Any]) -> dict[str, Any]:
    """Return what is saved of an owner: its attributes, and those of what it holds by path."""
    return {
        path_of(name, key): value_of(code)
        for name, table in state["values"].items()
        for key, code in table.items()
        if code != GONE
    }


def value_of(code: Any) -> Any:
    """Return the value that a code stands for; of what has no plain value, the code."""
    if type(code) in (list, tuple):
        return type(code)(map(value_of, code))
    if not isinstance(code, dict):
        return code
    tag = code.get(TAG)
    if tag is None:
        return {key: value_of(each) for key, each in code.items()}
    if tag in ("set", "frozenset"):
        return {"set": set, "frozenset": frozenset}[tag](map(value_of, code["items"]))
    if tag in ("ordered", "dict", "counter", "defaultdict"):
        return {value_of(key): value_of(each) for key, each in code["pairs"]}
    if tag == "deque":
        return [*map(value_of, code["items"])]
    if tag == "object":
        return {key: value_of(each) for key, each in code["fields"].items()}
    return code.get("value", code)


def bits(value: Any) -> Any:
    """Return a value with every tensor as its bytes."""
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), flat.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [bits(member) for member in value]
    return value
