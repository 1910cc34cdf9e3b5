"""What audits cost: in steps that are not audited, and in those that are.

Trains fully connected networks of several sizes in one process and one thread, in turn without
audits, with an audit that is never due, and with one in every step. With processor time it may run
on a busy machine, too::

    .venv/bin/python scripts/bench/audit.py --cpu-time
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from typing import Any

import torch
from overhead import WIDTH, Clock, Data, Timed, make_data

from helios.startup.trainer_options import Audit
from helios.trainer import Trainer

MODES: dict[str, Audit | None] = {
    "no audit": None,
    "audit, not due": Audit(every=10**9),
    "audited steps": Audit(every=1),
}


class Wide(Timed):
    """A network of one hidden layer."""

    def __init__(self, last: int, clock: Clock, width: int) -> None:
        super().__init__(last, clock)
        self._width = width

    def setup(self, fast_init: bool = False) -> None:
        layers = (torch.nn.Linear(WIDTH, self._width), torch.nn.Linear(self._width, WIDTH))
        self.network = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3)


def measure(width: int, steps: int, clock: Clock, audit: Audit | None, **options: Any) -> float:
    """Return the microseconds of a step."""
    first = 300
    model = Wide(first + steps - 1, clock, width)
    trainer = Trainer(
        train_unit="iteration",
        total_steps=first + steps,
        use_cpu=True,
        print_banner=False,
        audit=audit,
        **options,
    )
    trainer.fit(model, Data(make_data(8 * (first + steps)), 8))
    return (model.end - model.begin) / steps * 1e6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--cpu-time", action="store_true")
    given = parser.parse_args()
    clock = time.process_time if given.cpu_time else time.perf_counter
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    for width in (WIDTH, 2**10, 2**14):
        found: dict[str, list[float]] = {name: [] for name in MODES}
        for _ in range(given.rounds):
            for name, audit in MODES.items():
                found[name].append(measure(width, given.steps, clock, audit))
        print(f"{2 * WIDTH * width:,} weights")
        for name, times in found.items():
            print(f"  {name:15} {min(times):10.0f} µs (median {statistics.median(times):.0f})")


if __name__ == "__main__":
    main()
