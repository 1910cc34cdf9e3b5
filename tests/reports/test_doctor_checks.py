"""What is wrong with versions, variables, processors and GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone

import pytest

from helios.reports.doctor import (
    NEWEST_TORCH,
    OLDEST_TORCH,
    Diagnosis,
    Severity,
    check_clock,
    check_cpu,
    check_gpus,
    check_shared_memory,
    check_variables,
    check_versions,
)
from tests.codebase import ROOT

SYSTEM = {"architecture": "x86_64", "cores": 4, "cpu_flags": "avx avx2 fma"}
H100 = {
    "devices": ["NVIDIA H100", "NVIDIA H100"],
    "capability": [[9, 0], [9, 0]],
    "cuda": "13.0",
    "cudnn": "91000",
    "nccl": "2.27",
}


def severities(findings: Iterable[Diagnosis]) -> list[str]:
    found = list(findings)
    assert all(each.text.endswith(".") and each.remedy for each in found)
    return [each.severity.value for each in found]


@pytest.mark.shows("P75")
@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.5.1", ["unusable"]),
        ("2.6.0+cu124", []),
        ("2.13.2+cpu", []),
        ("2.14.0.dev20270101", ["wrong"]),
        ("3.0.0", ["wrong"]),
        ("2.x-mine", ["wrong"]),
    ],
)
def test_other_versions_than_the_tested_ones_are_named(version: str, expected: list[str]) -> None:
    assert severities(check_versions({"torch": version})) == expected


def test_the_tested_versions_are_those_of_the_project() -> None:
    assert f'"torch>={OLDEST_TORCH}"' in (ROOT / "pyproject.toml").read_text("utf-8")
    script = (ROOT / "scripts" / "test_torch").read_text("utf-8")
    assert f"for version in {OLDEST_TORCH}.0 newest;" in script
    assert f"\ntorch=={NEWEST_TORCH}." in (ROOT / "constraints.txt").read_text("utf-8")


@pytest.mark.shows("P75")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, []),
        ({"NVIDIA_TF32_OVERRIDE": "1"}, ["wrong"]),
        ({"NVIDIA_TF32_OVERRIDE": "0"}, []),
        ({"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, ["wrong"]),
        ({"OMP_DYNAMIC": "TRUE"}, ["wrong"]),
        ({"OMP_DYNAMIC": "false", "OMP_NUM_THREADS": "3"}, []),
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, ["wrong"]),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, []),
        ({"ATEN_CPU_CAPABILITY": "default"}, ["note"]),
        ({"PYTHONOPTIMIZE": "1"}, ["note"]),
        ({"PYTHONHASHSEED": "random"}, ["note"]),
    ],
)
def test_variables_that_change_numbers_are_named(
    variables: dict[str, str], expected: list[str]
) -> None:
    given = {"PYTHONHASHSEED": "0"} | variables
    assert severities(check_variables(given, has_gpu=True)) == expected


def test_tf32_of_variables_matters_on_a_gpu_only() -> None:
    given = {"PYTHONHASHSEED": "0", "NVIDIA_TF32_OVERRIDE": "1"}
    assert severities(check_variables(given, has_gpu=False)) == []


@pytest.mark.shows("P75")
def test_more_threads_than_cores_are_wrong() -> None:
    assert severities(check_cpu(SYSTEM, {"threads": 4})) == []
    [found] = check_cpu(SYSTEM, {"threads": 5})
    assert found.severity is Severity.WRONG
    assert "OMP_NUM_THREADS=4" in found.remedy


def test_a_processor_with_other_bits_is_noted() -> None:
    old = SYSTEM | {"cpu_flags": "avx sse4_2"}
    assert severities(check_cpu(old, {"threads": 1})) == ["note"]
    assert severities(check_cpu(SYSTEM, {"threads": 1, "flush_denormal": True})) == ["note"]
    arm = {"architecture": "arm64", "cores": 8}
    assert severities(check_cpu(arm, {"threads": 8})) == []


@pytest.mark.shows("P75")
@pytest.mark.parametrize(
    ("gpu", "switches", "expected"),
    [
        ({}, {}, []),
        (H100, {}, []),
        (H100, {"cudnn_tf32": True, "matmul_tf32": False}, ["note"]),
        (H100 | {"capability": [[7, 0], [7, 0]]}, {"cudnn_tf32": True}, []),
        (H100 | {"devices": ["NVIDIA H100", "NVIDIA A100"]}, {}, ["wrong"]),
        ({name: H100[name] for name in ("devices", "capability", "cudnn")}, {}, ["wrong"]),
        ({name: H100[name] for name in ("devices", "capability", "nccl")}, {}, ["note"]),
    ],
)
def test_gpus(gpu: dict[str, object], switches: dict[str, object], expected: list[str]) -> None:
    found = check_gpus(gpu, switches, has_driver=bool(gpu), failure="")
    assert severities(found) == expected


@pytest.mark.shows("P75")
def test_a_gpu_that_cannot_be_used_is_wrong() -> None:
    [found] = check_gpus({}, {}, has_driver=True, failure="the driver is too old")
    assert (found.severity, "driver is too old" in found.text) == (Severity.WRONG, True)
    assert severities(check_gpus({}, {}, has_driver=True, failure="")) == ["note"]


@pytest.mark.shows("P75")
def test_little_shared_memory_is_wrong() -> None:
    assert severities(check_shared_memory(64 << 20)) == ["wrong"]
    assert severities(check_shared_memory(8 << 30)) == []
    assert severities(check_shared_memory(None)) == []


@pytest.mark.shows("P75")
def test_a_clock_that_was_never_set_is_wrong() -> None:
    assert severities(check_clock(datetime(1970, 1, 1, tzinfo=timezone.utc))) == ["wrong"]
    assert severities(check_clock(datetime(2027, 1, 1, tzinfo=timezone.utc))) == []
