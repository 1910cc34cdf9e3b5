"""Send signals to trainings at random moments, go on by the same command, compare all bits.

One process, three that a script starts, and three of torchrun; in start-up, training, validation,
at the end of an epoch and while a checkpoint is written. A seed draws unit, accumulation, signal,
moment, a delay of some milliseconds, and who gets the signal: one rank, or who has started them.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support import signals as support  # noqa: E402 (found by the line above)
from tests.support.elastic import Bits, Elastic, assert_same, read_bits  # noqa: E402
from tests.support.started import interrupt_at_signals  # noqa: E402

WAYS = ("python", "spawn", "torchrun")
EVENTS = {
    "training": ("on_training_batch_start", "on_forward_end", "on_optimizer_step_end"),
    "validation": ("on_validation_start", "on_validation_batch_start", "on_validation_end"),
    "end of an epoch": ("on_training_epoch_end", "on_training_epoch_start"),
    "save": ("on_save_checkpoint",),
    "start-up": ("setup", "on_fit_start", "on_training_start"),
}
# Start-up is drawn less often: it leaves nothing behind.
KINDS = (*("training", "validation", "end of an epoch", "save") * 3, "start-up")
PASSED_ON = (signal.SIGTERM, signal.SIGINT)
NUMBERS = (*PASSED_ON, signal.SIGUSR1, signal.SIGUSR2)
LENGTHS = {"iteration": 40, "epoch": 8}


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a signal is sent in which training, and by whom to whom."""

    kind: str
    event: str
    iteration: int
    number: signal.Signals
    delay: float
    unit: str
    accumulation: int
    rank: int
    to: str

    @property
    def frequency(self) -> int:
        """Only a signal saves, but where it is to come during a save."""
        return 1000 if self.kind != "save" else 1 if self.unit == "epoch" else 2

    def __str__(self) -> str:
        return (
            f"{self.kind:15} {self.number.name:7} {self.event:25} iteration {self.iteration:2} "
            f"+{1000 * self.delay:3.0f} ms  {self.unit:9} x{self.accumulation}  "
            f"rank {self.rank} to {self.to}"
        )


def draw(way: str, index: int, random_: random.Random) -> Moment:
    """Draw a moment; the kinds take turns."""
    kind = KINDS[index % len(KINDS)]
    moment = Moment(
        kind=kind,
        event=random_.choice(EVENTS[kind]),
        iteration=0 if kind == "start-up" else random_.randint(1, 14),
        number=random_.choice(NUMBERS),
        delay=random_.choice((0.0, random_.uniform(0.0, 0.03))),
        unit=random_.choice(("iteration", "epoch")),
        accumulation=random_.choice((1, 2)),
        rank=0 if way == "python" else random_.randrange(3),
        to="self" if way == "python" else random_.choice(("self", "parent")),
    )
    if way == "torchrun" and moment.number not in PASSED_ON:
        # torchrun itself would be ended by it.
        return dataclasses.replace(moment, to="self")
    return moment


def setting_of(moment: Moment) -> Elastic:
    """Return the training of a moment."""
    return Elastic(
        num_replicas=3,
        unit=moment.unit,
        accumulation=moment.accumulation,
        total_steps=LENGTHS[moment.unit],
        chkpt_frequency=moment.frequency,
    )


def train(way: str, folder: Path, moment: Moment) -> tuple[int, list[int]]:
    """Run the command of a moment; returns its exit code, and those of who came back from fit."""
    if way == "python":
        plugin = support.SignalAt(
            moment.event,
            moment.iteration,
            (moment.number,),
            delay=moment.delay,
            marker=folder / "sent",
        )
        code = support.train_alone(folder, setting_of(moment), plugin)
        return code, [code]
    line = ["--unit", moment.unit, "--accumulation", moment.accumulation]
    line += ["--steps", LENGTHS[moment.unit], "--frequency", moment.frequency]
    line += ["--at", moment.event, "--iteration", moment.iteration]
    line += ["--send", int(moment.number), "--rank", moment.rank, "--to", moment.to]
    line += ["--delay", moment.delay, *(["--nproc", 3] if way == "spawn" else [])]
    code, _ = support.start(folder, *line, torchrun=3 if way == "torchrun" else 0)
    return code, support.codes(folder)


def find_faults(way: str, folder: Path, moment: Moment, expected: Bits) -> list[str]:
    """Interrupt a training and go on; returns what is not as it must be."""
    faults = []
    folder.mkdir(parents=True)
    code, codes = train(way, folder, moment)
    where = support.newest(folder)
    wanted = 75 if where[1] else 128 + moment.number
    expected_codes = [wanted] * (3 if way == "torchrun" else 1)
    if (code, codes) != (1 if way == "torchrun" else wanted, expected_codes):
        faults.append(f"it ended with {code}, and with {codes} behind fit")
    if moment.kind != "start-up" and where[1] < max(moment.iteration, 1):
        faults.append(f"its newest checkpoint is {where}")
    code, codes = train(way, folder, moment)
    if (code, set(codes)) != (0, {0}):
        faults.append(f"the second start ended with {code}, and with {codes} behind fit")
    try:
        assert_same(read_bits(folder), expected)
    except AssertionError as error:
        faults.append(f"not the same bits: {error}")
    return faults


def run(way: str, count: int, seed: int, folder: Path) -> int:
    """Try as many moments in one way to start; returns how many went well."""
    random_ = random.Random(f"{seed} {way}")
    references: dict[tuple[str, int], Bits] = {}
    num_good = 0
    for index in range(count):
        moment = draw(way, index, random_)
        key = (moment.unit, moment.accumulation)
        if key not in references:
            place = folder / way / "-".join(map(str, key))
            references[key] = support.undisturbed(place, setting_of(moment))
        began = time.monotonic()
        faults = find_faults(way, folder / way / str(index), moment, references[key])
        num_good += not faults
        said = "; ".join(faults) or "ok"
        print(f"{way:8} {index + 1:3} {moment}  {time.monotonic() - began:5.1f} s  {said}")
    print(f"{way}: {num_good} of {count} as they must be (seed {seed})", flush=True)
    return num_good


def main() -> None:
    """Try all ways; exit with 1 if anything was not as it must be."""
    # As the trainings that it starts: the number of threads belongs to what defines a run.
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="moments for each way to start")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    interrupt_at_signals()
    # A thousand lines of logs would hide the report.
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        good = [run(way, options.count, options.seed, Path(folder)) for way in options.ways]
    raise SystemExit(sum(good) != options.count * len(options.ways))


if __name__ == "__main__":
    main()
