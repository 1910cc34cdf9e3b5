"""Two machines, as far as one machine goes: two agents of torchrun, which meet by themselves.

The agent that is there first serves the store of both. Each agent starts Python three times, so all
tests are in the second tier.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from helios.ledger.run_file import START, read_run_file
from tests.support import signals
from tests.support.elastic import Bits, assert_same, read_bits
from tests.support.scripts import call
from tests.support.signals import environment

pytestmark = pytest.mark.full

SECONDS = 200
OPTIONS = ("--replicas", 4, "--steps", 8, "--frequency", 1, "--workers", 1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    folder = tmp_path_factory.mktemp("alone")
    done = call(signals.main, folder, *OPTIONS, "--nproc", 1)
    assert done.returncode == 0, done.stderr
    return read_bits(folder)


class Agents:
    """Agents of one run with two processes each; what is left at the end is killed."""

    def __init__(self, folder: Path, *options: Any) -> None:
        self.folder = folder
        self.options = options
        self.logs: list[Path] = []
        self._stack = ExitStack()
        with socket.socket() as ear:
            ear.bind(("127.0.0.1", 0))
            self.port = ear.getsockname()[1]

    def __enter__(self) -> Agents:
        self.folder.mkdir()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(self, machine: int) -> subprocess.Popen[bytes]:
        """Start an agent; torchrun orders machines by their addresses, whoever comes first."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += ["--nproc-per-node=2", "--max-restarts=2", "--rdzv-backend=c10d"]
        command += [f"--rdzv-endpoint=localhost:{self.port}", f"--local-addr=127.0.0.{machine}"]
        # When an agent is gone, the other one soon waits for the next.
        command += ["--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3"]
        command += [str(signals.__file__), str(self.folder), *map(str, self.options)]
        variables = environment()
        # Otherwise, an agent that takes the place of another one waits for an address in vain.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.logs.append(self.folder / f"agent-{len(self.logs)}")
        log = self._stack.enter_context(self.logs[-1].open("wb"))
        agent = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        self._stack.callback(agent.wait)
        self._stack.callback(agent.kill)
        return agent

    def start_both(self, first: int) -> list[subprocess.Popen[bytes]]:
        """Start an agent, which serves the store of both, and when it does, the other one."""
        agents = [self.start(first)]
        deadline = time.monotonic() + SECONDS
        while not self._is_served():
            assert agents[0].poll() is None, self.read_logs()
            assert time.monotonic() < deadline, self.read_logs()
            time.sleep(0.05)
        return [*agents, self.start(3 - first)]

    def _is_served(self) -> bool:
        with socket.socket() as ear:
            return ear.connect_ex(("127.0.0.1", self.port)) == 0

    def read_logs(self) -> str:
        return "\n".join(path.read_text() for path in self.logs)


def starts_of(folder: Path) -> list[int]:
    """Return on how many processes each start of the run was made."""
    events = read_run_file(folder / "elastic")
    return [event["processes"] for event in events if event["event"] == START]


@pytest.mark.parametrize("first", [1, 2])
def test_two_agents_train_in_either_order_of_arrival(
    first: int, alone: Bits, tmp_path: Path
) -> None:
    with Agents(tmp_path / "run", *OPTIONS) as agents:
        codes = [agent.wait(SECONDS) for agent in agents.start_both(first)]
        assert codes == [0, 0], agents.read_logs()
    assert starts_of(tmp_path / "run") == [4]
    assert_same(read_bits(tmp_path / "run"), alone)


@pytest.mark.parametrize("rank", [0, 3])
def test_both_agents_restart_their_ranks_if_one_is_killed(
    rank: int, alone: Bits, tmp_path: Path
) -> None:
    kill = ("--at", "on_optimizer_step_start", "--iteration", 4, "--rank", rank, "--send", 9)
    with Agents(tmp_path / "run", *OPTIONS, *kill) as agents:
        codes = [agent.wait(SECONDS) for agent in agents.start_both(1)]
        assert codes == [0, 0], agents.read_logs()
        assert agents.read_logs().count("exitcode: -9") == 1
    assert starts_of(tmp_path / "run") == [4, 4]
    assert_same(read_bits(tmp_path / "run"), alone)
