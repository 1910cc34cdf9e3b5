"""``helios doctor``: what a report of a bug needs of this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from helios.cli import output
from helios.cli.output import Answer, Command


def describe_machine(_: argparse.Namespace) -> Answer:
    """Show the versions, the devices and the settings that affect results, as a new
    process has them; a script may change them. Paste the output into bug reports.

    Exit code 0. 2: PyTorch cannot be imported.
    """
    # Only a command that is used may import PyTorch.
    import torch

    from helios.ledger.environment import (
        describe_environment,
        describe_switches,
        describe_variables,
    )

    failure = ""
    if torch.cuda.is_available():
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            failure = str(error).partition("\n")[0]
    facts = {
        **describe_environment(sys.modules),
        "environment": describe_variables(),
        "switches": describe_switches(),
    }
    lines = output.facts(dict(_list_facts(facts, failure)))
    return Answer(lines, lambda: {**facts, "gpu_failure": failure})


def _list_facts(facts: Mapping[str, Any], failure: str) -> Iterator[tuple[str, str]]:
    system, gpu = facts["system"], facts["gpu"]
    shown = ("helios", "python_build", "torch", "numpy")
    yield "versions", ", ".join(f"{name} {facts['versions'][name]}" for name in shown)
    yield "system", f"{system['os']} {system['kernel']}, {system['architecture']}"
    yield "processor", f"{system.get('cpu', 'unknown')}, {system['cores']} cores"
    yield "kernels", system["capability"]
    yield "gpu", ", ".join(gpu.get("devices", ())) or failure or "none"
    names = [name for name in ("cuda", "hip", "cudnn", "nccl", "driver") if name in gpu]
    if names:
        yield "gpu versions", ", ".join(f"{name} {gpu[name]}" for name in names)
    yield "settings", _pairs(facts["switches"])
    yield "environment", _pairs(facts["environment"]) or "no variable that affects results"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


COMMANDS = {"doctor": Command(describe_machine)}
