"""``helios doctor``: what of this machine matters to reproducibility, and what is wrong with it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import helios.reports.doctor as machine
from helios.cli import output
from helios.cli.output import Answer, Command, argument
from helios.reports.doctor import Diagnosis, Severity
from helios.storage.local_paths import as_local_path
from helios.text import size_text


def examine_here(namespace: argparse.Namespace) -> Answer:
    """Show what of this machine changes the bits of a training, and what is wrong with
    it: versions, processor and threads, GPUs, environment variables, the settings
    of PyTorch, shared memory, the clock, and whether files in a folder can be
    synced, renamed and locked. Each finding has a remedy. The settings are those of
    a new process; a script may change them.

    Exit code 0: nothing is wrong, there may be notes. 1: something is wrong.
    2: Helios cannot be used here.
    """
    folder = as_local_path("DIR", namespace.folder)
    if folder.exists():
        folder = output.existing_folder(namespace.folder)
    found = machine.examine_machine(folder)
    shown = [*output.facts(dict(_show_facts(found.facts))), ""] if found.facts else []
    return Answer([*shown, *_lines(found.findings)], found.as_dict, lambda: found.exit_code)


def _show_facts(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    system, switches, folder = facts["system"], facts["switches"], facts["folder"]
    shown = ("helios", "python_build", "torch", "numpy")
    yield "versions", ", ".join(f"{name} {facts['versions'][name]}" for name in shown)
    yield "system", f"{system['os']} {system['kernel']}, {system['architecture']}"
    yield "processor", f"{system.get('cpu', 'unknown')}, {system['cores']} cores"
    yield "kernels", f"{system['capability']}, {facts['blas'] or 'unknown'} BLAS"
    yield "flags", system.get("cpu_flags", "")
    yield "threads", f"{switches['threads']}, interop {switches['interop_threads']}"
    yield from _gpu_facts(facts["gpu"])
    yield "switches", _pairs(switches)
    yield "environment", _pairs(facts["environment"]) or "no variable that changes numbers"
    if facts["shared_memory"] is not None:
        yield "/dev/shm", size_text(facts["shared_memory"])
    kind = folder["file_system"] or "unknown file system"
    yield "folder", f"{folder['path']} ({kind}), {size_text(folder['free'])} free"


def _gpu_facts(gpu: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "gpu", ", ".join(gpu.get("devices", ())) or "none"
    names = [name for name in ("cuda", "hip", "cudnn", "nccl", "driver") if name in gpu]
    if names:
        yield "gpu versions", ", ".join(f"{name} {gpu[name]}" for name in names)


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _lines(findings: list[Diagnosis]) -> Iterator[str]:
    for finding in findings:
        yield f"{finding.severity.value}: {finding.text}"
        yield f"  {finding.remedy}"
    count = sum(finding.severity is not Severity.NOTE for finding in findings)
    yield f"{count} wrong" if count else "no problems found"


COMMANDS = {
    "doctor": Command(
        examine_here,
        argument(
            "folder",
            metavar="DIR",
            nargs="?",
            default=".",
            help="folder of a run, or chkpt_root; files are tried in it, and removed (default: .)",
        ),
    )
}
