"""One call of a trainer, as plain data: what travels to every process that carries it out.

A process carries out one call at a time: loggers, generators and signals are there once.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from helios.checkpoint.capture import Trained
from helios.data.datamodule import DataModule
from helios.distributed.process_groups import DistributedInfo
from helios.errors import UsageError
from helios.launch.ipc import LaunchQueue
from helios.loops.loop import Loop
from helios.model.model import Model
from helios.session import Session
from helios.startup.options.plugin_table import PluginTable
from helios.startup.options.root_loops import Roots
from helios.startup.options.trainer_options import TrainerOptions
from helios.startup.runs.signal_policy import Listener
from helios.state import Phase


class _Running:
    """The call that each process carries out: what is forked from it has begun none."""

    calls: ClassVar[dict[int, object]] = {}


@contextmanager
def only_call() -> Iterator[None]:
    """Carry out a call in the block; to be entered before anything of the call is done.

    Raises:
        UsageError: if this process carries out one already, of whatever trainer and in whatever
            thread; that one is not disturbed.
    """
    own, pid = object(), os.getpid()
    # One step, so that of two threads that begin at once one is refused.
    if _Running.calls.setdefault(pid, own) is not own:
        raise UsageError(
            "A process must run one call at a time, but fit, validate, test or predict was called "
            "while another one runs in it: inside of a hook, or in another thread. Set "
            "valid_frequency to validate inside of fit, wait until the first one has ended, or "
            "start a process for the second one."
        )
    try:
        yield
    finally:
        del _Running.calls[pid]


class Footprint:
    """What a setup in the launcher has put into the attributes of objects.

    Ranks run ``setup`` themselves, so it is not handed to them: it may be large, and often cannot
    be pickled. What somebody has assigned since then stays.
    """

    def __init__(self) -> None:
        self._before: dict[int, dict[str, Any]] = {}
        self._after: dict[int, dict[str, Any]] = {}

    @contextmanager
    def taking(self, owners: list[Any]) -> Iterator[None]:
        """Note what the block makes of the owners' attributes."""
        before = {id(owner): self._without(owner) for owner in owners}
        try:
            yield
        finally:
            self._before = before
            self._after = {id(owner): dict(vars(owner)) for owner in owners}

    @contextmanager
    def removed(self, owners: list[Any]) -> Iterator[None]:
        """Take off, for a block, what setup has put there."""
        present = [(owner, dict(vars(owner))) for owner in owners]
        try:
            for owner in owners:
                _replace(owner, self._without(owner))
            yield
        finally:
            for owner, attributes in present:
                _replace(owner, attributes)

    def _without(self, owner: Any) -> dict[str, Any]:
        attributes = dict(vars(owner))
        before, after = self._before.get(id(owner), {}), self._after.get(id(owner), {})
        for name, made in after.items():
            if name in attributes and attributes[name] is made:
                del attributes[name]
                if name in before:
                    attributes[name] = before[name]
        return attributes


def _replace(owner: Any, attributes: dict[str, Any]) -> None:
    vars(owner).clear()
    vars(owner).update(attributes)


@dataclasses.dataclass
class Standing:
    """Where a trainer stands; what of it is of this process only is not handed to others.

    Attributes:
        info: the place of this process among all that carry out the present call, or the last one.
        session: the run, while there is one.
        queue: takes in what spawned ranks send; ``None`` before there were any.
        fitted_model: the model that was trained last.
        footprint: what setup has made in the launcher.
        listener: knows of the signals that have come during the present call of fit.
    """

    info: DistributedInfo = dataclasses.field(default_factory=DistributedInfo)
    session: Session | None = None
    queue: LaunchQueue | None = None
    fitted_model: Model | None = None
    footprint: Footprint = dataclasses.field(default_factory=Footprint)
    listener: Listener = dataclasses.field(default_factory=Listener)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a rank gets."""
        fresh = Standing(info=self.info)
        return vars(fresh) | {"queue": self.queue}


@dataclasses.dataclass
class Call:
    """One call of fit, validate, test or predict.

    Attributes:
        phase: what is asked for; ``Phase.TRAINING`` for fit.
        options: those of the trainer.
        plugins: by id.
        roots: the loops.
        model: the user's model.
        datamodule: the user's data.
        standing: where the trainer stands.
        passed_through: types of exceptions that are not logged.
        is_trained: whether this trainer has just trained the model, in this process.
        handed: the state of a trained model, for ranks that set it up anew.
    """

    phase: Phase
    options: TrainerOptions
    plugins: PluginTable
    roots: Roots
    model: Model
    datamodule: DataModule
    standing: Standing
    passed_through: tuple[type[BaseException], ...] = ()
    is_trained: bool = dataclasses.field(init=False)
    handed: Trained | None = None

    def __post_init__(self) -> None:
        is_evaluation = self.phase is not Phase.TRAINING
        self.is_trained = is_evaluation and self.standing.fitted_model is self.model

    @property
    def loop(self) -> Loop:
        """The loop that carries it out."""
        is_fit = self.phase is Phase.TRAINING
        return self.roots.fit if is_fit else self.roots.evaluations[self.phase]

    @property
    def owners(self) -> list[Any]:
        """The user's objects that are set up."""
        return [*self.plugins.values(), self.datamodule, self.model]

    def show(self, session: Session | None) -> None:
        """Let the trainer know the run."""
        self.standing.session = session
