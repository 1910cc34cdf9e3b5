"""Versions and environment variables: pure functions of what the manifest of a run holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packaging.version import InvalidVersion, Version

from helios.doctor.diagnosis import Diagnosis, Severity

OLDEST_TORCH, NEWEST_TORCH = "2.6", "2.13"
"""The versions of PyTorch that the tests ran with: the oldest and the newest."""

_YES = frozenset(("1", "true", "yes", "on"))
_CUBLAS_VALUES = (":4096:8", ":16:8")
# Variables that change numbers whatever a script sets, each with what it does.
_FORCES_TF32 = {
    "NVIDIA_TF32_OVERRIDE": "matrix products and convolutions",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "matrix products",
}
_CHOOSES_KERNELS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def check_versions(versions: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Check whether the tests ran with this version of PyTorch.

    Args:
        versions: the topic ``versions`` of a manifest.
    """
    text = versions["torch"]
    try:
        release = Version(text).release[:2]
    except InvalidVersion:
        release = ()
    if release and release < Version(OLDEST_TORCH).release:
        yield Diagnosis(
            "versions",
            Severity.UNUSABLE,
            f"PyTorch {text} is older than {OLDEST_TORCH}, which Helios needs.",
            f'Install a newer one: pip install "torch>={OLDEST_TORCH}".',
        )
    elif not release or release > Version(NEWEST_TORCH).release:
        yield Diagnosis(
            "versions",
            Severity.WRONG,
            f"Helios was not tested with PyTorch {text}, but up to {NEWEST_TORCH}.",
            "Repeat a part of a run with `helios replay` before you rely on equal bits, or "
            f'install a tested version: pip install "torch=={NEWEST_TORCH}.*".',
        )


def check_variables(variables: Mapping[str, str], *, has_gpu: bool) -> Iterator[Diagnosis]:
    """Check the environment variables that change numbers.

    Args:
        variables: the topic ``environment`` of a manifest.
        has_gpu: whether there is a GPU.
    """
    for name, what in _FORCES_TF32.items():
        if has_gpu and _is_on(variables, name):
            yield _variable(
                Severity.WRONG,
                f"{name}={variables[name]} forces TF32 in {what}, whatever the script sets.",
                f"Unset {name}, and choose TF32 in the script if you want it.",
            )
    if _is_on(variables, "OMP_DYNAMIC"):
        yield _variable(
            Severity.WRONG,
            "OMP_DYNAMIC lets the number of threads change during a run, which changes bits.",
            "Unset OMP_DYNAMIC.",
        )
    workspace = variables.get("CUBLAS_WORKSPACE_CONFIG")
    if workspace is not None and workspace not in _CUBLAS_VALUES:
        yield _variable(
            Severity.WRONG,
            f"CUBLAS_WORKSPACE_CONFIG={workspace} does not make cuBLAS deterministic.",
            f"Set it to {' or '.join(_CUBLAS_VALUES)}, or unset it: Helios then sets it itself.",
        )
    yield from _note_variables(variables)


def _note_variables(variables: Mapping[str, str]) -> Iterator[Diagnosis]:
    for name in _CHOOSES_KERNELS:
        if name in variables:
            yield _variable(
                Severity.NOTE,
                f"{name}={variables[name]} chooses the kernels of the processor.",
                "Set it to the same value at each start of a run: other kernels give other bits.",
            )
    if variables.get("PYTHONHASHSEED", "random") == "random":
        yield _variable(
            Severity.NOTE,
            "PYTHONHASHSEED is not set, so sets of strings have another order at each start.",
            "Sort them where your code iterates over one, or set PYTHONHASHSEED=0.",
        )
    if "PYTHONOPTIMIZE" in variables:
        yield _variable(
            Severity.NOTE,
            f"PYTHONOPTIMIZE={variables['PYTHONOPTIMIZE']} removes the assertions of your code.",
            "Unset it, unless you mean it.",
        )


def _is_on(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "").lower() in _YES


def _variable(severity: Severity, text: str, remedy: str) -> Diagnosis:
    return Diagnosis("environment", severity, text, remedy)
