"""The training of ``tests.support.elastic`` as a script: started by python, torchrun or srun."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.support.elastic import Elastic, KillRank, train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--kill", nargs=3, help="event, iteration, rank (-1: each)")
    parser.add_argument("--once", action="store_true", help="kill at the first start only")
    options = parser.parse_args()
    setting = Elastic(
        num_replicas=options.replicas,
        accumulation=options.accumulation,
        total_steps=options.steps,
        num_workers=1,
    )
    plugins = []
    has_begun = any(options.folder.glob("turns-*"))
    if options.kill and not (options.once and has_begun):
        event, iteration, rank = options.kill
        plugins.append(KillRank(event, int(iteration), None if rank == "-1" else int(rank)))
    trainer, _ = train(options.folder, setting, *plugins, nproc=options.nproc)
    raise SystemExit(trainer.exit_code)


if __name__ == "__main__":
    main()
