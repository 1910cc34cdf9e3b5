"""What users extend is as exact as what is ours: eight trainings, killed twice each.

Those that any number of processes may run are compared with an undisturbed run in one process;
those that need a process for each replica with one in as many.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helios.plugins import Plugin
from tests.support.elastic import KillRank
from tests.support.extended import EXTENSIONS, read_bits, start
from tests.support.ranks import RankError, run_ranks

_SPREAD = [name for name, each in EXTENSIONS.items() if not each.refused]
_BOUND = [name for name, each in EXTENSIONS.items() if each.refused]
_EVENTS = ("on_training_batch_end", "on_training_batch_start")
"""A manual step has no other events."""


def _work(rank: int, folder: Path, name: str, num_replicas: int, *plugins: Plugin) -> None:
    start(folder, name, *plugins, num_replicas=num_replicas)


def _work_alone(rank: int, folder: Path, name: str, num_replicas: int, *plugins: Plugin) -> None:
    dist.destroy_process_group()
    start(folder, name, *plugins, num_replicas=num_replicas)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def run(folder: Path, name: str, num_processes: int, num_replicas: int, *plugins: Plugin) -> None:
    work = _work_alone if num_processes == 1 else _work
    folder.mkdir(exist_ok=True)
    run_ranks(work, num_processes, folder, name, num_replicas, *plugins)


def run_with_kills(
    folder: Path, name: str, num_replicas: int, processes: tuple[int, int, int]
) -> dict[str, str]:
    """Kill one rank in the third iteration and all in the eighth; returns what is left."""
    for event, iteration, rank, count in zip(_EVENTS, (3, 8), (0, None), processes, strict=False):
        with pytest.raises(RankError, match="-9"):
            run(folder, name, count, num_replicas, KillRank(event, iteration, rank))
    run(folder, name, processes[2], num_replicas)
    return read_bits(folder)


def assert_equal(found: dict[str, str], expected: dict[str, str]) -> None:
    different = [name for name in expected if found.get(name) != expected[name]]
    assert not different
    assert found.keys() == expected.keys()


@pytest.mark.shows("L46")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", _SPREAD)
def test_what_users_extend_has_the_same_bits_on_any_number_of_processes(
    name: str, tmp_path: Path
) -> None:
    run(tmp_path / "whole", name, 1, 2)
    killed = run_with_kills(tmp_path / "killed", name, 2, (2, 1, 2))
    assert_equal(killed, read_bits(tmp_path / "whole"))


@pytest.mark.parametrize("name", _BOUND)
def test_what_needs_a_process_for_each_replica_has_the_same_bits_after_kills(
    name: str, tmp_path: Path
) -> None:
    run(tmp_path / "whole", name, 2, 2)
    killed = run_with_kills(tmp_path / "killed", name, 2, (2, 2, 2))
    assert_equal(killed, read_bits(tmp_path / "whole"))


@pytest.mark.parametrize("name", _BOUND)
def test_what_needs_a_process_for_each_replica_says_so(name: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=EXTENSIONS[name].refused):
        run(tmp_path, name, 1, 2)


_PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "scripted-loop.md"


def _run_script(rank: int, folder: Path) -> bool:
    """Run the loop of the page, whole and cut twice; returns whether both end alike."""
    blocks = re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    script: dict[str, Any] = {"__name__": "page"}
    exec("".join(blocks).partition("\nfolder = Path(")[0], script)
    _, whole = script["train"](folder / "whole.pth")
    for steps in (3, 7):
        with pytest.raises(KeyboardInterrupt):
            script["train"](folder / "cut.pth", stop_after=steps)
    _, resumed = script["train"](folder / "cut.pth")
    return all(torch.equal(value, whole[name]) for name, value in resumed.items())


@pytest.mark.shows("L46")
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_scripted_loop_with_an_engine_resumes_to_the_same_bits(
    num_processes: int, tmp_path: Path
) -> None:
    assert run_ranks(_run_script, num_processes, tmp_path) == [True] * num_processes
