"""The training of ``tests.support.elastic`` as a script: started by python, torchrun or srun."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path
from typing import Any

from tests.support.elastic import Elastic, KillRank, train
from tests.support.quiet import Quiet

DOOMED = "HELIOS_TESTS_DOOMED_AGENT"
"""The variable of the agent of torchrun that is to be killed."""


class KillAgent(Quiet):
    """Sends SIGKILL to the agent that has started this process, if it is the doomed one."""

    def __init__(self, iteration: int) -> None:
        super().__init__("kill-agent")
        self.iteration = iteration
        self.agent = os.getppid()

    def on_optimizer_step_start(self, *args: Any) -> None:
        is_it = DOOMED in os.environ and self.trainer.local_rank == 0
        has_come = self.context.state.global_iteration >= self.iteration
        if is_it and has_come and os.getppid() == self.agent > 1:
            os.kill(self.agent, signal.SIGKILL)
            # Helios ends the ranks of a killed agent. Until then, they must not finish the run.
            threading.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--kill", nargs=3, help="event, iteration, rank (-1: each)")
    parser.add_argument("--kill-agent", type=int, help="iteration")
    parser.add_argument("--once", action="store_true", help="kill at the first start only")
    options = parser.parse_args()
    setting = Elastic(
        num_replicas=options.replicas,
        accumulation=options.accumulation,
        total_steps=options.steps,
        num_workers=1,
    )
    plugins: list[Quiet | KillRank] = []
    has_begun = any(options.folder.glob("turns-*"))
    if options.kill and not (options.once and has_begun):
        event, iteration, rank = options.kill
        plugins.append(KillRank(event, int(iteration), None if rank == "-1" else int(rank)))
    if options.kill_agent is not None:
        plugins.append(KillAgent(options.kill_agent))
    trainer, _ = train(options.folder, setting, *plugins, nproc=options.nproc)
    raise SystemExit(trainer.exit_code)


if __name__ == "__main__":
    main()
