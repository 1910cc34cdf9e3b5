"""Noting signals instead of obeying them, so that what runs can end at a place of its own choice.

The handler only takes a note. A thread hears of a signal as soon as the system delivers it, also
while the main thread waits in C, where no handler of Python runs: it tells a second Ctrl-C from an
echo of the first, and gives up on a process that does not come to its end in time.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, TypeAlias, final

from torch.utils.data import get_worker_info

# EX_TEMPFAIL: the exit code of a process that wants the same command to be started again.
TRY_AGAIN = 75
# Under torchrun a Ctrl-C reaches a process twice: from the terminal, and from the launcher.
ECHO_SECONDS = 1.0
_RETRY_SECONDS = 0.1

_Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``"SIGTERM"``; some have a number only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@final
class SignalReceiver:
    """Notes the signals of this process while it is installed; a second SIGINT is obeyed.

    Loader workers that are forked meanwhile do nothing on these signals. Other forked processes do
    what they would have done without it.

    Args:
        numbers: which signals.
        grace: how many seconds after the first of them to give up.
        give_up: called then, in a thread, with the name of the first signal.

    Attributes:
        numbers: as given.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        *,
        grace: float = math.inf,
        give_up: Callable[[str], object] = str,
    ) -> None:
        self.numbers = tuple(numbers)
        self._grace = grace
        self._give_up = give_up
        self.noted: list[int] = []
        self._num_taken = 0
        self._presses = 0
        self._answered = 1
        self._last_press = -math.inf
        self._is_patient = False
        self._is_closing = False
        self._pid = os.getpid()
        self._found: dict[int, _Handler] = {}
        self._wakeup = -1

    @property
    def first(self) -> str:
        """The name of the signal that came first; empty while there was none."""
        return signal_name(self.noted[0]) if self.noted else ""

    def take(self) -> list[int]:
        """Return the signals that came since the last time."""
        new = self.noted[self._num_taken :]
        self._num_taken += len(new)
        return new

    def wait_without_end(self) -> None:
        """Do not give up any more, however long it takes."""
        self._is_patient = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Note signals for a block; what was found is there again afterwards.

        To be used in the main thread, where alone Python handles signals. A signal that was held
        back when the process was started, by its mask, is delivered now.
        """
        with ExitStack() as stack:
            # Handlers are the first to come and the last to go: the rest is complete meanwhile.
            for number in self.numbers:
                self._found[number] = signal.signal(number, self)
                stack.callback(_restore, number, self._found[number])
            self._open_ear(stack)
            if sys.platform != "win32":
                mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)
                stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
            stack.callback(self._close)
            yield

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take a note: the handler, which may run between any two steps of the main thread."""
        if os.getpid() != self._pid:
            self._act_in_child(number)
        elif number == signal.SIGINT and self._is_pressed_again:
            self._answered = self._presses
            raise KeyboardInterrupt
        else:
            self.noted.append(number)

    @property
    def _is_pressed_again(self) -> bool:
        return self._presses > self._answered and not self._is_closing

    def forget(self) -> None:
        """Have this process, a forked one, wake nobody in the process that it came from."""
        found = signal.set_wakeup_fd(-1)
        if found not in (-1, self._wakeup):
            signal.set_wakeup_fd(found)

    def _act_in_child(self, number: int) -> None:
        # Whoever waits for the end of a child, such as a pool, has to be able to end it.
        if get_worker_info() is None:
            _restore(number, self._found[number])
            os.kill(os.getpid(), number)

    def _open_ear(self, stack: ExitStack) -> None:
        ear, mouth = socket.socketpair()
        stack.callback(ear.close)
        stack.callback(mouth.close)
        mouth.setblocking(False)
        thread = threading.Thread(
            target=self._listen, args=(ear,), name="helios-signals", daemon=True
        )
        thread.start()
        stack.callback(thread.join)
        # Not by closing it: a worker that lives on has it open, too.
        stack.callback(mouth.shutdown, socket.SHUT_RDWR)
        self._wakeup = mouth.fileno()
        found = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        stack.callback(_restore_wakeup, found)

    def _close(self) -> None:
        self._is_closing = True

    def _listen(self, ear: socket.socket) -> None:
        """Hear of signals at once: the thread's work, until the mouth is shut."""
        deadline, first = math.inf, 0
        while True:
            ear.settimeout(self._choose_timeout(deadline))
            try:
                heard = ear.recv(256)
            except TimeoutError:
                if self._is_pressed_again:
                    self._interrupt()
                if time.monotonic() >= deadline and not self._is_patient:
                    deadline = math.inf
                    self._give_up(signal_name(first))
                continue
            if not heard:
                return
            for number in filter(self.numbers.__contains__, heard):
                if not first:
                    first, deadline = number, time.monotonic() + self._grace
                if number == signal.SIGINT:
                    self._count_press()

    def _choose_timeout(self, deadline: float) -> float | None:
        rest = math.inf if self._is_patient else max(deadline - time.monotonic(), 0.001)
        rest = min(rest, _RETRY_SECONDS) if self._is_pressed_again else rest
        return None if rest == math.inf else rest

    def _count_press(self) -> None:
        now = time.monotonic()
        if now - self._last_press <= ECHO_SECONDS:
            return
        self._last_press = now
        self._presses += 1
        if self._presses > 1:
            # The handler may have run before this was known, and the main thread may wait by now.
            self._interrupt()

    def _interrupt(self) -> None:
        """Call the handler again, until it has answered: a wait may begin between two tries."""
        self._last_press = time.monotonic()
        _call_handler_again(signal.SIGINT)


def _call_handler_again(number: signal.Signals) -> None:
    main = threading.main_thread().ident
    if sys.platform == "win32" or main is None:
        _thread.interrupt_main(number)
    else:
        signal.pthread_kill(main, number)


def _restore(number: int, handler: _Handler) -> None:
    # None stands for one that was not installed from Python.
    signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _restore_wakeup(found: int) -> None:
    # Whoever has used it may have closed it meanwhile.
    try:
        signal.set_wakeup_fd(found)
    except (OSError, ValueError):
        signal.set_wakeup_fd(-1)


def noted_signals() -> tuple[int, ...]:
    """Return what is noted in this process, or in the one that has forked it."""
    return tuple(
        number
        for number in signal.valid_signals()
        if isinstance(signal.getsignal(number), SignalReceiver)
    )


def ignore_signals(numbers: Sequence[int]) -> None:
    """Do nothing on these signals from now on: for processes that another one ends."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def held_back(numbers: Sequence[int]) -> Iterator[None]:
    """Start processes that do not get these signals before they take them.

    A signal that comes meanwhile, to this process or to one that was started in the block, waits in
    the system. Does nothing on Windows.
    """
    if sys.platform == "win32":
        yield
        return
    # Whoever starts the first process starts this one, too, which lets signals through again.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget_in_child() -> None:
    for number in noted_signals():
        handler = signal.getsignal(number)
        if isinstance(handler, SignalReceiver):
            handler.forget()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_in_child)
