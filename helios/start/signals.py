"""How calls handle signals: they end at the next safe point.

A scheduler that is about to end a job sends a signal some time before. The run records it, and
checks for it at its boundaries, like any other request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar, Literal, NoReturn

from helios.core.signal_watch import TRY_AGAIN, SignalReceiver, signal_name
from helios.distributed.process_groups import has_lost_rank, in_time
from helios.errors import ArgumentError, Interrupted
from helios.start.hangs import end_process, say

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
_CODE_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Signals:
    """Signals on which a run saves and ends: ``Trainer(signals=Signals(...))``.

    The first of them requests a checkpoint at the next safe point and the end of the run: ``fit``
    raises :class:`helios.Interrupted`, which ends the script with ``trainer.exit_code``. An
    evaluation ends after its batch. A second SIGINT ends either at once.

    Attributes:
        numbers: the signals, such as ``(signal.SIGTERM, signal.SIGUSR1)``; ``()`` for none. By
            default SIGTERM, SIGINT, SIGUSR1 and SIGUSR2, if the system has them.
        grace: seconds from the first signal after which the process exits without saving, if it
            has reached no safe point; ``float("inf")`` for no limit. The code is that of
            ``Interrupted``, or 1 if another rank had failed before the signal, because this one
            may only wait for it.
        on_interrupt: ``"return"`` lets ``fit`` return False after an interruption, also one by a
            time limit, and leaves evaluations to Python. Your script must then end itself.

    Raises:
        ArgumentError: for something that is not a signal or cannot be handled, for a grace that is
            not a positive number, and for another ``on_interrupt``.
    """

    numbers: tuple[signal.Signals | int, ...] = _DEFAULTS
    grace: float = 20.0
    on_interrupt: Literal["raise", "return"] = "raise"

    def __post_init__(self) -> None:
        if not isinstance(self.numbers, list | tuple) or not all(map(_can_delay, self.numbers)):
            raise ArgumentError(
                "Signals(numbers=...) must be a tuple of signals that a process can delay, got "
                f"{self.numbers!r}. Pass e.g. (signal.SIGTERM, signal.SIGUSR1)."
            )
        object.__setattr__(self, "numbers", tuple(dict.fromkeys(self.numbers)))
        is_number = isinstance(self.grace, int | float) and not isinstance(self.grace, bool)
        if not is_number or not self.grace > 0:
            raise ArgumentError(
                f"Signals(grace=...) must be a positive number of seconds, got {self.grace!r}. "
                "Pass float('inf') for no limit."
            )
        if self.on_interrupt not in ("raise", "return"):
            raise ArgumentError(
                'Signals(on_interrupt=...) must be "raise" or "return", got '
                f'{self.on_interrupt!r}. Omit it for "raise".'
            )


def _can_delay(number: object) -> bool:
    if not isinstance(number, int) or number not in signal.valid_signals():
        return False
    return signal_name(number) not in _REFUSED


class Listener:
    """The signals that a call has received.

    Args:
        receiver: records signals; ``None`` if none are handled.

    Attributes:
        receiver: as given.
    """

    def __init__(self, receiver: SignalReceiver | None = None) -> None:
        self.receiver = receiver
        self._has_warned = False

    @property
    def number(self) -> int | None:
        """The first signal; ``None`` if there was none."""
        return self.receiver.noted[0] if self.receiver and self.receiver.noted else None

    def ask(self, what: str) -> str:
        """Return why the call is to be interrupted; empty if no signal was received.

        Args:
            what: what follows, for the message.
        """
        if self.receiver is None or not self.receiver.noted:
            return ""
        reason = f"{self.receiver.first} was received"
        if not self._has_warned:
            self._has_warned = True
            _LOGGER.warning("%s: %s.", reason, what)
        return reason

    def note_safe_point(self) -> None:
        """Stop the grace period: the rest of the run, such as writing, may take longer."""
        if self.receiver is not None:
            self.receiver.wait_without_end()

    def ignore_the_rest(self) -> None:
        """Let no signal end this process before it exits by itself.

        The first process that exits with 75 makes torchrun, or SLURM with ``--kill-on-bad-exit``,
        send SIGTERM to the others. One that is still exiting then would end with 143, which srun
        would return.
        """
        if self.receiver is not None:
            self.receiver.stay()

    def warn_of_late_signals(self) -> None:
        """Log at the regular end that a signal came too late to interrupt anything."""
        if self.receiver is not None and self.receiver.first and not self._has_warned:
            _LOGGER.warning("%s came too late to interrupt the run.", self.receiver.first)


@contextlib.contextmanager
def listening(
    signals: Signals, find_code: Callable[[int], int], *, is_fit: bool
) -> Iterator[Listener]:
    """Record signals for a block; handlers can be installed in the main thread only.

    Args:
        signals: the signals, and the grace period.
        find_code: returns the exit code after a signal.
        is_fit: whether to warn in another thread.
    """
    if not signals.numbers:
        yield Listener()
        return
    if threading.current_thread() is not threading.main_thread():
        _LOGGER.log(
            logging.WARNING if is_fit else logging.DEBUG,
            "fit runs outside the main thread, so it cannot save on a signal: %s have their usual "
            "effect. Call it in the main thread, or pass Trainer(signals=Signals(())).",
            ", ".join(map(signal_name, signals.numbers)),
        )
        yield Listener()
        return
    ending = UnsavedEnd(signals.grace, find_code)
    receiver = SignalReceiver(
        signals.numbers, grace=signals.grace, on_first=ending.look, give_up=ending.carry_out
    )
    with receiver.installed():
        yield Listener(receiver)


class UnsavedEnd:
    """Ends the process if no safe point is reached within the grace period.

    A job that is requeued after code 75 would be requeued forever if a rank failed by itself and
    the scheduler then ended the others, which wait for it. This is looked up when the signal
    arrives: at the end of the grace period, a rank that is gone may have given up like this one.

    Args:
        grace: the grace period in seconds.
        find_code: returns the exit code after a signal.
    """

    def __init__(self, grace: float, find_code: Callable[[int], int]) -> None:
        self._grace = grace
        self._find_code = find_code
        self._has_lost_rank = False

    def look(self) -> None:
        """Find out in a thread whether another rank has failed; called at the first signal."""
        threading.Thread(target=self._look, name="helios-lost-ranks", daemon=True).start()

    def _look(self) -> None:
        self._has_lost_rank = has_lost_rank()

    def carry_out(self, number: int) -> NoReturn:
        """End this process and its loader workers, whatever its main thread is doing.

        Args:
            number: the signal that was not handled in time.
        """
        # The disk may be what the run waits for.
        found = in_time(partial(self._find_code, number), _CODE_SECONDS)
        found = find_signal_code(number) if found is None else found
        code = 1 if self._has_lost_rank else found
        advice = "For longer steps and validations, set Trainer(signals=Signals(grace=...))."
        if code == TRY_AGAIN:
            again = "Run the same command again to resume from the newest checkpoint."
            advice = f"{again} {advice}"
        elif self._has_lost_rank:
            advice = "Another rank had failed before: its log says why."
        say(
            f"No safe point was reached within {self._grace:g} s after {signal_name(number)}, so "
            f"this process ends now, without saving, with exit code {code}. {advice}"
        )
        end_process(code)


def find_signal_code(number: int) -> int:
    """Return the exit code of a process that a signal has ended, as shells show it."""
    return 128 + number


class Interruptions:
    """The interruption of a call of this process; a forked child has its own."""

    found: ClassVar[dict[int, Interrupted]] = {}


def is_interactive() -> bool:
    """Return whether the user types the next statement: in a notebook, IPython or a console."""
    return sys.flags.interactive > 0 or "ps1" in vars(sys)


def remember(error: Interrupted, signals: Signals) -> None:
    """Let the next call raise an interruption again: its script has not ended, but must."""
    if signals.on_interrupt == "raise" and not is_interactive():
        Interruptions.found[os.getpid()] = error


def find_swallowed(signals: Signals) -> Interrupted | None:
    """Return what has interrupted an earlier call, whose script has caught it and continued."""
    found = Interruptions.found.get(os.getpid())
    if found is None or signals.on_interrupt == "return":
        return None
    _LOGGER.warning(
        "Nothing is started, because an earlier call was interrupted: %s. Let helios.Interrupted "
        'end the script, or pass Trainer(signals=Signals(on_interrupt="return")).',
        found.reason,
    )
    return Interrupted(found.code, found.reason)


def raise_interrupted(error: Interrupted, signals: Signals) -> NoReturn:
    """Raise what has interrupted a call, in the way that suits the session."""
    remember(error, signals)
    if is_interactive():
        raise KeyboardInterrupt(error.reason)
    raise error
