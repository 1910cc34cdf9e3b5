"""Train on digits undisturbed and again with kills, and compare both runs bit for bit.

The model and the data are those of ``docs/examples/digits.py``. Here a plugin also writes each
loss, the numbers of the samples and a digest of the augmented images to a file, at every turn of a
replica; what a kill has undone is therefore written twice, and must be the same twice. With
``--processes`` the run has four replicas, and each start another number of processes. At the end
the ledgers of both runs are compared, and that of a third run, in whose data two images are
exchanged.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import helios
from helios.cli import commands
from helios.hooks.context import Context
from helios.ledger import diff, verify
from helios.plugins import Plugin
from helios.state import Phase, TrainingState

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "examples")]

import digits  # noqa: E402 (found by the line above)

from tests.support.started import interrupt_at_signals, started  # noqa: E402 (by the same line)

RECORD, RESULT, CONSOLE = "record", "result.json", "console.txt"
LAST = digits.EPOCHS * digits.STEPS_PER_EPOCH
POLL_SECONDS, WORD_SECONDS = 0.002, 30.0
# Four ranks have taken 240 s to start where 80 other threads wanted two processors.
PATIENCE_SECONDS = 900.0


class Record(Plugin):
    """Writes a line for each turn of a replica to a file of its process; it survives a kill."""

    def __init__(self, folder: Path) -> None:
        super().__init__("record")
        self._folder = folder

    unsaved = ("_folder",)

    def setup(self) -> None:
        """Say which process this is, so that the demo can wait for its end."""
        (self._folder / f"{os.getpid()}.pid").touch()

    def on_forward_end(self, context: Context) -> None:
        """Write down what came in and what came out."""
        if context.phase is not Phase.TRAINING or context.loss is None:
            return
        images, _, samples = context.batch
        bits = context.loss.view(torch.int32).item() & 0xFFFFFFFF
        order = ",".join(map(str, samples.tolist()))
        place = f"{context.state.global_iteration} {context.replica}"
        with (self._folder / f"{RECORD}-{context.rank}.txt").open("a") as file:
            file.write(f"{time.time_ns()} {place} {bits:08x} {order} {_digest(images)}\n")


class OneEpoch(Plugin):
    """Ends the training after its first epoch."""

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_step_end(self, state: TrainingState, committed: bool) -> None:
        """Request the end."""
        if state.global_step + committed == digits.STEPS_PER_EPOCH:
            self.context.request_stop("one epoch is enough")


class ExchangedDigits(digits.DigitsData):
    """The digits with two images of the training set exchanged."""

    def load(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all images and their labels."""
        images, labels = super().load()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        first, second = order[:2].tolist()
        images[[first, second]] = images[[second, first]]
        return images, labels


def run_training(
    folder: Path, num_replicas: int, nproc: int | None, *, is_exchanged: bool = False
) -> int:
    """Train: the command that is killed and started again."""
    torch.set_num_threads(1)
    model = digits.DigitsModel("digits")
    plugins: list[Plugin] = [Record(folder)]
    data = None
    if is_exchanged:
        data = ExchangedDigits(num_replicas)
        plugins.append(OneEpoch("one-epoch"))
    trainer = helios.Trainer(
        "digits",
        max_steps=LAST,
        valid_frequency=digits.STEPS_PER_EPOCH,
        chkpt_root=folder,
        chkpt_frequency=7,
        store=helios.CheckpointStore(keep_last=3),
        use_cpu=True,
        enable_tensorboard=True,
        run_path=folder,
        print_frequency=5,
        enable_progress_bar=True,
        num_replicas=num_replicas,
        nproc=nproc,
        plugins=plugins,
    )
    data = data or digits.DigitsData(num_replicas)
    trainer.fit(model, data)
    accuracy = trainer.test(model, data)["accuracy"]
    print(f"Test accuracy: {accuracy:.2%}")
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
    """What one turn of a replica recorded."""

    moment: int
    iteration: int
    replica: int
    loss_bits: str
    samples: str
    images: str

    @property
    def loss(self) -> float:
        """The loss as a number."""
        bits = torch.tensor(int(self.loss_bits, 16), dtype=torch.int64).to(torch.int32)
        return bits.view(torch.float32).item()


def _read_record(folder: Path) -> list[Line]:
    texts = [line for path in folder.glob(f"{RECORD}-*.txt") for line in _complete_lines(path)]
    fields = [text.split() for text in texts]
    lines = [
        Line(*map(int, numbers), *rest) for *numbers, b, o, d in fields for rest in [(b, o, d)]
    ]
    return sorted(lines, key=lambda line: line.moment)


def _complete_lines(path: Path) -> list[str]:
    """Return the lines of a file; a kill may have cut off the last one."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@dataclasses.dataclass
class Run:
    """A run as it came out, with the iterations at which it was killed and went on.

    Attributes:
        folder: where it lives.
        num_replicas: replicas of the run.
        processes: of each start, the last one for all further starts; ``None`` for the default.
        is_exchanged: whether two images of the data are exchanged, in a run of one epoch.
    """

    folder: Path
    num_replicas: int = 1
    processes: tuple[int | None, ...] = (None,)
    is_exchanged: bool = False
    seconds: float = 0.0
    kills: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    @property
    def nproc(self) -> int | None:
        """Processes of the next start."""
        return self.processes[min(len(self.kills), len(self.processes) - 1)]

    @property
    def command(self) -> list[str]:
        """The command of the next start; the same at every start but for the processes."""
        command = [sys.executable, __file__, "--train", str(self.folder)]
        if self.num_replicas > 1:
            command += ["--replicas", str(self.num_replicas), "--nproc", str(self.nproc)]
        return [*command, "--exchanged"] if self.is_exchanged else command

    @contextmanager
    def _started(self) -> Iterator[subprocess.Popen[Any]]:
        """Start the training, which ends with the block."""
        with (
            (self.folder / CONSOLE).open("ab") as console,
            started(self.command, stdout=console, stderr=console, cwd=ROOT) as process,
        ):
            yield process

    def train(self, moments: list[tuple[int, float]]) -> None:
        """Train to the end; at each moment (iteration, seconds after it) kill and start again."""
        begin = time.monotonic()
        for iteration, delay in moments:
            self._kill_after(iteration, delay)
        begun = len(_read_record(self.folder))
        with self._started() as process:
            self._wait_until(lambda: process.poll() is not None, "the end of the training")
        if process.returncode:
            raise SystemExit(
                f"The training failed ({process.returncode}); see {self.folder / CONSOLE}."
            )
        self.lines = _read_record(self.folder)
        self.last_start = self.lines[begun].iteration
        self.accuracy = json.loads((self.folder / RESULT).read_text())["accuracy"]
        self.seconds = time.monotonic() - begin

    def _kill_after(self, iteration: int, delay: float) -> None:
        begun = len(_read_record(self.folder))
        with self._started() as process:
            self._wait_until(
                lambda: process.poll() is not None or self._reached() >= iteration,
                f"iteration {iteration}",
            )
            time.sleep(delay)
        if process.returncode != -signal.SIGKILL:
            raise SystemExit(f"The training was not killed; see {self.folder / CONSOLE}.")
        self._wait_until(
            lambda: not any(map(_is_alive, self.folder.glob("*.pid"))),
            "the end of the killed processes",
        )
        self._report(begun)

    def _wait_until(self, is_reached: Callable[[], bool], what: str) -> None:
        """Wait as long as the run writes files, and say every now and then what for.

        Raises:
            SystemExit: if it has not written anything for ``PATIENCE_SECONDS``.
        """
        written = said = time.time()
        while not is_reached():
            time.sleep(POLL_SECONDS)
            now = time.time()
            if now - said < WORD_SECONDS:
                continue
            written, said = max(written, self._last_write()), now
            idle = now - written
            last = digits.STEPS_PER_EPOCH if self.is_exchanged else LAST
            where = f"{what}, at iteration {self._reached()} of {last}"
            if idle > PATIENCE_SECONDS:
                raise SystemExit(
                    f"The training has written nothing for {idle:.0f} s, and was ended. This "
                    f"waited for {where}; see {self.folder / CONSOLE}."
                )
            print(f"  waiting for {where}, last written {idle:.0f} s ago", flush=True)

    def _reached(self) -> int:
        path = self.folder / f"{RECORD}-0.txt"
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            complete = [line for line in file.read().split(b"\n")[:-1] if line]
        return int(complete[-1].split()[1]) if complete else 0

    def _last_write(self) -> float:
        """Return when a file of the run was last written, in seconds since the epoch."""
        with suppress(FileNotFoundError):  # one that was renamed meanwhile
            return max(path.stat().st_mtime for path in self.folder.rglob("*"))
        return time.time()

    def _report(self, begun: int) -> None:
        lines = _read_record(self.folder)
        first, last = lines[begun].iteration, lines[-1].iteration
        start = "started" if first == 1 else f"went on at iteration {first}"
        carriers = "" if self.nproc is None else f" on {self.nproc} processes"
        self.kills.append((first, last))
        print(f"  {start}{carriers}, killed (SIGKILL) after iteration {last}", flush=True)


def _is_alive(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.stem), 0)
    except ProcessLookupError:
        pid_file.unlink()
        return False
    return True


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
    """Compare one field of all turns, also of those that a kill made run twice."""
    wanted = {(line.iteration, line.replica): getattr(line, field) for line in undisturbed.lines}
    found = {(line.iteration, line.replica) for line in killed.lines}
    is_equal = all(
        getattr(line, field) == wanted.get((line.iteration, line.replica)) for line in killed.lines
    )
    again = len(killed.lines) - len(found)
    places = itertools.product(range(1, LAST + 1), range(undisturbed.num_replicas))
    is_whole = sorted(wanted) == sorted(found) == sorted(places)
    return str(len(undisturbed.lines)), f"{len(found)} + {again} again", is_equal and is_whole


def compare(undisturbed: Run, killed: Run) -> list[tuple[str, str, str, bool]]:
    """Compare everything; returns rows of a name, both sides, and whether they are equal."""
    names = {"losses": "loss_bits", "sample order": "samples", "augmented images": "images"}
    rows = [(name, *_agree(undisturbed, killed, field)) for name, field in names.items()]
    one, two = _newest(undisturbed.folder), _newest(killed.folder)
    for name, key in {"weights, optimizer": "model", "random generators": "rng"}.items():
        first, second = _digest(one[key]), _digest(two[key])
        rows.append((name, first[:12], second[:12], first == second))
    first, second = (verify(run.folder).hash for run in (undisturbed, killed))
    rows.append(("ledger", first[:12], second[:12], first == second))
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
    from PIL import Image

    figure, (upper, lower) = plt.subplots(2, sharex=True, sharey=True, figsize=(9, 4))
    for axes, run in ((upper, undisturbed), (lower, killed)):
        curve = {line.iteration: line.loss for line in run.lines if line.replica == 0}
        axes.plot(sorted(curve), [curve[number] for number in sorted(curve)], linewidth=0.7)
        axes.set_ylabel("loss")
        axes.spines[["top", "right"]].set_visible(False)
    upper.set_title("uninterrupted", loc="left")
    title = f"killed {len(killed.kills)} times and started again: the same bits"
    lower.set_title(title, loc="left")
    resumes = [first for first, _ in killed.kills[1:]] + [killed.last_start]
    for (_, last), first in zip(killed.kills, resumes, strict=True):
        lower.axvline(last, color="tab:red", linewidth=1.2, label="killed here")
        lower.axvspan(first, last, color="tab:red", alpha=0.2, linewidth=0, label="run again")
    handles, labels = lower.get_legend_handles_labels()
    place = {"loc": "lower right", "bbox_to_anchor": (1, 0.97), "ncols": 2}
    lower.legend(handles[:2], labels[:2], frameon=False, **place)
    lower.set_xlabel("iteration")
    upper.set_yscale("log")
    upper.margins(x=0.01)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    with Image.open(path) as picture:
        few_colors = picture.convert("RGB").quantize(32)
    few_colors.save(path, optimize=True)


def demonstrate(undisturbed: Run, killed: Run, num_kills: int, seed: int) -> int:
    """Run the demo; returns 0 if everything is equal and the network has learnt."""
    folder = undisturbed.folder.parent
    how = "undisturbed"
    if undisturbed.num_replicas > 1:
        how = f"{undisturbed.num_replicas} replicas on {undisturbed.nproc} processes, undisturbed"
    print(f"Training on handwritten digits: {LAST} iterations, {how} ...", flush=True)
    undisturbed.train([])
    print(f"  done in {undisturbed.seconds:.1f} s, with a checkpoint every 7 iterations.")
    draws = random.Random(seed)
    share = LAST / num_kills if num_kills else 0
    iterations = [int(share * (part + draws.uniform(0.15, 0.85))) for part in range(num_kills)]
    moments = [(iteration, draws.uniform(0.0, 0.05)) for iteration in iterations]
    print(f"The same again, killed soon after iterations {iterations} (seed {seed}) ...")
    words = " ".join(str(_shown(Path(word))) for word in killed.command)
    print(f"  {'every' if killed.nproc is None else 'first'} start: {words}", flush=True)
    killed.train(moments)
    carriers = "" if killed.nproc is None else f" on {killed.nproc} process"
    print(f"  finished{carriers} in {killed.seconds:.1f} s, all starts included.")
    rows = compare(undisturbed, killed)
    _print_table(rows, num_kills)
    has_differed = _compare_ledgers(undisturbed, killed)
    draw(undisturbed, killed, folder / "losses.png")
    command = ["report", str(_shown(killed.folder)), "--out", str(_shown(folder / "report.html"))]
    print(f"\n  $ helios {' '.join(command)}", flush=True)
    report_code = commands.main(command)
    has_learnt = undisturbed.accuracy >= 0.97
    is_equal = all(row[-1] for row in rows) and has_differed and report_code == 0
    print(f"\n  Both loss curves:  {_shown(folder / 'losses.png')}")
    print(f"  TensorBoard:       .venv/bin/tensorboard --logdir {_shown(folder)}\n")
    if not has_learnt:
        print(f"The network did not learn: {undisturbed.accuracy:.2%} is below 97 %.")
    if is_equal:
        whoever = "" if killed.nproc is None else "On four processes, on two or on one, "
        text = f"{whoever}killed or not: the same losses, the same samples, the same weights"
        print(f"{text[0].upper()}{text[1:]}, bit for bit.")
    else:
        print("The runs DIFFER; see the rows marked NO.")
    return 0 if is_equal and has_learnt else 1


def _compare_ledgers(undisturbed: Run, killed: Run) -> bool:
    """Show ``helios diff`` on equal and on different runs; returns whether it says so."""
    exchanged = dataclasses.replace(
        undisturbed, folder=undisturbed.folder.parent / "exchanged", is_exchanged=True
    )
    print("\nOne epoch again, with two of 1,280 images exchanged ...", flush=True)
    exchanged.train([])
    codes = []
    for other in (killed, exchanged):
        first, second = _shown(undisturbed.folder), _shown(other.folder)
        print(f"\n  $ helios diff {first} {second}", flush=True)
        codes.append(commands.main(["diff", str(first), str(second)]))
        print(f"  (exit code {codes[-1]})")
    # Exit code 1 is also that of a run that is shorter.
    return codes == [0, 1] and diff(undisturbed.folder, exchanged.folder).iteration is not None


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "demo-output", help="output folder")
    parser.add_argument("--kills", type=int, default=5, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills")
    parser.add_argument("--processes", action="store_true", help="on 4 processes, then 2, then 1")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--replicas", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--nproc", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--exchanged", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        exchanged = options.exchanged
        return run_training(options.train, options.replicas, options.nproc, is_exchanged=exchanged)
    out = options.out
    if options.processes:
        runs = Run(out / "four-processes", 4, (4,)), Run(out / "four-two-one", 4, (4, 2, 1))
    else:
        runs = Run(out / "undisturbed"), Run(out / "killed")
    interrupt_at_signals()
    try:
        return demonstrate(*runs, 2 if options.processes else options.kills, options.seed)
    except KeyboardInterrupt:
        print("Interrupted; the training was ended.")
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
