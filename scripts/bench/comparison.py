"""What a kill and the number of processes change in runs of Helios and other trainers.

The same training with the public API of each: an MLP, Adam, three epochs of 16 steps of 16 samples,
a checkpoint every five steps. It is killed (SIGKILL) in step 23, in the middle of the second epoch,
and the same command is run again. What the second start does is compared with a run that was not
killed, bit for bit. It is also run on 1, 2 and 4 processes (torchrun, gloo) with the same global
batch. "Random" adds dropout and augmentation. Prints tables in Markdown::

    python -m venv .venv-comparison
    .venv-comparison/bin/pip install -e . lightning accelerate transformers torchdata
    .venv-comparison/bin/python scripts/bench/comparison.py [--only helios lightning]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS, STEPS_PER_EPOCH, BATCH, SAVE_EVERY, KILL_AT = 3, 16, 16, 5, 23
STEPS = EPOCHS * STEPS_PER_EPOCH
PROCESSES = (1, 2, 4)
SEED = 1
GENERATORS = ("torch", "random", "np.random")
KILL_SWITCH = "COMPARISON_KILL"
LIBRARIES = ("torch", "helios-trainer", "lightning", "accelerate", "transformers", "torchdata")


class Samples(Dataset):
    """Vectors with their index, augmented with noise if the training is random."""

    def __init__(self, is_random: bool) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(STEPS_PER_EPOCH * BATCH, 16, generator=draw)
        self.is_random = is_random

    def __len__(self) -> int:
        return STEPS_PER_EPOCH * BATCH

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = self.x[index]
        noise = 0.1 * torch.randn(16) if self.is_random else torch.zeros(16)
        return {"x": x + noise, "labels": int(x.sum() > 0), "index": index}


class Task:
    """One training of a trainer: what it trains, and what it writes down in its folder."""

    def __init__(self, folder: Path, is_random: bool, num_workers: int) -> None:
        self.folder, self.is_random, self.num_workers = folder, is_random, num_workers
        self.rank = int(os.environ.get("RANK", "0"))
        self.num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        self.samples = Samples(is_random)

    def make_network(self) -> nn.Module:
        """Return a network with the same weights at each start."""
        torch.manual_seed(0)
        dropout = nn.Dropout(0.25 if self.is_random else 0.0)
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), dropout, nn.Linear(32, 2))

    def make_loader(self, loader: Callable[..., Any] = DataLoader, *, divides: bool = True) -> Any:
        """Return a loader of this process's part of the global batch, or of all of it."""
        size = BATCH // self.num_processes if divides else BATCH
        return loader(self.samples, batch_size=size, shuffle=True, num_workers=self.num_workers)

    def compute_loss(
        self, network: nn.Module, batch: dict[str, Any], step: int, replica: int = 0
    ) -> torch.Tensor:
        """Return the loss of a step, counted from 1; writes it down, or dies."""
        loss = nn.functional.cross_entropy(network(batch["x"]), batch["labels"])
        draws = [torch.rand(()).item(), random.random(), np.random.random()]
        row = {
            "place": [step, self.rank, replica],
            "samples": batch["index"].tolist(),
            "loss": loss.item().hex(),
            "draws": [draw.hex() for draw in draws] if self.is_random else [],
        }
        if step == KILL_AT and os.environ.get(KILL_SWITCH):
            os.kill(os.getpid(), signal.SIGKILL)
        with (self.folder / f"record-{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        return loss

    def finish(self, network: nn.Module) -> None:
        """Write down the weights."""
        if self.rank == 0:
            values = [weight.detach().flatten() for weight in network.parameters()]
            np.save(self.folder / "weights.npy", torch.cat(values).numpy())


def make_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), lr=0.01)


def train_helios(task: Task, *, num_replicas: int = 1) -> None:
    """Train with ``helios.Trainer``; it resumes by itself."""
    import helios

    class Model(helios.Model):
        def setup(self, fast_init: bool = False) -> None:
            self.network = task.make_network()
            self.optimizer = make_optimizer(self.network)

        def train_step(self, batch: Any, state: helios.TrainingState) -> torch.Tensor:
            replica = self.context.replica
            return task.compute_loss(self.network, batch, state.global_iteration, replica)

    class Data(helios.DataModule):
        def setup(self) -> None:
            params = helios.DataLoaderParams(
                batch_size=BATCH // num_replicas, shuffle=True, num_workers=task.num_workers
            )
            self._train_dataset = self._create_dataset(task.samples, params)

    model = Model("model")
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=STEPS,
        chkpt_frequency=SAVE_EVERY,
        chkpt_root=task.folder,
        num_replicas=num_replicas,
        random_seed=SEED,
        use_cpu=True,
    )
    trainer.fit(model, Data())
    task.finish(model.network)


def train_lightning(task: Task, *, loader: Callable[..., Any] = DataLoader) -> None:
    """Train with Lightning's ``Trainer``, from ``ckpt_path="last"`` if there is one."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = task.make_network()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return task.compute_loss(self.network, batch, self.global_step + 1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.network)

    module = Module()
    lightning.seed_everything(SEED, workers=True)
    saving = ModelCheckpoint(
        task.folder, every_n_train_steps=SAVE_EVERY, save_last=True, save_top_k=-1
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=task.num_processes,
        strategy="ddp" if task.num_processes > 1 else "auto",
        max_epochs=EPOCHS,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        default_root_dir=task.folder,
    )
    last = "last" if (task.folder / "last.ckpt").exists() else None
    trainer.fit(module, task.make_loader(loader), ckpt_path=last)
    task.finish(module.network)


def train_lightning_stateful(task: Task) -> None:
    """Train with Lightning and torchdata's loader, whose state Lightning saves."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    train_lightning(task, loader=StatefulDataLoader)


def train_accelerate(task: Task) -> None:
    """Train with ``save_state``, ``load_state``, a seedable sampler and ``skip_first_batches``."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    network = task.make_network()
    set_seed(SEED)
    configuration = DataLoaderConfiguration(use_seedable_sampler=True, split_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    prepared, optimizer, loader = accelerator.prepare(
        network, make_optimizer(network), task.make_loader(divides=False)
    )
    saved = [int(path.name) for path in task.folder.glob("[0-9]*")]
    step = max(saved, default=0)
    if step:
        accelerator.load_state(str(task.folder / str(step)))
    first, skipped = divmod(step, STEPS_PER_EPOCH)
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        rest = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        skipped = 0
        for batch in rest:
            step += 1
            accelerator.backward(task.compute_loss(prepared, batch, step))
            optimizer.step()
            optimizer.zero_grad()
            if step % SAVE_EVERY == 0:
                accelerator.save_state(str(task.folder / str(step)))
    task.finish(network)
    accelerator.end_training()


def train_transformers(task: Task) -> None:
    """Train with the ``Trainer`` of transformers, from its last checkpoint if there is one."""
    import transformers
    from transformers.trainer_utils import get_last_checkpoint

    class Trainer(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            return task.compute_loss(model, inputs, self.state.global_step + 1)

    network = task.make_network()
    arguments = transformers.TrainingArguments(
        output_dir=str(task.folder),
        use_cpu=True,
        ddp_backend="gloo" if task.num_processes > 1 else None,
        seed=SEED,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH // task.num_processes,
        dataloader_num_workers=task.num_workers,
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(
        model=network,
        args=arguments,
        train_dataset=task.samples,
        optimizers=(make_optimizer(network), None),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(task.folder)))
    task.finish(network)


TRAINERS: dict[str, Callable[..., None]] = {
    "helios": train_helios,
    "lightning": train_lightning,
    "lightning with StatefulDataLoader": train_lightning_stateful,
    "accelerate": train_accelerate,
    "transformers": train_transformers,
}


class Runs:
    """The trainings of one trainer, each in a folder and in processes of its own."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root / str(list(TRAINERS).index(name))

    def start(
        self, folder: Path, flags: list[str], *, num_processes: int = 1, is_killed: bool = False
    ) -> None:
        """Run the training once, and check that it ended as it should."""
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable]
        if num_processes > 1:
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        command += [__file__, "--train", self.name, "--folder", str(folder), *flags]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", KILL_SWITCH: "1" if is_killed else ""}
        with (folder / "console.txt").open("ab") as log:
            done = subprocess.run(command, stdout=log, stderr=log, env=variables, check=False)
        if done.returncode != (-signal.SIGKILL if is_killed else 0):
            raise SystemExit(f"{self.name} ended with {done.returncode}; see {folder}/console.txt.")

    def resume(self, flags: list[str]) -> dict[str, str]:
        """Compare a run that was killed and resumed with one that was not."""
        label = "-".join(["resume", *flags])
        whole, killed = (self.root / label / name for name in ("whole", "killed"))
        self.start(whole, flags)
        self.start(killed, flags, is_killed=True)
        num_before = sum(map(len, read(killed).values()))
        self.start(killed, flags)
        expected = {place: rows[0] for place, rows in read(whole).items()}
        found = read(killed)
        again = sum(map(len, found.values())) - num_before
        pairs = [(row, expected.get(place)) for place, rows in found.items() for row in rows]
        cells = {"steps of the second start": str(again)}
        cells["samples of each step"] = same(
            found.keys() == expected.keys()
            and all(other and row["samples"] == other["samples"] for row, other in pairs)
        )
        for number, name in enumerate(GENERATORS if "--random" in flags else ()):
            cells[f"numbers of {name}"] = same(
                all(
                    other and row["draws"][number] == other["draws"][number] for row, other in pairs
                )
            )
        cells["weights"] = same_weights([whole, killed])
        return cells

    def spread(self, flags: list[str]) -> dict[str, str]:
        """Compare runs on different numbers of processes."""
        folders, batches = [], []
        for num_processes in PROCESSES:
            folder = self.root / "-".join(["spread", *flags]) / str(num_processes)
            self.start(folder, [*flags, "--spread"], num_processes=num_processes)
            steps: dict[int, list[int]] = {}
            for (step, *_), rows in read(folder).items():
                steps.setdefault(step, []).extend(rows[0]["samples"])
            batches.append({step: sorted(samples) for step, samples in steps.items()})
            folders.append(folder)
        return {
            "samples of each global batch": same(batches.count(batches[0]) == len(batches)),
            "weights": same_weights(folders),
        }


def read(folder: Path) -> dict[tuple[int, ...], list[dict[str, Any]]]:
    """Return what was recorded, by step, rank and replica, in the order in which it was made."""
    found: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for path in folder.glob("record-*.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            found.setdefault(tuple(row["place"]), []).append(row)
    return found


def same(is_same: bool) -> str:
    return "same" if is_same else "differ"


def same_weights(folders: list[Path]) -> str:
    """Compare the weights of runs with those of the first one, on their bytes."""
    first, *others = (np.load(folder / "weights.npy") for folder in folders)
    if all(other.tobytes() == first.tobytes() for other in others):
        return "same"
    return f"differ by {max(np.abs(other - first).max() for other in others):.0e}"


def measure(name: str, root: Path) -> dict[str, dict[str, str]]:
    """Return the cells of a trainer, by table and row."""
    runs = Runs(name, root)
    noisy = ["--random"]
    return {
        "Killed and resumed": runs.resume([]),
        "Killed and resumed, random": runs.resume(noisy),
        "Killed and resumed, random, two loader workers": runs.resume([*noisy, "--workers", "2"]),
        "1, 2 and 4 processes": runs.spread([]),
        "1, 2 and 4 processes, random": runs.spread(noisy),
    }


def print_tables(columns: dict[str, dict[str, dict[str, str]]]) -> None:
    """Print date, versions and a table for each kind of comparison."""
    versions = []
    for library in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{library} {importlib.metadata.version(library)}")
    print(f"{datetime.date.today()}: {', '.join(versions)}")
    for title, rows in next(iter(columns.values())).items():
        print(f"\n{title}:\n\n| | {' | '.join(columns)} |")
        print(f"|---|{'---|' * len(columns)}")
        for row in rows:
            print(f"| {row} | {' | '.join(column[title][row] for column in columns.values())} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--train", choices=TRAINERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--random", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--spread", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        task = Task(args.folder, args.random, args.workers)
        options = {"num_replicas": max(PROCESSES)} if args.spread and args.train == "helios" else {}
        TRAINERS[args.train](task, **options)
        return
    with tempfile.TemporaryDirectory() as root:
        print_tables({name: measure(name, Path(root)) for name in args.only})


if __name__ == "__main__":
    main()
