"""The whole examination: facts, as the manifest of a run has them, and findings."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from helios.doctor.diagnosis import Diagnosis, Severity
from helios.doctor.folder_checks import examine_run_folder
from helios.doctor.hardware_checks import check_cpu, check_gpus, check_shared_memory
from helios.doctor.software_checks import check_variables, check_versions
from helios.ledger.manifest.environment import (
    describe_environment,
    describe_switches,
    describe_variables,
)

_SHARED = Path("/dev/shm")
_DRIVER = Path("/proc/driver/nvidia/version")
# No file of Helios can be older than this.
_EARLIEST = datetime(2026, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Examination:
    """What is known of a machine.

    Attributes:
        facts: by topic, as in the manifest of a run; besides ``switches``, ``blas``, ``folder``
            and ``shared_memory``.
        findings: what is to be said of it, the most serious first.
    """

    facts: dict[str, Any]
    findings: list[Diagnosis]

    @property
    def exit_code(self) -> int:
        """0 if nothing is wrong, 1 if something is, 2 if Helios cannot be used."""
        return max((each.severity.exit_code for each in self.findings), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Return the examination as plain values."""
        findings = [each.as_dict() for each in self.findings]
        return {"is_good": self.exit_code == 0, "findings": findings, **self.facts}


def examine_machine(folder: Path) -> Examination:
    """Examine the machine, and a folder for runs.

    Args:
        folder: the folder of a run, or ``chkpt_root``; need not exist.
    """
    failure = _initialize_gpus()
    now = datetime.now(timezone.utc)
    place = examine_run_folder(folder.absolute(), now)
    shared = shutil.disk_usage(_SHARED).total if _SHARED.is_dir() else None
    facts = {
        **describe_environment(sys.modules),
        "environment": describe_variables(),
        "switches": describe_switches(),
        "blas": _find_blas(torch.__config__.show()),
        "shared_memory": shared,
        "folder": place.facts,
    }
    findings = [
        *check_versions(facts["versions"]),
        *check_variables(facts["environment"], has_gpu=bool(facts["gpu"])),
        *check_cpu(facts["system"], facts["switches"]),
        *check_gpus(facts["gpu"], facts["switches"], has_driver=_DRIVER.is_file(), failure=failure),
        *check_shared_memory(shared),
        *check_clock(now),
        *place.findings,
    ]
    findings.sort(key=lambda each: -each.severity.exit_code)
    return Examination(facts, findings)


def check_clock(now: datetime) -> Iterator[Diagnosis]:
    """Check that the clock is set.

    Args:
        now: the time of the system's clock.
    """
    if now < _EARLIEST:
        yield Diagnosis(
            "clock",
            Severity.WRONG,
            f"The clock says {now:%Y-%m-%d}, which cannot be.",
            "Set it, or start a time service: logs and lineages hold its times.",
        )


def _initialize_gpus() -> str:
    """Initialize the GPUs, without which nothing is known of them; returns why that failed."""
    if not torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error).partition("\n")[0].rstrip(".")
    return ""


def _find_blas(build: str) -> str:
    """Return the library for linear algebra, from the text of PyTorch's build."""
    found = re.search(r"BLAS_INFO=(\w+)", build)
    return found.group(1) if found is not None else ""
