"""Records signals instead of acting on them, so that training can stop at a safe point.

The handler only records the signal. A thread receives each signal through a wakeup descriptor as
soon as the system delivers it, even while the main thread is in C code, where no Python handler
runs. The thread recognizes a second Ctrl-C, and calls ``give_up`` when the grace period is over.
"""

from __future__ import annotations

import _thread
import atexit
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

# EX_TEMPFAIL: the exit code that asks a scheduler to run the same command again.
TRY_AGAIN = 75
# Under torchrun a Ctrl-C reaches a process twice: from the terminal, and from the launcher.
ECHO_SECONDS = 1.0
_RETRY_SECONDS = 0.1

_Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``"SIGTERM"``; ``"signal 40"`` if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(code: int) -> str:
    """Return how a process ended, from its exit code in ``multiprocessing``."""
    return f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


@final
class SignalReceiver:
    """Records signals while it is installed; a second SIGINT raises ``KeyboardInterrupt``.

    Loader workers forked in the meantime ignore these signals. Other forked processes handle them
    as if the receiver were not installed.

    Args:
        numbers: the signals to record.
        grace: seconds to wait after the first signal before calling ``give_up``.
        on_first: called in a thread at the first signal; must return quickly.
        give_up: called in this thread with the number of the first signal.

    Attributes:
        numbers: the signals to record.
        noted: the signals recorded so far, in order.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        *,
        grace: float = math.inf,
        on_first: Callable[[], object] = bool,
        give_up: Callable[[int], object] = bool,
    ) -> None:
        self.numbers = tuple(numbers)
        self._grace = grace
        self._on_first = on_first
        self._give_up = give_up
        self.noted: list[int] = []
        self._num_taken = 0
        self._presses = 0
        self._answered = 1
        self._last_press = -math.inf
        self._is_patient = False
        self._is_closing = False
        self._stays = False
        self._pid = os.getpid()
        self._found: dict[int, _Handler] = {}
        self._wakeup = -1

    @property
    def first(self) -> str:
        """The name of the first signal; empty if there was none."""
        return signal_name(self.noted[0]) if self.noted else ""

    def take(self) -> list[int]:
        """Return the signals recorded since the last call."""
        new = self.noted[self._num_taken :]
        self._num_taken += len(new)
        return new

    def wait_without_end(self) -> None:
        """Disable the grace period from now on."""
        self._is_patient = True

    def stay(self) -> None:
        """Keep handling the signals that would end this process, until it ends."""
        self._stays = True
        # While the interpreter is torn down, it restores the default actions of Python handlers.
        atexit.register(ignore_signals, [n for n in self.numbers if self._ends_process(n)])

    def _ends_process(self, number: int) -> bool:
        return self._found[number] in (signal.SIG_DFL, None)

    def _give_back(self, number: int) -> None:
        if not (self._stays and self._ends_process(number)):
            _restore(number, self._found[number])

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Install the handlers for a block; the previous ones are restored afterwards.

        After :meth:`stay`, only those that are functions, or ignore a signal, are restored.

        Call it in the main thread, the only one where Python handles signals. Signals blocked
        since the start of the process (see :func:`held_back`) are unblocked and delivered.
        """
        with ExitStack() as stack:
            # Handlers are installed first and restored last, so no signal acts in between.
            for number in self.numbers:
                self._found[number] = signal.signal(number, self)
                stack.callback(self._give_back, number)
            self._open_ear(stack)
            if sys.platform != "win32":
                mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)
                stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
            try:
                yield
            finally:
                self._is_closing = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record a signal; the handler, which may run between any two bytecodes."""
        if os.getpid() != self._pid:
            # The owner of a child process, such as a pool, must be able to end it.
            if get_worker_info() is None:
                _restore(number, self._found[number])
                os.kill(os.getpid(), number)
        elif number == signal.SIGINT and self._is_pressed_again:
            self._answered = self._presses
            raise KeyboardInterrupt
        else:
            self.noted.append(number)

    @property
    def _is_pressed_again(self) -> bool:
        return self._presses > self._answered and not self._is_closing

    def forget(self) -> None:
        """Stop waking the parent's thread; to be called in a forked process."""
        found = signal.set_wakeup_fd(-1)
        if found not in (-1, self._wakeup):
            signal.set_wakeup_fd(found)

    def _open_ear(self, stack: ExitStack) -> None:
        receiver, sender = socket.socketpair()
        stack.callback(receiver.close)
        stack.callback(sender.close)
        sender.setblocking(False)
        thread = threading.Thread(
            target=self._listen, args=(receiver,), name="helios-signals", daemon=True
        )
        thread.start()
        stack.callback(thread.join)
        # Closing it is not enough: a surviving worker has it open, too.
        stack.callback(sender.shutdown, socket.SHUT_RDWR)
        self._wakeup = sender.fileno()
        found = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        stack.callback(_restore_wakeup, found)

    def _listen(self, receiver: socket.socket) -> None:
        """Receive signals in the thread until the socket is shut down."""
        deadline, first = math.inf, 0
        while True:
            rest = math.inf if self._is_patient else max(deadline - time.monotonic(), 0.001)
            rest = min(rest, _RETRY_SECONDS) if self._is_pressed_again else rest
            receiver.settimeout(None if rest == math.inf else rest)
            try:
                received = receiver.recv(256)
            except TimeoutError:
                if self._is_pressed_again:
                    self._interrupt()
                if time.monotonic() >= deadline and not self._is_patient:
                    deadline = math.inf
                    self._give_up(first)
                continue
            if not received:
                return
            for number in filter(self.numbers.__contains__, received):
                if not first:
                    first, deadline = number, time.monotonic() + self._grace
                    self._on_first()
                if number == signal.SIGINT:
                    self._count_press()

    def _count_press(self) -> None:
        now = time.monotonic()
        if now - self._last_press <= ECHO_SECONDS:
            return
        self._last_press = now
        self._presses += 1
        if self._presses > 1:
            # The handler may have run before this count, and the main thread may be waiting now.
            self._interrupt()

    def _interrupt(self) -> None:
        """Call the handler again; repeated until it raises, as a wait may begin in between."""
        self._last_press = time.monotonic()
        main = threading.main_thread().ident
        if sys.platform == "win32" or main is None:
            _thread.interrupt_main(signal.SIGINT)
        else:
            signal.pthread_kill(main, signal.SIGINT)


def _restore(number: int, handler: _Handler) -> None:
    # None means that the handler was not installed from Python.
    signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _restore_wakeup(found: int) -> None:
    # Its owner may have closed it in the meantime.
    try:
        signal.set_wakeup_fd(found)
    except (OSError, ValueError):
        signal.set_wakeup_fd(-1)


def noted_signals() -> tuple[int, ...]:
    """Return the signals that a receiver of this process, or of its parent, handles."""
    return tuple(
        number
        for number in signal.valid_signals()
        if isinstance(signal.getsignal(number), SignalReceiver)
    )


def ignore_signals(numbers: Sequence[int]) -> None:
    """Ignore these signals from now on; for processes that their parent ends."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def held_back(numbers: Sequence[int]) -> Iterator[None]:
    """Block signals for a block, in this process and in processes that it starts.

    A signal that arrives while it is blocked stays pending. Does nothing on Windows.
    """
    if sys.platform == "win32":
        yield
        return
    # It starts with the first process, and must not be started with the signals blocked.
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
