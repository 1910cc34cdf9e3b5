"""Noting signals: by real ones, sent to this process and to its children."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from helios.core import signal_watch
from helios.core.signal_watch import SignalReceiver, held_back, noted_signals
from helios.data.workers import WorkerInit, end_workers

ECHO = 0.2
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def short_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_watch, "ECHO_SECONDS", ECHO)


@pytest.fixture
def found() -> Iterator[Callable[..., Any]]:
    """A handler that the user has installed."""

    def handler(number: int, frame: Any) -> None:
        raise AssertionError("it must not be called")

    before = signal.signal(signal.SIGTERM, handler)
    yield handler
    signal.signal(signal.SIGTERM, before)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def press_and_wait() -> None:
    send(signal.SIGINT)
    pass_time(10)


def pass_time(seconds: float) -> None:
    """Let time pass, where time itself is what a test is about."""
    threading.Event().wait(seconds)


@pytest.mark.shows("S15")
def test_signals_are_noted_and_what_was_found_is_there_again(found: Callable[..., Any]) -> None:
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    with ear, mouth:
        signal.set_wakeup_fd(mouth.fileno())
        receiver = SignalReceiver([signal.SIGTERM, signal.SIGUSR1])
        with receiver.installed():
            assert set(noted_signals()) == {signal.SIGTERM, signal.SIGUSR1}
            assert (receiver.first, receiver.take()) == ("", [])
            send(signal.SIGUSR1)
            assert receiver.take() == [signal.SIGUSR1]
            send(signal.SIGTERM)
            assert (receiver.first, receiver.take()) == ("SIGUSR1", [signal.SIGTERM])
        assert signal.set_wakeup_fd(-1) == mouth.fileno()
    assert signal.getsignal(signal.SIGTERM) is found
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert not noted_signals()


def say_and_wait(mouth: Connection) -> None:
    mouth.send("running")
    pass_time(60)


def stay_and_end() -> None:
    """Send SIGTERM after the block, before the interpreter ends and while it does."""
    # A shell lets processes in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    receiver = SignalReceiver([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    atexit._clear()
    ends = []
    atexit.register(lambda: ends.append(signal.getsignal(signal.SIGTERM)))
    with receiver.installed():
        receiver.stay()
    send(signal.SIGTERM, signal.SIGUSR1)
    ear, mouth = FORK.Pipe(duplex=False)
    child = FORK.Process(target=say_and_wait, args=(mouth,))
    child.start()
    ear.recv()
    child.terminate()
    child.join()
    assert child.exitcode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    atexit._run_exitfuncs()
    assert ends == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    send(signal.SIGTERM)


@pytest.mark.shows("P83")
def test_a_process_that_is_to_exit_by_itself_is_ended_by_no_signal() -> None:
    process = FORK.Process(target=stay_and_end)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.shows("S14")
def test_a_second_interrupt_is_obeyed_and_an_echo_of_the_first_is_not() -> None:
    receiver = SignalReceiver([signal.SIGINT])
    with receiver.installed():
        try:
            send(signal.SIGINT, signal.SIGINT, signal.SIGINT)
            pass_time(0.05)
        except KeyboardInterrupt:
            pytest.fail("an echo was obeyed")
        assert receiver.first == "SIGINT"
        for _ in range(2):
            pass_time(1.5 * ECHO)
            with pytest.raises(KeyboardInterrupt):
                press_and_wait()
            # Once for each: cleaning up must not be cut off by the same one again.
            pass_time(0.05)


def test_signals_wait_for_a_process_that_does_not_take_them_yet() -> None:
    code = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with held_back([signal.SIGUSR1]):
        said = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert "SIGUSR1" in said.stdout
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


class Stuck(Dataset):
    def __init__(self) -> None:
        self.has_begun = FORK.Event()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        self.has_begun.set()
        threading.Event().wait()
        return index


NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def test_workers_that_stand_still_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    with SignalReceiver(NUMBERS).installed():
        dataset = Stuck()
        loader = DataLoader(
            dataset, num_workers=1, multiprocessing_context=FORK, worker_init_fn=WorkerInit(None)
        )
        iterator = iter(loader)
        assert dataset.has_begun.wait(120)
        end_workers(loader, iterator)
        (worker,) = iterator._workers
        worker.join(120)
        assert worker.exitcode == -signal.SIGKILL
