"""Facts of a start that are known without searching: the command, the options, the program."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from helios.data.source import Source
from helios.launch.launcher import Launch
from helios.ledger.environment import describe_switches
from helios.ledger.scrubbing import scrub, scrub_arguments
from helios.ledger.source_files import find_script_folder
from helios.startup.launching.trainer_call import Call
from helios.startup.options.trainer_options import TrainerOptions
from helios.storage.user_types import type_name


def manifest_facts(call: Call, source: Source | None) -> dict[str, Any]:
    """Return what is known of a start, by topic of the manifest.

    Args:
        call: the call of fit, after the setup of the model.
        source: the training data; ``None`` if it is not opened.
    """
    options, model = call.options, call.model
    return {
        "command": _describe_command(call.words),
        "program": {
            "model": type_name(type(model)),
            "datamodule": type_name(type(call.datamodule)),
            "plugins": {name: type_name(type(each)) for name, each in call.plugins.items()},
        },
        "options": _describe_options(options),
        "switches": describe_switches(),
        "seeds": {"random_seed": options.run.seed, **options.run.seeds},
        **({} if source is None else {"data": _as_plain(source.description)}),
        "parameters": {
            path: _count_parameters(network) for path, network in model.discovery.modules().items()
        },
    }


def _as_plain(value: Any) -> Any:
    """Return a value as JSON has it: without ``None`` in tables, and objects as their types."""
    if isinstance(value, Enum):
        return value.name.lower()
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, float):
        # JSON has no infinities.
        return value if abs(value) < float("inf") else repr(value)
    if isinstance(value, Path):
        return scrub(str(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _as_plain(
            {
                each.name: getattr(value, each.name)
                for each in dataclasses.fields(value)
                if each.init
            }
        )
    if isinstance(value, Mapping):
        pairs = ((_as_plain(name), _as_plain(each)) for name, each in value.items())
        return {str(name): each for name, each in pairs if each is not None}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes):
        return [_as_plain(each) for each in value]
    return type_name(type(value))


def describe_topic(topic: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat table as a topic, if there is anything in it."""
    # No fact is None: it would stand for what was removed.
    known = {name: "None" if value is None else value for name, value in values.items()}
    return {topic: _as_plain(known)} if known else {}


def _describe_options(options: TrainerOptions) -> dict[str, Any]:
    """Return every option of a trainer as resolved, by name."""
    # Both are arguments of the trainer themselves; the other groups consist of such.
    arguments = ("signals", "audit")
    found: dict[str, Any] = {}
    for group in dataclasses.fields(options):
        value = _as_plain(getattr(options, group.name))
        found |= {group.name: value} if group.name in arguments else value
    # They are a topic of their own.
    del found["params"]
    found |= {"train_unit": found.pop("unit"), "gpus": options.engine.gpu_ids}
    return {name: value for name, value in found.items() if value is not None}


def _describe_command(words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "script": scrub(sys.argv[0]),
        "script_folder": scrub(str(find_script_folder())),
        "arguments": scrub_arguments(sys.argv[1:]),
        "python": scrub(sys.executable),
        "folder": scrub(str(Path.cwd())),
    }
    if words:
        found["words"] = scrub_arguments(words)
    if sys.flags.optimize:
        found["optimize"] = sys.flags.optimize
    launch = Launch.read()
    if launch.is_external:
        found |= {"launcher": launch.kind.value, "processes_here": launch.local_world_size}
    spec = vars(sys.modules["__main__"]).get("__spec__")
    # python -m package.module; a rank that was started by the script has its name, too.
    return found if spec is None else found | {"module": spec.name.removesuffix(".__main__")}


def _count_parameters(network: nn.Module) -> dict[str, int]:
    """Return how many elements a network's parameters have; lazy ones have none yet."""
    present = [each for each in network.parameters() if not is_lazy(each)]
    return {
        "all": sum(each.numel() for each in present),
        "trainable": sum(each.numel() for each in present if each.requires_grad),
    }
