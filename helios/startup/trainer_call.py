"""One call of a trainer, as plain data that is sent to every process that runs it.

A process runs one call at a time, because it has only one set of loggers, generators and signals. A
call may be asked for by ``helios replay``, which runs the script of the user.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from helios.checkpoint import file_names
from helios.checkpoint.capture import Trained
from helios.core.signal_watch import TRY_AGAIN
from helios.counters import Phase
from helios.data.datamodule import DataModule
from helios.distributed.process_groups import DistributedInfo
from helios.errors import UsageError
from helios.ledger.compare import Replay
from helios.loops.loop import Loop
from helios.model.model import Model
from helios.session import Session
from helios.startup.checkpoint_search import (
    CheckpointChoice,
    Choice,
    choose_checkpoint,
)
from helios.startup.model_in_hand import ModelInHand
from helios.startup.objects import PluginTable, Roots
from helios.startup.replay_range import ReplayOptions, ReplayRange, find_range
from helios.startup.signal_policy import Listener, Signals, find_signal_code
from helios.startup.trainer_options import Options


class _Running:
    """The call that this process runs; a forked child has none."""

    calls: ClassVar[dict[int, object]] = {}


@contextmanager
def only_call() -> Iterator[None]:
    """Run a call in the block; enter it before any part of the call is done.

    Raises:
        UsageError: if this process runs a call already, of any trainer and in any thread; that one
            is not affected.
    """
    own, pid = object(), os.getpid()
    # One step, so that of two threads that start at once one is refused.
    if _Running.calls.setdefault(pid, own) is not own:
        raise UsageError(
            "A process must run one call at a time, but fit, validate, test or predict was called "
            "while another one is running: inside a hook, or in another thread. Set "
            "valid_frequency to validate inside fit, wait until the first call has ended, or "
            "start a process for the second one."
        )
    try:
        yield
    finally:
        del _Running.calls[pid]


class Footprint:
    """The attributes that a setup in the launcher has assigned to objects.

    Ranks run ``setup`` themselves, so these are not sent to them: they may be large, and often
    cannot be pickled. Attributes that were assigned since then are kept.
    """

    def __init__(self) -> None:
        self._before: dict[int, dict[str, Any]] = {}
        self._after: dict[int, dict[str, Any]] = {}

    @contextmanager
    def taking(self, owners: list[Any]) -> Iterator[None]:
        """Record which attributes of the owners the block assigns."""
        before = {id(owner): self._without(owner) for owner in owners}
        try:
            yield
        finally:
            self._before = before
            self._after = {id(owner): dict(vars(owner)) for owner in owners}

    @contextmanager
    def removed(self, owners: list[Any]) -> Iterator[None]:
        """Remove the attributes that setup has assigned, for a block."""
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
class RuntimeState:
    """The runtime state of a trainer; parts that belong to this process are not sent to others.

    Attributes:
        info: the rank of this process in the current call, or the last one.
        session: the run, while there is one.
        queue: receives what spawned ranks send; ``None`` before there were any.
        in_hand: the model that ``fit`` has trained last; ``None`` before, and after an error.
        footprint: what setup has assigned in the launcher.
        listener: the signals received during the current call.
    """

    info: DistributedInfo = dataclasses.field(default_factory=DistributedInfo)
    session: Session | None = None
    queue: Any = None
    in_hand: ModelInHand | None = None
    footprint: Footprint = dataclasses.field(default_factory=Footprint)
    listener: Listener = dataclasses.field(default_factory=Listener)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a rank."""
        return vars(RuntimeState(info=self.info))


@dataclasses.dataclass
class Call:
    """One call of fit, validate, test or predict.

    Attributes:
        phase: what to do; ``Phase.TRAINING`` for fit.
        options: options of the trainer.
        plugins: by id.
        roots: the loops.
        model: the user's model.
        datamodule: the user's data.
        runtime: the runtime state of the trainer.
        passed_through: types of exceptions that are not logged.
        asked: what a replay is to repeat; ``None`` for other calls.
        is_in_hand: whether the model is evaluated as it is in this process, after ``fit``.
        reason_to_load: why it is not, if no checkpoint was asked for; empty for other models.
        handed: the state of a trained model, for ranks that set it up again.
        replay: the part of a run that is only repeated, once it is found; ``None`` to train.
        torch_seed: what PyTorch was seeded with when the trainer was called.
        checkpoint: the checkpoint that an evaluation was asked to load.
        choice: what that means.
    """

    phase: Phase
    options: Options
    plugins: PluginTable
    roots: Roots
    model: Model
    datamodule: DataModule
    runtime: RuntimeState
    passed_through: tuple[type[BaseException], ...] = ()
    asked: ReplayOptions | None = None
    is_in_hand: bool = dataclasses.field(init=False)
    reason_to_load: str = dataclasses.field(init=False)
    handed: Trained | None = None
    replay: ReplayRange | None = None
    torch_seed: int = dataclasses.field(default_factory=torch.initial_seed)
    checkpoint: Choice = "auto"
    choice: CheckpointChoice = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        is_evaluation = self.phase is not Phase.TRAINING
        in_hand = self.in_hand if self.checkpoint in ("auto", None) else None
        self.reason_to_load = "" if in_hand is None else in_hand.reason_to_load
        self.is_in_hand = in_hand is not None and not self.reason_to_load
        self.choice = CheckpointChoice()
        if is_evaluation:
            options, plugins = self.options, self.plugins.values()
            self.choice = choose_checkpoint(
                self.checkpoint,
                options,
                plugins,
                has_fitted=self.runtime.in_hand is not None,
                may_lack=in_hand is not None
                or type(self.model).load_for_testing is not Model.load_for_testing,
            )

    @property
    def in_hand(self) -> ModelInHand | None:
        """How ``fit`` has left the model that is evaluated; ``None`` for any other model."""
        found = self.runtime.in_hand
        is_evaluation = self.phase is not Phase.TRAINING
        return found if is_evaluation and found is not None and found.model is self.model else None

    @property
    def verb(self) -> str:
        """The name of the call, for messages."""
        if self.phase is Phase.TRAINING:
            return "Training" if self.replay is None else "Replay"
        return str(self.phase.value).capitalize()

    @property
    def loop(self) -> Loop:
        """The loop of the call."""
        is_fit = self.phase is Phase.TRAINING
        return self.roots.fit if is_fit else self.roots.evaluations[self.phase]

    @property
    def owners(self) -> list[Any]:
        """The user's objects that are set up."""
        return [*self.plugins.values(), self.datamodule, self.model]

    def find_code(self, number: int | None) -> int:
        """Return the exit code after an interruption, by a signal if it was one.

        It asks for another start only if the same call would resume from a checkpoint.
        """
        options, folder = self.options, self.options.chkpt_root
        can_resume = options.resume_path is not None or (
            folder is not None
            and options.resume != "never"
            and bool(file_names.find_checkpoints(folder / self.model.save_name))
        )
        if can_resume:
            return TRY_AGAIN
        return 1 if number is None else find_signal_code(number)

    def find_replay(self) -> None:
        """Find what a replay repeats, before anything is done.

        Raises:
            HeliosError: if there is nothing to repeat, or to compare it with.
        """
        if self.asked is not None:
            name, options = self.model.save_name, self.options
            run_name = options.name_for(name)
            self.replay = find_range(options, name, self.asked, run_name=run_name)
            self.options = _adapt(options, self.asked)

    def show(self, session: Session | None) -> None:
        """Set the trainer's session."""
        self.runtime.session = session


@dataclass
class ReplayRequest:
    """A replay that waits for its call of fit: the first one, or that of a named run.

    Attributes:
        options: what is repeated.
        save_name: the ``save_name`` of the model; ``None`` for the first call of fit.
        skipped: the calls of the trainer that came before, which did nothing.
        result: the result; ``None`` until there is one.
        failure: why there is none, also if the script has caught the error.
        rank: the rank of this process in the replay.
        current: the request that waits in this process; ``None`` outside ``helios replay``.
    """

    options: ReplayOptions
    save_name: str | None = None
    skipped: list[str] = field(default_factory=list)
    result: Replay | None = None
    failure: Exception | None = None
    rank: int = 0
    current: ClassVar[ReplayRequest | None] = None

    @property
    def is_answered(self) -> bool:
        """Whether the call that is waited for has come."""
        return self.result is not None or self.failure is not None

    def takes(self, phase: Phase, save_name: str) -> bool:
        """Return whether a call is the one to replay; any other one is noted as skipped."""
        is_fit, wanted = phase is Phase.TRAINING, self.save_name
        if is_fit and wanted in (None, save_name):
            return True
        self.skipped.append(f"{'fit' if is_fit else phase.value} of {save_name!r}")
        return False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let the request wait for its call, for a block."""
        ReplayRequest.current = self
        try:
            yield
        finally:
            ReplayRequest.current = None


def _adapt(options: Options, asked: ReplayOptions) -> Options:
    """Return the options of a replay: signals end it, and nothing is saved."""
    return dataclasses.replace(
        options,
        signals=Signals(()),
        nproc=options.nproc if asked.nproc is None else asked.nproc,
        enable_progress_bar=options.enable_progress_bar or asked.has_bars,
        resume="auto" if options.resume == "never" else options.resume,
    )
