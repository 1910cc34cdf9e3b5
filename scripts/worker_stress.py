"""Start loader workers by the thousand in busy ranks; say how many hung, and check all batches.

A forked worker inherits the locks that other threads of its rank hold at that moment. So a thread
of each rank keeps gloo busy, whose threads call Python after each exchange, and processes that burn
CPU interrupt threads while they hold a lock. Passes are short: most of the time workers start. A
rank that waits too long for a pass writes the stacks of its threads and ends the trial.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 (found by the line above)
import torch.distributed as dist  # noqa: E402

from helios.data import create_dataloader, worker_recovery, workers  # noqa: E402
from helios.data.phase_sources import open_source  # noqa: E402
from helios.data.source import Source  # noqa: E402
from tests.data.datasets import FETCH, Augmented  # noqa: E402
from tests.support import stuck_workers  # noqa: E402
from tests.support.started import interrupt_at_signals  # noqa: E402

POLL_SECONDS, WORD_SECONDS = 0.1, 60.0
FORK = multiprocessing.get_context("fork")


@dataclasses.dataclass(frozen=True)
class Options:
    """What is tried.

    Attributes:
        starts: workers that begin, in all ranks together; rounded up to whole passes.
        ranks: in a gloo group.
        workers: of a pass.
        burners: processes that burn CPU.
        patience: seconds without progress after which a worker is replaced.
        limit: seconds that a pass may take.
        hang_every: each so-manieth fork of a rank hangs; 0 for none.
    """

    starts: int
    ranks: int
    workers: int
    burners: int
    patience: float
    limit: float
    hang_every: int

    @property
    def passes(self) -> int:
        """Passes of each rank."""
        return -(-self.starts // (self.ranks * self.workers))


class Counts(ctypes.Structure):
    """What has happened in a rank, in memory that it shares with the script."""

    _fields_ = (
        ("passes", ctypes.c_long),
        ("wrong", ctypes.c_long),
        ("replaced", ctypes.c_long),
        ("slowest", ctypes.c_double),
    )


class Replacements(logging.Handler):
    """Counts and shows the workers of a rank that are replaced."""

    def __init__(self, rank: int, counts: Any) -> None:
        super().__init__()
        self._rank, self._counts = rank, counts

    def emit(self, record: logging.LogRecord) -> None:
        """Count one."""
        self._counts.replaced += 1
        print(f"rank {self._rank}: {record.getMessage()}", flush=True)


def open_data(num_workers: int, num_samples: int) -> Source:
    """Open a data set whose samples are their indices and numbers that a fetch draws."""
    loader, sampler = create_dataloader(
        Augmented(num_samples),
        batch_size=2,
        shuffle=True,
        num_workers=num_workers,
        pin_memory=False,
        is_distributed=False,
        multiprocessing_context="fork" if num_workers else None,
    )
    return open_source(loader, sampler, run_seed=7, purpose=FETCH)


def read_passes(options: Options, counts: Any) -> None:
    """Read passes, by workers and without."""
    num_samples = 4 * options.workers
    source, local = (open_data(number, num_samples) for number in (options.workers, 0))
    for number in range(options.passes):
        faulthandler.dump_traceback_later(options.limit, exit=True)
        begin = time.monotonic()
        batches = source.batches(number)
        counts.slowest = max(counts.slowest, time.monotonic() - begin)
        found = torch.cat([batch for (batch,) in batches])
        expected = torch.cat([batch for (batch,) in local.batches(number)])
        is_whole = found[:, 0].sort().values.tolist() == [*range(num_samples)]
        counts.wrong += not (is_whole and torch.equal(found, expected))
        counts.passes += 1
    faulthandler.cancel_dump_traceback_later()


def keep_busy(group: Any, is_done: threading.Event) -> None:
    """Exchange tensors until all ranks have read their passes."""
    num_left = torch.ones(1)
    while num_left[0] > 0:
        num_left = torch.full((1000,), float(not is_done.is_set()))
        work = dist.all_reduce(num_left, group=group, async_op=True)
        work.get_future().then(bool).wait()


def serve(options: Options, rank: int, counts: Any, meeting: Path) -> None:
    """Be a rank, in a group of processes with its workers."""
    parent = os.getppid()
    # Not a session, which Linux would schedule apart from the burners.
    os.setpgid(0, 0)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    warnings.filterwarnings("ignore", "This DataLoader will create")
    workers.FORKED_PATIENCE = options.patience
    for module in (workers, worker_recovery):
        logger = logging.getLogger(module.__name__)
        logger.addHandler(Replacements(rank, counts))
        logger.propagate = False
    store = dist.FileStore(str(meeting), options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    is_done = threading.Event()
    exchange = threading.Thread(target=keep_busy, args=(dist.new_group(), is_done), daemon=True)
    exchange.start()
    forks = range(options.hang_every, 10**6, options.hang_every) if options.hang_every else ()
    with stuck_workers.forks(dict.fromkeys(forks, stuck_workers.hang)):
        read_passes(options, counts)
    is_done.set()
    exchange.join()
    # Destructors of a group may wait for ranks that are gone.
    os._exit(0)


def end_with(parent: int) -> None:
    """End this rank and its workers when the script is gone, even if that was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def burn() -> None:
    """Keep a processor busy as long as the script runs."""
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(10**5))


def watch(ranks: list[BaseProcess], counts: Any, options: Options) -> None:
    """Wait until all ranks have ended, or one has failed."""
    said = time.monotonic()
    while any(rank.exitcode is None for rank in ranks):
        if any(rank.exitcode for rank in ranks):
            return
        if time.monotonic() - said > WORD_SECONDS:
            said = time.monotonic()
            print(describe(counts, options), flush=True)
        # Their sentinels are not ready while a worker lives that has inherited them.
        time.sleep(POLL_SECONDS)


def end(processes: list[BaseProcess]) -> None:
    """End all processes, and those that they have started."""
    for process in processes:
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join()


def describe(counts: Any, options: Options) -> str:
    """Say what has happened so far."""
    passes, replaced = sum(each.passes for each in counts), sum(each.replaced for each in counts)
    return (
        f"{passes * options.workers} worker starts, {options.workers} a pass, in {options.ranks} "
        f"ranks beside {options.burners} busy processes: {replaced} replaced, "
        f"{sum(each.wrong for each in counts)} of {passes} passes wrong, "
        f"slowest start of a pass {max(each.slowest for each in counts):.2f} s"
    )


def run(options: Options, folder: Path) -> int:
    """Try it; returns an exit code."""
    counts: Any = RawArray(Counts, options.ranks)
    begin, is_interrupted = time.monotonic(), False
    ranks: list[BaseProcess] = [
        FORK.Process(target=serve, args=(options, rank, counts[rank], folder / "meeting"))
        for rank in range(options.ranks)
    ]
    burners: list[BaseProcess] = [FORK.Process(target=burn) for _ in range(options.burners)]
    try:
        for process in (*ranks, *burners):
            process.start()
        watch(ranks, counts, options)
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        codes = [rank.exitcode for rank in ranks]
        end([*ranks, *burners])
    print(f"{describe(counts, options)}; {time.monotonic() - begin:.0f} s", flush=True)
    if is_interrupted:
        print("Interrupted; all processes were ended.")
        return 130
    if any(codes):
        print(f"FAULT ranks ended with {codes}; None was ended because of another one")
    return int(any(codes) or any(each.wrong for each in counts))


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=20_000, help="of workers, in all ranks")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4, help="of a pass")
    parser.add_argument("--burners", type=int, default=8, help="processes that burn CPU")
    parser.add_argument("--patience", type=float, default=workers.FORKED_PATIENCE, help="seconds")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a pass may take")
    parser.add_argument("--hang-every", type=int, default=0, help="forks of a rank until one hangs")
    options = Options(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    interrupt_at_signals()
    with tempfile.TemporaryDirectory() as folder:
        return run(options, Path(folder))


if __name__ == "__main__":
    raise SystemExit(main())
