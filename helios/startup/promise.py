"""The level of reproducibility that a run reaches, and what stands in the way of the next one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from helios.checkpoint.record import Record
from helios.data.source import Source
from helios.engines.engine import Engine
from helios.engines.replicated import Replicas
from helios.errors import UsageError
from helios.loops.loop import Loop
from helios.loops.yielding import YieldLoop
from helios.model.model import Model
from helios.startup.arguments import Arguments

_MANUAL = "train_step returns None, and so steps by itself"


@dataclass(frozen=True)
class Promise:
    """What may change between the start and the resumed run without changing a bit.

    Attributes:
        level: its name (DESIGN section 1).
        text: what stands in the way of the next level.
    """

    level: str
    text: str

    def level_after(self, record: Record) -> str:
        """Return the level, lowered by what the training has found until a checkpoint."""
        is_bound = record.obstacles or record.is_manual
        return "restart" if is_bound and self.level == "elastic" else self.level


def find_promise(
    arguments: Arguments,
    engine: Engine,
    source: Source,
    *,
    model: Model,
    loop: Loop,
    record: Record | None,
) -> Promise:
    """Find the level that a training reaches.

    Args:
        arguments: the options of the trainer.
        engine: with the replicas of the run.
        source: the training data.
        model: after its setup.
        loop: the root of all loops.
        record: the checkpoint that the run goes on from, if there is one.

    Raises:
        UsageError: if the run needs a process for each replica and has fewer.
    """
    bound = list(_find_bound(engine.replicas, model, loop, record))
    if source.level == "none":
        return Promise("none", "the training loader can neither seek nor be saved")
    if engine.device.type != "cpu" and not arguments.enable_deterministic:
        return Promise("order", "enable_deterministic=True makes arithmetic exact on this device")
    if source.level == "restart":
        return Promise("restart", "the training loader has a state or a split of its own")
    if engine.replicas.is_lone:
        return Promise("restart", "one replica: there is nothing to spread over processes")
    if bound:
        return Promise("restart", "; ".join(bound))
    return Promise("elastic", "any number of processes, up to the number of replicas")


def _find_bound(
    replicas: Replicas, model: Model, loop: Loop, record: Record | None
) -> Iterator[str]:
    """Yield what binds a run of several replicas to its number of processes."""
    if replicas.is_lone:
        return
    if record is not None and record.is_manual:
        _check_one_each(replicas, f"{_MANUAL}, which", "Return the loss")
        yield _MANUAL
    if any(isinstance(part, YieldLoop) for part in _all_loops(loop)):
        _check_one_each(replicas, "A YieldLoop", "Use one optimizer without it")
        yield "a YieldLoop needs a process for each replica"
    names = list(_find_sync_batch_norms(model))
    if names:
        _check_one_each(replicas, f"SyncBatchNorm ({', '.join(names)})", "Use BatchNorm")
        yield f"SyncBatchNorm ({', '.join(names)}) adds in an order of its own"
    if record is not None:
        yield from record.obstacles


def _check_one_each(replicas: Replicas, what: str, remedy: str) -> None:
    if not replicas.has_one_each:
        raise UsageError(
            f"{what} needs a process for each replica, but {replicas.num_processes} carry "
            f"{replicas.num_replicas}. Start {replicas.num_replicas} processes, by "
            f"Trainer(nproc={replicas.num_replicas}) or by torchrun. {remedy} to train on fewer."
        )


def _all_loops(loop: Loop) -> Iterator[Loop]:
    yield loop
    for child in loop.children().values():
        yield from _all_loops(child)


def _find_sync_batch_norms(model: Model) -> Iterator[str]:
    for path, network in model.discovery.modules().items():
        for name, module in network.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                yield f"{path}.{name}".rstrip(".")
