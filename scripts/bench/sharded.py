"""Times a step of sharded models: Helios, stock FSDP2, and whole models, in one run.

``python scripts/bench/sharded.py [processes]``, by default 2 and 4, on the CPU, or on as many GPUs.
A transformer of eight blocks, AdamW, one replica per process, no loader. The three take turns for
some rounds; the table shows the fastest round of each, and the memory that parameters, gradients
and the optimizer fill on rank 0. Of Helios it shows the beginning of a run, where the processes
compare each call of a unit, and what follows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from helios.core.sharded_tensors import local_of
from helios.distributed.process_groups import DistributedInfo
from helios.engines.engine import Engine
from helios.launch.spawning import spawn
from helios.replicas.replicas import Replicas
from helios.sharding.units import find_units

WIDTH, BLOCKS, LENGTH, BATCH = 384, 8, 32, 4
ROUNDS, STEPS = 6, 4
NAMES = ("whole", "stock FSDP2", "Helios")
# Of each unit, the start and the end of its forward, its backward and its sum are compared; the
# rounds of the beginning are fewer steps than this.
BEGIN_STEPS = 1000 // (4 * (BLOCKS + 1)) + 1


class Net(nn.Module):
    """Blocks of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make_step(name: str, device: torch.device, info: DistributedInfo) -> Callable[[], nn.Module]:
    """Return a function that makes a step, and returns the network."""
    torch.manual_seed(0)
    net = Net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=True)
    engine = Engine(device)
    engine.replicas = Replicas(info.world_size, info, device=device, is_sharded=name == "Helios")
    if name == "Helios":
        units = find_units({"net": net}, [*net.blocks])
        engine._shard({"net": net}, {"optimizer": optimizer}, units)
    elif name == "stock FSDP2":
        for module in (*net.blocks, net):
            fully_shard(module)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=True)
    batch = torch.randn(BATCH, LENGTH, WIDTH, device=device)

    def step() -> nn.Module:
        net(batch).square().mean().backward()
        if name != "stock FSDP2":
            engine._open_micro_batches += 1
            engine._gradients.collect(optimizer, info.rank, dict, ends_window=True)
            engine.average_gradients(optimizer)
            engine.close_window()
        optimizer.step()
        optimizer.zero_grad()
        return net

    return step


def run(rank: int, num_processes: int) -> dict[str, tuple[float, float]]:
    torch.set_num_threads(1)
    is_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= num_processes
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    info = DistributedInfo(rank, rank, num_processes, num_processes)
    steps = {name: make_step(name, device, info) for name in NAMES}
    memory = {}
    for name, step in steps.items():
        net = step()
        # Parameters and two moments; gradients have the size of the parameters.
        memory[name] = 4 * sum(local_of(each.detach()).nbytes for each in net.parameters()) / 2**20

    def measure() -> dict[str, float]:
        best = dict.fromkeys(NAMES, float("inf"))
        for _ in range(ROUNDS):
            for name, step in steps.items():
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(STEPS):
                    step()
                if is_gpu:
                    torch.cuda.synchronize()
                best[name] = min(best[name], (time.perf_counter() - begin) / STEPS)
        return best

    first = measure()
    for _ in range(BEGIN_STEPS):
        steps["Helios"]()
    later = measure()
    found = {name: (later[name] * 1e3, memory[name]) for name in NAMES}
    # As if the machine had been as fast then.
    scale = later["stock FSDP2"] / first["stock FSDP2"]
    return found | {"Helios, beginning": (first["Helios"] * scale * 1e3, memory["Helios"])}


def main() -> None:
    counts = [int(text) for text in sys.argv[1:]] or [2, 4]
    print("| processes | | a step | ratio | parameters, gradients, optimizer of a rank |")
    print("|---:|---|---:|---:|---:|")
    for count in counts:
        found = spawn(run, count, (count,))[0]
        for name, (milliseconds, memory) in found.items():
            ratio = milliseconds / found["stock FSDP2"][0]
            print(f"| {count} | {name} | {milliseconds:.0f} ms | {ratio:.2f} | {memory:.0f} MiB |")


if __name__ == "__main__":
    main()
