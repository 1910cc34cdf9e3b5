"""Time and memory of the order of an epoch, from 10^5 to 10^12 samples.

Helios' keyed order against ``torch.utils.data.RandomSampler``, which holds the whole epoch and
resumes by skipping. Rows show the milliseconds and the MiB before the first batch of 32, at the
start of an epoch and at 90 % of it, and the nanoseconds that an index then takes: in batches, and
in batches with their keys, which Helios needs and RandomSampler has not::

    .venv/bin/python scripts/bench/order.py [--large]

``--mixtures`` measures mixtures in place of that: milliseconds to the first block of samples, from
positions up to 10^12; of each position the fastest of some repetitions, over positions the median
and the slowest.

MiB are those of ``tracemalloc``, which sees NumPy, for Helios; for RandomSampler, whose tensor
``tracemalloc`` does not see, they are the growth of a fresh process. ``--large`` adds
RandomSampler's row of 10^8, which takes 5 GiB and a minute.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple

from torch.utils.data import BatchSampler, RandomSampler

from helios.data import Mixture
from helios.data.loader import KeyedBatchSampler
from helios.data.mixture import MixtureSampler
from helios.data.order import Position, PositionalOrder
from helios.data.samplers import ResumableRandomSampler

BATCH_SIZE = 32
NUM_BATCHES = 10_000
NUM_REPEATS = 7
NUM_POSITIONS = 100
MIB = 2**20
SHARES = (0.0, 0.9)

Batches = Iterator[list[int]]


class Row(NamedTuple):
    """What one order took: seconds and MiB to the first batch, seconds per index."""

    first: float
    mib: float
    index: float
    keyed_index: float | None = None


def helios_batches(length: int, start: int, seed: int = 0, *, is_keyed: bool = True) -> Batches:
    """Return the batches that a trainer's loader gets from a position on, or their lists only."""
    order = PositionalOrder(ResumableRandomSampler(range(length), seed=seed))
    batches = KeyedBatchSampler(order, batch_size=BATCH_SIZE)
    place = Position(batch=start // BATCH_SIZE, sample=start)
    if not is_keyed:
        return batches.lists(place)
    batches.seek(place)
    return (keyed.indices for keyed in batches)


def torch_batches(length: int, start: int) -> Batches:
    """Return batches of a RandomSampler, the ones before a position drawn and dropped."""
    batches = BatchSampler(RandomSampler(range(length)), BATCH_SIZE, drop_last=False)
    return islice(iter(batches), start // BATCH_SIZE, None)


def seconds_to_first(make: Callable[[], Batches]) -> float:
    """Return the seconds until the first batch is there."""
    begin = time.perf_counter()
    next(make())
    return time.perf_counter() - begin


def seconds_per_index(batches: Batches) -> float:
    """Return the mean over whole blocks, after the first batch."""
    next(batches)
    begin = time.perf_counter()
    count = sum(map(len, islice(batches, NUM_BATCHES)))
    return (time.perf_counter() - begin) / count


def measure_helios(length: int, start: int) -> Row:
    """Measure the keyed order: medians over seeds, with and without keys in turn."""
    first, plain, keyed = [], [], []
    for seed in range(NUM_REPEATS):
        make = partial(helios_batches, length, start, seed)
        first.append(seconds_to_first(make))
        plain.append(seconds_per_index(make(is_keyed=False)))
        keyed.append(seconds_per_index(make()))
    tracemalloc.start()
    next(helios_batches(length, start))
    mib = tracemalloc.get_traced_memory()[1] / MIB
    tracemalloc.stop()
    return Row(statistics.median(first), mib, statistics.median(plain), statistics.median(keyed))


def peak_mib() -> float:
    """Return the most memory that this process ever held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def measure_torch(length: int, start: int) -> Row:
    """Measure a RandomSampler once, in a process that did nothing else before."""
    before = peak_mib()
    batches = torch_batches(length, start)
    first = seconds_to_first(lambda: batches)
    mib = peak_mib() - before
    return Row(first, mib, seconds_per_index(batches))


def measure_in_fresh_process(length: int, start: int) -> Row:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure_torch, (length, start))


def show(name: str, length: int, share: float, row: Row) -> None:
    keyed = "-" if row.keyed_index is None else f"{row.keyed_index * 1e9:.0f}"
    print(
        f"{name:<14} 10^{len(str(length)) - 1:<4} {share:>5.0%} {row.first * 1e3:>12.2f} "
        f"{row.mib:>10.2f} {row.index * 1e9:>9.0f} {keyed:>9}",
        flush=True,
    )


def seek_mixture(lengths: list[int]) -> list[float]:
    """Return the milliseconds to the first block of a mixture, from some positions, sorted."""
    sources = {str(n): (range(length), 0.1 + 0.37 * n) for n, length in enumerate(lengths)}
    sampler = MixtureSampler(Mixture(sources, length=10**13))
    draw = random.Random(0)
    found = []
    for _ in range(NUM_POSITIONS):
        start = int(10 ** draw.uniform(0, 12))
        make = partial(sampler.blocks, start)
        found.append(min(seconds_to_first(make) for _ in range(NUM_REPEATS)) * 1e3)
    return sorted(found)


def show_mixtures() -> None:
    """Print a row for each number and kind of sources."""
    kinds: dict[str, Callable[[int], list[int]]] = {
        "3, 4 ...": lambda count: [3 + n for n in range(count)],
        "1,000, 1,007 ...": lambda count: [1_000 + 7 * n for n in range(count)],
        "50 ... 10^12": lambda count: [int(50 * 2e10 ** (n / (count - 1))) for n in range(count)],
        "2^20 + 1": lambda count: [2**20 + 1] * count,
    }
    print(f"{'sources':>7} {'samples of each':<16} {'median [ms]':>12} {'slowest [ms]':>13}")
    for count in (2, 4, 8, 16):
        for name, lengths_of in kinds.items():
            found = seek_mixture(lengths_of(count))
            print(f"{count:>7} {name:<16} {statistics.median(found):>12.2f} {found[-1]:>13.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="RandomSampler at 10^8 too")
    parser.add_argument("--mixtures", action="store_true", help="mixtures in place of that")
    arguments = parser.parse_args()
    if arguments.mixtures:
        show_mixtures()
        return
    largest = 10**8 if arguments.large else 10**7
    print(
        f"{'order':<14} {'samples':<7} {'from':>5} {'first [ms]':>12} {'MiB':>10} "
        f"{'ns/index':>9} {'with keys':>9}"
    )
    for exponent in range(5, 13):
        length = 10**exponent
        for share in SHARES:
            start = int(length * share) // BATCH_SIZE * BATCH_SIZE
            show("Helios", length, share, measure_helios(length, start))
            if length <= largest:
                show("RandomSampler", length, share, measure_in_fresh_process(length, start))


if __name__ == "__main__":
    main()
