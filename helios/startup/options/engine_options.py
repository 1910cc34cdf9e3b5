"""Options of the engine: device, precision, clipping, determinism, and numbers of processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from helios.core.moved import explain
from helios.engines.device import select_gpus
from helios.engines.engine import Engine
from helios.engines.precision import Precision
from helios.errors import ArgumentError
from helios.startup.options.validators import check_flags, check_positive, refusal


@dataclass(frozen=True)
class NumericsOptions:
    """How exact the arithmetic is; see ``Trainer`` for the meaning of each field."""

    enable_deterministic: bool
    enable_cudnn_benchmark: bool

    def __post_init__(self) -> None:
        check_flags(
            enable_cudnn_benchmark=self.enable_cudnn_benchmark,
            enable_deterministic=self.enable_deterministic,
        )
        if self.enable_deterministic and self.enable_cudnn_benchmark:
            rule = "False with enable_deterministic=True"
            remedy = "Benchmarking chooses at random."
            raise refusal("enable_cudnn_benchmark", rule, True, remedy)


@dataclass(frozen=True)
class EngineOptions:
    """The user's engine, or the options to create one; see ``Trainer`` for each field.

    Attributes:
        precision: a ``Precision`` once checked, if any.
        gpu_ids: ids of the GPUs to use; empty on the CPU.
    """

    engine: Engine | None
    use_cpu: bool | None
    gpus: list[int] | None
    precision: Any
    clip_norm: float | None
    clip_value: float | None
    gpu_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        check_positive("clip_norm", self.clip_norm)
        check_positive("clip_value", self.clip_value)
        if self.clip_norm is not None and self.clip_value is not None:
            rule = "None if clip_norm is set"
            raise refusal("clip_value", rule, self.clip_value, "Set only one of them.")
        if self.use_cpu is not None and not isinstance(self.use_cpu, bool):
            raise refusal("use_cpu", "True, False or None", self.use_cpu, "Pass a bool or None.")
        object.__setattr__(self, "precision", _as_precision(self.precision))
        object.__setattr__(self, "gpu_ids", self._select_gpus())

    def _select_gpus(self) -> list[int]:
        if self.engine is None:
            return select_gpus(self.use_cpu, self.gpus)
        if not isinstance(self.engine, Engine):
            remedy = "Derive it from helios.Engine."
            if isinstance(self.engine, str):
                remedy = explain(self.engine)
            raise refusal("engine", "an Engine", self.engine, remedy)
        for name in ("use_cpu", "gpus", "clip_norm", "clip_value", "precision"):
            if getattr(self, name) is not None:
                rule = "None if engine is given"
                raise refusal(name, rule, getattr(self, name), "Configure the engine instead.")
        device = self.engine.device
        return [device.index or 0] if device.type == "cuda" else []


def _as_precision(value: object) -> Precision | None:
    if isinstance(value, str):
        try:
            return Precision.from_str(value)
        except ArgumentError as error:
            rule = "None or the name of a precision"
            raise refusal("precision", rule, value, str(error)) from error
    if value is not None and not isinstance(value, Precision):
        rule = "None, a Precision or the name of one"
        raise refusal("precision", rule, value, 'Pass e.g. "bf16".')
    return value


@dataclass(frozen=True)
class ProcessOptions:
    """How many processes run how many replicas; see ``Trainer`` for the meaning of each field."""

    num_replicas: int | None
    nproc: int | None
    sharding: str = "none"

    def __post_init__(self) -> None:
        if self.sharding not in ("none", "full"):
            raise refusal("sharding", '"none" or "full"', self.sharding, "Pass one of them.")
        for name in ("num_replicas", "nproc"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                remedy = "Omit it to have one per GPU, or one on the CPU."
                raise refusal(name, "None or a positive int", value, remedy)
        count = self.nproc or 1
        if self.num_replicas is not None and count > self.num_replicas:
            rule = f"at most num_replicas={self.num_replicas}: a process runs at least one replica"
            raise refusal("nproc", rule, count, "Raise num_replicas, or start fewer processes.")
