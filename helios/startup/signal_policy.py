"""How fit handles signals: it saves at the next safe point and ends, with exit code 75.

A scheduler that is about to end a job sends a signal some time before. The run records it, and
checks for it at its boundaries, like for any other request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

from helios.core.signal_watch import TRY_AGAIN, SignalReceiver, signal_name
from helios.distributed.process_groups import has_lost_rank
from helios.errors import ArgumentError
from helios.startup.hangs import HangWatch, end_process, in_time, say

_LOGGER = logging.getLogger(__name__)
_DEFAULTS = tuple(
    number
    for name, number in signal.Signals.__members__.items()
    if name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
)
# The first two cannot be handled; after a fault that is only recorded, a process would hang;
# PyTorch's loaders wait for the ends of their workers.
_REFUSED = (
    *("SIGKILL", "SIGSTOP"),
    *("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS"),
    "SIGCHLD",
)
_PLACE_SECONDS = 1.0


def _fail(name: str, rule: str, value: object, remedy: str) -> ArgumentError:
    return ArgumentError(f"Signals({name}=...) must be {rule}, got {value!r}. {remedy}")


@dataclasses.dataclass(frozen=True)
class Signals:
    """Signals on which a training saves and ends: ``Trainer(signals=Signals(...))``.

    The first of them requests a checkpoint at the next safe point and the end of the run: ``fit``
    returns False, and ``trainer.exit_code`` is 75. A second SIGINT ends it at once.

    Attributes:
        numbers: the signals, such as ``(signal.SIGTERM, signal.SIGUSR1)``; ``()`` for none. By
            default SIGTERM, SIGINT, SIGUSR1 and SIGUSR2, as far as the system has them.
        grace: seconds from the first signal after which the process exits without saving, if it
            has reached no safe point; ``float("inf")`` for no limit. The code is 75, or 1 if
            another rank had failed before the signal, because this one may only wait for it.

    Raises:
        ArgumentError: for something that is not a signal, is named twice or cannot be handled, and
            for a grace that is not a positive number.
    """

    numbers: tuple[int, ...] = _DEFAULTS
    grace: float = 20.0

    def __post_init__(self) -> None:
        known = ", ".join(number.name for number in signal.Signals)
        if not isinstance(self.numbers, list | tuple):
            rule = "a tuple of signals"
            raise _fail("numbers", rule, self.numbers, "Pass e.g. (signal.SIGTERM,).")
        for number in self.numbers:
            is_known = isinstance(number, int) and not isinstance(number, bool)
            if not is_known or number not in signal.valid_signals():
                remedy = f"This system has {known}."
                raise _fail("numbers", "signals of this system", number, remedy)
            if signal_name(number) in _REFUSED:
                rule = "signals that a training can delay"
                raise _fail("numbers", rule, signal_name(number), "Omit it.")
        if len(set(self.numbers)) < len(self.numbers):
            names = ", ".join(map(signal_name, self.numbers))
            raise _fail("numbers", "different signals", names, "Name each of them once.")
        object.__setattr__(self, "numbers", tuple(self.numbers))
        is_number = isinstance(self.grace, int | float) and not isinstance(self.grace, bool)
        if not is_number or not self.grace > 0:
            remedy = "Pass seconds, or float('inf') for no limit."
            raise _fail("grace", "a positive number of seconds", self.grace, remedy)


class Listener:
    """The signals that a call of fit has received.

    Args:
        receiver: records signals; ``None`` if none are handled.
        ending: what happens without a safe point; ``None`` if no signals are handled.

    Attributes:
        receiver: as given.
    """

    def __init__(
        self, receiver: SignalReceiver | None = None, ending: UnsavedEnd | None = None
    ) -> None:
        self.receiver = receiver
        self._ending = ending
        self._has_warned = False

    @contextlib.contextmanager
    def describing(self, watch: HangWatch) -> Iterator[None]:
        """Let the end without a safe point say where the run stands, if it comes in the block."""
        if self._ending is None:
            yield
            return
        self._ending.watch = watch
        try:
            yield
        finally:
            self._ending.watch = None

    def ask(self, *, saves: bool) -> str:
        """Return why the run is to be interrupted; empty if no signal was received.

        Args:
            saves: whether checkpoints are written, for the message.
        """
        if self.receiver is None or not self.receiver.noted:
            return ""
        reason = f"{self.receiver.first} was received"
        if not self._has_warned:
            self._has_warned = True
            how = "saves and ends" if saves else "ends, without saving,"
            _LOGGER.warning("%s: the training %s at the next safe point.", reason, how)
        return reason

    def note_safe_point(self) -> None:
        """Stop the grace period: the rest of the run, such as writing, may take longer."""
        if self.receiver is not None:
            self.receiver.wait_without_end()

    def ignore_the_rest(self) -> None:
        """Let no signal end this process before it exits by itself.

        With ``srun --kill-on-bad-exit``, the first task that exits with 75 makes SLURM send SIGTERM
        to the others. One that is still exiting then would end with 143, which srun would return.
        """
        if self.receiver is not None:
            self.receiver.stay()

    def warn_of_late_signals(self) -> None:
        """Log at the regular end that a signal came too late to interrupt anything."""
        if self.receiver is not None and self.receiver.first and not self._has_warned:
            _LOGGER.warning("%s came too late to interrupt the training.", self.receiver.first)


@contextlib.contextmanager
def listening(signals: Signals) -> Iterator[Listener]:
    """Record signals for a block; handlers can be installed in the main thread only.

    Args:
        signals: the signals, and the grace period.
    """
    if not signals.numbers:
        yield Listener()
        return
    if threading.current_thread() is not threading.main_thread():
        _LOGGER.warning(
            "fit runs outside the main thread, so it cannot save on a signal: %s have their usual "
            "effect. Call it in the main thread, or pass Trainer(signals=Signals(())).",
            ", ".join(map(signal_name, signals.numbers)),
        )
        yield Listener()
        return
    ending = UnsavedEnd(signals.grace)
    receiver = SignalReceiver(
        signals.numbers, grace=signals.grace, on_first=ending.look, give_up=ending.carry_out
    )
    with receiver.installed():
        yield Listener(receiver, ending)


class UnsavedEnd:
    """What happens if no safe point is reached within the grace period.

    A job that is requeued after code 75 would be requeued forever if a rank failed by itself and
    the scheduler then ended the others, which wait for it. This is looked up when the signal
    arrives: at the end of the grace period, a rank that is gone may have given up like this one.

    Args:
        grace: the grace period in seconds.

    Attributes:
        watch: knows where the run stands; ``None`` outside of a run.
    """

    def __init__(self, grace: float) -> None:
        self.watch: HangWatch | None = None
        self._grace = grace
        self._has_lost_rank = False

    def look(self) -> None:
        """Find out in a thread whether another rank has failed; called at the first signal."""
        threading.Thread(target=self._look, name="helios-lost-ranks", daemon=True).start()
        watch = self.watch
        if watch is not None:
            watch.hurry(self._grace)

    def _look(self) -> None:
        self._has_lost_rank = has_lost_rank()

    def carry_out(self, name: str) -> NoReturn:
        """End this process and its loader workers, whatever its main thread is doing.

        Args:
            name: the signal that was not handled in time.
        """
        code = 1 if self._has_lost_rank else TRY_AGAIN
        watch = self.watch
        place = "" if watch is None else in_time(watch.describe, _PLACE_SECONDS)
        advice = (
            "Run the same command again to resume from the newest checkpoint. For longer steps and "
            "validations, set Trainer(signals=Signals(grace=...))."
        )
        if code != TRY_AGAIN:
            advice = "Another rank had failed before: its log says why."
        say(
            f"{f'{place}. ' if place else ''}No safe point was reached within {self._grace:g} s "
            f"after {name}, so this process ends now, without saving, with exit code {code}. "
            f"{advice}"
        )
        end_process(code)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a script after an error: 75 if it may just be started again."""
    is_interruption = isinstance(error, KeyboardInterrupt)
    is_unsaved = isinstance(error, SystemExit) and error.code == TRY_AGAIN
    return TRY_AGAIN if is_interruption or is_unsaved else 1
