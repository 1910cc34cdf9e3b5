"""Models what summing gradients costs on many machines: the tree, rings, and NCCL's tree.

Nothing is measured here. The time of a round is its latency plus the bytes of the slowest process
over the bandwidth of the link that it uses; rounds follow each other. ``python
scripts/bench/exchange_costs.py`` prints a table.
"""

from __future__ import annotations

import math

GPUS = 8
# Seconds, and bytes per second of one GPU: NVLink inside a machine, one 400 Gbit/s adapter outside.
INSIDE, OUTSIDE = (2e-6, 400e9), (8e-6, 50e9)
SIZES = {"100 MB": 100e6, "1 MB": 1e6}


def _round(num_bytes: float, *, is_outside: bool) -> float:
    latency, bandwidth = OUTSIDE if is_outside else INSIDE
    return latency + num_bytes / bandwidth


def halving(num_ranks: int, num_bytes: float) -> tuple[int, float, float, float]:
    """Recursive halving, nearest rank first: rounds, bytes sent, bytes sent outside, seconds."""
    sent = outside = seconds = 0.0
    for level in range(int(math.log2(num_ranks))):
        part = num_bytes / 2 ** (level + 1)
        is_outside = 2**level >= GPUS
        sent += part
        outside += part * is_outside
        seconds += _round(part, is_outside=is_outside)
    return int(math.log2(num_ranks)), sent, outside, seconds


def ring(num_ranks: int, num_bytes: float) -> tuple[int, float, float, float]:
    """Rings through all machines, one for each adapter of a machine, in parallel."""
    part, rounds = num_bytes / num_ranks, num_ranks - 1
    inside = _round(part, is_outside=False)
    outside = _round(part / GPUS, is_outside=True) if num_ranks > GPUS else 0.0
    sent = part * rounds
    share = sent / GPUS if num_ranks > GPUS else 0.0
    return rounds, sent, share, rounds * max(inside, outside)


def double_tree(num_ranks: int, num_bytes: float) -> tuple[int, float, float, float]:
    """NCCL's tree: chains inside of machines, two pipelined trees between them; a whole sum."""
    machines = max(1, num_ranks // GPUS)
    rounds = 2 * (GPUS - 1 + math.ceil(math.log2(machines)))
    inside = 2 * (GPUS - 1) * INSIDE[0] + 2 * num_bytes / INSIDE[1]
    # The adapters of all GPUs of a machine carry the tree, and each byte goes up and down.
    between = 2 * math.ceil(math.log2(machines)) * OUTSIDE[0]
    between += 2 * num_bytes / (GPUS * OUTSIDE[1]) if machines > 1 else 0.0
    outside = 2 * num_bytes / GPUS if machines > 1 else 0.0
    return rounds, 2 * num_bytes, outside, inside + between


def main() -> None:
    for name, num_bytes in SIZES.items():
        print(f"\n{name} of gradients\n\n| ranks | way | rounds | sent | of it outside | time |")
        print("|---:|---|---:|---:|---:|---:|")
        for num_ranks in (8, 64, 1024, 16384):
            for label, way in (("halving", halving), ("rings", ring), ("NCCL's tree", double_tree)):
                rounds, sent, outside, seconds = way(num_ranks, num_bytes)
                print(
                    f"| {num_ranks:,} | {label} | {rounds:,} | {sent / 1e6:.2f} MB | "
                    f"{outside / 1e6:.2f} MB | {seconds * 1e3:.2f} ms |"
                )


if __name__ == "__main__":
    main()
