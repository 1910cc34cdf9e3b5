"""The reasons why a value cannot be saved, each with its remedy."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch.utils.data import DataLoader, Dataset

from helios.core.generators import is_generator
from helios.storage.type_converters import type_name

_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, functools.partial)
_DATA = (Dataset, DataLoader)

TOO_DEEP = "it is nested more than {} levels deep: flatten it"
FACTORY = (
    "the factory of its defaultdict cannot be called when loading: use one such as int or list"
)
IN_SET = "it holds a tensor in a set: keep tensors in a list or dict"
IN_SCALAR = "it holds an object in a NumPy scalar: take it out of the array"
NO_STORAGE = (
    "it holds a tensor without a storage of its own ({}): register it as a buffer of a network"
)
SHARDED = (
    "it holds a sharded tensor: save it in the state_dict() of a plugin, whose load_state_dict() "
    "gets it whole"
)
AROUND = (
    "the memory of {} is part of its own memory: make a tensor of the whole array with "
    "torch.from_numpy, and slice that tensor"
)
BEYOND = "it is a view beyond {}, which another owner saves: copy it"
OVERLAPPING = (
    "its memory overlaps that of {} differently than after setup(), in an array that torch does "
    "not know: make a tensor of the whole array with torch.from_numpy, and slice that tensor"
)
SHARED_BY_OWNERS = (
    "it shares memory with {}, which another owner saves, differently than after setup(): share it "
    "in setup(), or copy it"
)
GRAPH = "it holds a tensor with a computation graph: detach() it"
STRAY_PARAMETER = "it holds a {} that no saved object holds: register it in a network in setup()"
REFERENCE = "it refers to {}: keep objects in attributes, or in lists and dicts"
FLAGS = "{!r} is not a combination of named flags: name all flags"
FILE = "it is an open file: open it at each start, in setup() or on_training_start()"
MAPPED = "it is mapped from a file: map it read-only, or copy it into an array"
BROKEN = "it cannot be inspected ({}): give it state_dict() and load_state_dict()"
UNKNOWN = (
    "setup() creates no {}, so that loading cannot know the type: create one in setup(), or return "
    "the type from types_for_safe_load()"
)
TOO_LARGE = (
    "plain values are saved up to a total of {}: register large tensors as buffers of a network, "
    "give their owner state_dict() and load_state_dict(), or raise "
    "CheckpointStore(max_plain_bytes=...)"
)
LATE = "created after setup(), so that a resumed run cannot find it: create it in setup()"
HOOK = (
    "a hook registered, removed or moved after the start: register it in setup(), or at each "
    "start in on_training_start()"
)
OF_OWNER = "its class has changed: keep what is to change in an attribute"
OF_SCRIPT = "an attribute of a scripted network: make it a buffer, or an attribute of the model"
OF_CLASS = (
    "an attribute of a class, which no checkpoint can hold: make it an attribute of the instance"
)

_ITERATOR = (
    "an iterator, whose position is unknown: count in an attribute, and create the iterator in "
    "setup() or on_training_resume()"
)
_GENERATOR = (
    "a random number generator that cannot be restored there: keep it in an attribute, or in a "
    "list or dict that setup() fills"
)


def without_state(part: Any) -> str:
    """Return why an object without a ``state_dict`` cannot be saved, and the remedy."""
    if is_generator(part):
        return _GENERATOR
    if isinstance(part, Iterator):
        return _ITERATOR
    name = type_name(type(part)).removeprefix("builtins.")
    if isinstance(part, _CODE):
        return (
            f"{name} has no state_dict: keep the name of the chosen object in an attribute, and "
            "look it up by that name"
        )
    if isinstance(part, _DATA):
        return f"{name} has no state_dict: create it in setup(), or at each start in a start event"
    return (
        f"{name} has no state_dict: give it state_dict() and load_state_dict(), and create it in "
        "setup()"
    )
