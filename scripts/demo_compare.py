"""Train on digits undisturbed and again with kills, and compare both runs bit for bit.

The training is the one of ``train_digits.py``. Here its model also writes each loss, the numbers of
the samples and a digest of the augmented images to a file, at every iteration that it runs; what
a kill has undone is therefore written twice, and must be the same twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import train_digits

import helios

ROOT = Path(__file__).resolve().parent.parent
RECORD, RESULT, CONSOLE = "record.txt", "result.json", "console.txt"
LAST = train_digits.EPOCHS * train_digits.STEPS_PER_EPOCH
POLL_SECONDS, PATIENCE_SECONDS = 0.002, 120.0


class RecordedDigits(train_digits.DigitsModel):
    """The example's model; a line for each iteration goes to a file, and survives a kill."""

    def __init__(self, save_name: str, record: Path) -> None:
        super().__init__(save_name)
        self._record = record

    def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
        """Train as the example does, and write down what came in and what came out."""
        images, _, samples = batch
        loss = super().train_step(batch, state)
        bits = loss.detach().view(torch.int32).item() & 0xFFFFFFFF
        order = ",".join(map(str, samples.tolist()))
        with self._record.open("a") as file:
            file.write(f"{state.global_iteration} {bits:08x} {order} {_digest(images)}\n")
        return loss


def run_training(folder: Path) -> int:
    """Train in this process: the command that is killed and started again."""
    torch.set_num_threads(1)
    model = RecordedDigits("digits", folder / RECORD)
    trainer = train_digits.train(folder, model)
    accuracy = float(model.test_scores["accuracy"])
    (folder / RESULT).write_text(json.dumps({"accuracy": accuracy}))
    return trainer.exit_code


def _digest(value: Any) -> str:
    """Return a digest of the bits of nested tensors, numbers and texts."""
    digest = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            digest.update(f"{item.dtype}{tuple(item.shape)}".encode())
            digest.update(item.detach().contiguous().flatten().view(torch.uint8).numpy())
        elif isinstance(item, dict):
            for name in item:
                digest.update(repr(name).encode())
                add(item[name])
        elif isinstance(item, (list, tuple)):
            digest.update(f"{type(item).__name__}{len(item)}".encode())
            for member in item:
                add(member)
        else:
            digest.update(repr(item).encode())

    add(value)
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Line:
    """What one iteration recorded."""

    iteration: int
    loss_bits: str
    samples: str
    images: str

    @property
    def loss(self) -> float:
        """The loss as a number."""
        bits = torch.tensor(int(self.loss_bits, 16), dtype=torch.int64).to(torch.int32)
        return bits.view(torch.float32).item()


def _read_record(folder: Path) -> list[Line]:
    path = folder / RECORD
    texts = path.read_text().splitlines() if path.exists() else []
    fields = [text.split() for text in texts]
    return [Line(int(number), *rest) for number, *rest in fields]


@dataclasses.dataclass
class Run:
    """A run as it came out, with the iterations at which it was killed and went on."""

    folder: Path
    seconds: float = 0.0
    kills: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    @property
    def command(self) -> list[str]:
        """The command of every start."""
        return [sys.executable, __file__, "--train", str(self.folder)]

    def start(self) -> subprocess.Popen[bytes]:
        """Start the training; always by the same command."""
        with (self.folder / CONSOLE).open("ab") as console:
            return subprocess.Popen(
                self.command, stdout=console, stderr=console, start_new_session=True, cwd=ROOT
            )

    def train(self, moments: list[tuple[int, float]]) -> None:
        """Train to the end; at each moment (iteration, seconds after it) kill and start again."""
        begin = time.monotonic()
        for iteration, delay in moments:
            self._kill_after(iteration, delay)
        begun = len(_read_record(self.folder))
        code = self.start().wait(PATIENCE_SECONDS)
        if code:
            raise SystemExit(f"The training failed ({code}); see {self.folder / CONSOLE}.")
        self.lines = _read_record(self.folder)
        self.last_start = self.lines[begun].iteration
        self.accuracy = json.loads((self.folder / RESULT).read_text())["accuracy"]
        self.seconds = time.monotonic() - begin

    def _kill_after(self, iteration: int, delay: float) -> None:
        process = self.start()
        begun = len(_read_record(self.folder))
        deadline = time.monotonic() + PATIENCE_SECONDS
        while process.poll() is None and self._reached() < iteration:
            time.sleep(POLL_SECONDS)
            if time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
                raise SystemExit(f"The training hangs; see {self.folder / CONSOLE}.")
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            raise SystemExit(f"The training was not killed; see {self.folder / CONSOLE}.")
        self._report(begun)

    def _reached(self) -> int:
        path = self.folder / RECORD
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            complete = [line for line in file.read().split(b"\n")[:-1] if line]
        return int(complete[-1].split()[0]) if complete else 0

    def _report(self, begun: int) -> None:
        lines = _read_record(self.folder)
        first, last = lines[begun].iteration, lines[-1].iteration
        self.kills.append((first, last))
        start = "started" if first == 1 else f"went on at iteration {first}"
        print(f"  {start}, killed (SIGKILL) after iteration {last}", flush=True)


def _newest(folder: Path) -> dict[str, Any]:
    path = helios.find_last_checkpoint(folder / "digits")
    if path is None:
        raise SystemExit(f"No checkpoint in {folder}.")
    return dict(helios.load_checkpoint(path))


def _scalars(folder: Path) -> list[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points: list[tuple[str, int, float]] = []
    for part in sorted({path.parent for path in folder.rglob("events.out.*")}):
        events = EventAccumulator(str(part), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            points += [(tag, point.step, point.value) for point in events.Scalars(tag)]
    return points


def _agree(undisturbed: Run, killed: Run, field: str) -> tuple[str, str, bool]:
    """Compare one field of all iterations, also of those that a kill made run twice."""
    wanted = {line.iteration: getattr(line, field) for line in undisturbed.lines}
    is_equal = all(getattr(line, field) == wanted.get(line.iteration) for line in killed.lines)
    found = {line.iteration for line in killed.lines}
    again = len(killed.lines) - len(found)
    is_whole = sorted(wanted) == sorted(found) == list(range(1, LAST + 1))
    return str(len(undisturbed.lines)), f"{len(found)} + {again} again", is_equal and is_whole


def compare(undisturbed: Run, killed: Run) -> list[tuple[str, str, str, bool]]:
    """Compare everything; returns rows of a name, both sides, and whether they are equal."""
    names = {"losses": "loss_bits", "sample order": "samples", "augmented images": "images"}
    rows = [(name, *_agree(undisturbed, killed, field)) for name, field in names.items()]
    one, two = _newest(undisturbed.folder), _newest(killed.folder)
    for name, key in {"weights, optimizer": "model", "random generators": "rng"}.items():
        first, second = _digest(one[key]), _digest(two[key])
        rows.append((name, first[:12], second[:12], first == second))
    first_points, second_points = _scalars(undisturbed.folder), _scalars(killed.folder)
    is_equal = first_points == second_points and bool(first_points)
    rows.append(("TensorBoard points", str(len(first_points)), str(len(second_points)), is_equal))
    is_equal = undisturbed.accuracy == killed.accuracy
    accuracies = f"{undisturbed.accuracy:.2%}", f"{killed.accuracy:.2%}"
    return [*rows, ("test accuracy", *accuracies, is_equal)]


def _print_table(rows: list[tuple[str, str, str, bool]], num_kills: int) -> None:
    head = ("", "undisturbed", f"killed {num_kills} times", "equal bits")
    print(f"\n  {head[0]:20}{head[1]:>14}{head[2]:>20}{head[3]:>14}")
    for name, first, second, is_equal in rows:
        print(f"  {name:20}{first:>14}{second:>20}{'yes' if is_equal else 'NO':>14}")


def draw(undisturbed: Run, killed: Run, path: Path) -> None:
    """Draw both loss curves; a line marks each restart, a band what was run twice."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (upper, lower) = plt.subplots(2, sharex=True, sharey=True, figsize=(10, 6))
    for axes, run in ((upper, undisturbed), (lower, killed)):
        curve = {line.iteration: line.loss for line in run.lines}
        axes.plot(sorted(curve), [curve[number] for number in sorted(curve)], linewidth=0.8)
        axes.set_ylabel("loss")
    upper.set_title("undisturbed")
    lower.set_title(f"killed {len(killed.kills)} times and started again: the same bits")
    resumes = [first for first, _ in killed.kills[1:]] + [killed.last_start]
    for (_, last), first in zip(killed.kills, resumes, strict=True):
        lower.axvline(last, color="tab:red", linewidth=1, label="killed")
        lower.axvspan(first, last, color="tab:red", alpha=0.15, label="run again")
    handles, labels = lower.get_legend_handles_labels()
    lower.legend(handles[:2], labels[:2], loc="upper right")
    lower.set_xlabel("iteration")
    upper.set_yscale("log")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def demonstrate(folder: Path, num_kills: int, seed: int) -> int:
    """Run the demo; returns 0 if everything is equal and the network has learnt."""
    undisturbed, killed = Run(folder / "undisturbed"), Run(folder / "killed")
    print(f"Training on handwritten digits: {LAST} iterations, undisturbed ...", flush=True)
    undisturbed.train([])
    print(f"  done in {undisturbed.seconds:.1f} s, with a checkpoint every 7 iterations.")
    draws = random.Random(seed)
    share = LAST / num_kills if num_kills else 0
    iterations = [int(share * (part + draws.uniform(0.15, 0.85))) for part in range(num_kills)]
    moments = [(iteration, draws.uniform(0.0, 0.05)) for iteration in iterations]
    print(f"The same again, killed soon after iterations {iterations} (seed {seed}) ...")
    print(
        f"  every start: {' '.join(str(_shown(Path(word))) for word in killed.command)}", flush=True
    )
    killed.train(moments)
    print(f"  finished in {killed.seconds:.1f} s, all starts included.")
    rows = compare(undisturbed, killed)
    _print_table(rows, num_kills)
    draw(undisturbed, killed, folder / "losses.png")
    has_learnt = undisturbed.accuracy >= 0.97
    is_equal = all(row[-1] for row in rows)
    print(f"\n  Both loss curves:  {_shown(folder / 'losses.png')}")
    print(f"  TensorBoard:       .venv/bin/tensorboard --logdir {_shown(folder)}\n")
    if not has_learnt:
        print(f"The network did not learn: {undisturbed.accuracy:.2%} is below 97 %.")
    if is_equal:
        print("Killed or not: the same losses, the same samples, the same weights, bit for bit.")
    else:
        print("The runs DIFFER; see the rows marked NO.")
    return 0 if is_equal and has_learnt else 1


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "demo-output", help="output folder")
    parser.add_argument("--kills", type=int, default=5, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        return run_training(arguments.train)
    return demonstrate(arguments.out, arguments.kills, arguments.seed)


if __name__ == "__main__":
    raise SystemExit(main())
