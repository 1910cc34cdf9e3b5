"""A training on several processes, started in every way: its results, its errors and its ends.

That all ways give the same bits for everything that can be trained is shown elsewhere; here it is
one small model, and what happens around it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helios.distributed.collectives import get_global_rank
from helios.errors import CheckpointError, RunMismatchError
from helios.start import origin
from tests.distributed import train_script
from tests.support.kills import all_gone
from tests.support.ranks import run_ranks
from tests.support.signals import environment
from tests.support.warned import collect_warnings

slow = pytest.mark.full  # starts Python several times: the second tier of the tests

_SCRIPT = Path(train_script.__file__ or "")


def command(*arguments: Any, torchrun: tuple[str, ...] = (), script: Path = _SCRIPT) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", *torchrun] if torchrun else []
    return [sys.executable, *launcher, str(script), *map(str, arguments)]


@contextmanager
def running(*arguments: Any, **options: Any) -> Iterator[subprocess.Popen[str]]:
    variables = options.pop("variables", {})
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    line = command(*arguments, **options)
    with subprocess.Popen(line, env=environment(**variables), **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def start(*arguments: Any, **options: Any) -> tuple[int, list[dict[str, Any]], str]:
    """Run the script to its end; return its exit code, its results and its log."""
    timeout = options.pop("timeout", 180)
    with running(*arguments, **options) as process:
        output, log = process.communicate(timeout=timeout)
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return process.returncode, found, log


def start_well(*arguments: Any, **options: Any) -> tuple[list[dict[str, Any]], str]:
    code, found, log = start(*arguments, **options)
    assert code == 0, log
    return found, log


def undisturbed(**options: Any) -> dict[str, Any]:
    line = [f"--{name}={value}" for name, value in options.items() if value is not True]
    line += [f"--{name}" for name, value in options.items() if value is True]
    found = train_script.main(line)
    assert found.pop("items") == []
    return found


@slow
def test_a_script_trains_on_processes_of_its_own_and_goes_on_as_if_alone(tmp_path: Path) -> None:
    expected = undisturbed(replicas=3, evaluate=True)
    prepared = tmp_path / "prepared"
    line = ("--nproc=2", "--replicas=3", "--evaluate", f"--prepared={prepared}")
    (found,), log = start_well(*line)
    items = found.pop("items")
    assert found == expected
    # fit's two ranks; those of test and validate wrote after the items were read.
    assert items == [["rank", rank, 1, "OwnTrainer", "OwnLoop"] for rank in (0, 1)]
    # Once for each call, in one process.
    assert len(set(prepared.read_text().split())) == 1
    assert len(prepared.read_text().split()) == 4
    for text in (
        "processes: 2 processes, 3 replicas",
        "Training has ended",
    ):
        assert log.count(text) == 1, log
    assert "rank 1" not in log


@slow
@pytest.mark.parametrize("fault", ["error", "listed"])
def test_an_error_of_one_rank_reaches_the_script_and_is_told_once(
    fault: str, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    code, found, log = start("--nproc=2", "--replicas=2", f"--fault={fault}", f"--pids={pids}")
    assert (code, found) == (1, [])
    assert log.endswith("\nLookupError: of one rank\n")
    assert "Raised by rank 1 of 2:\nTraceback" in log
    told = re.findall(r"ERROR - (?:rank 1 of 2 - )?Training ended with an error", log)
    assert len(told) == (1 if fault == "error" else 0), log
    # Rank 0 is ended, or notices: then in one line.
    assert log.count("because another process has ended") <= 1
    assert all_gone([int(pid) for pid in pids.read_text().split()])


@slow
def test_a_job_starts_again_by_itself_when_a_rank_was_killed(tmp_path: Path) -> None:
    expected = undisturbed(folder=tmp_path / "alone", replicas=3)
    line = [f"--folder={tmp_path / 'run'}", "--replicas=3", "--nproc=2", "--fault=kill"]
    (found,), log = start_well(*line, f"--marker={tmp_path / 'marker'}", "--restarts=1")
    # Each attempt has a queue of its own.
    assert len(found.pop("items")) == 2
    assert found == expected
    again = r"RankError: Rank 1 of 2 was ended by SIGKILL .* Starting all ranks again, restart 1 of"
    assert re.search(again, log), log
    assert " - Resumed from net_epoch_1_iter_4.pth; run: " in log


@slow
@pytest.mark.parametrize("torchrun", [(), ("--nproc-per-node=2",)])
def test_nothing_outlives_the_process_that_has_started_it(
    torchrun: tuple[str, ...], tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    line = ["--replicas=2", "--fault=wait", f"--pids={pids}"]
    line += [] if torchrun else ["--nproc=2"]
    with running(*line, torchrun=torchrun) as launcher:
        deadline = time.monotonic() + 180
        # Two ranks, and the loader worker of the one that waits.
        while len(found := pids.read_text().split() if pids.exists() else []) < 3:
            assert launcher.poll() is None
            assert time.monotonic() < deadline
        launcher.kill()
        assert all_gone([int(pid) for pid in found])


def test_code_of_a_notebook_is_refused_for_several_processes() -> None:
    code = "import helios\nfrom tests.distributed.train_script import *\n"
    code += "class Own(Net): pass\ntrain = helios.Trainer(total_steps=1, use_cpu=True, nproc=2)\n"
    code += "train.fit(Own('own'), Module(parse([])))\n"
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "and Own is defined here. Move your classes and functions to a file, and import" in last
    assert "or train in one process (nproc=1)" in last


def fail_in_group(rank: int, *line: str) -> tuple[str, str, str]:
    """Return the type of the error, its text, and the last error that was logged."""
    origin.PATIENCE = 0.0
    with collect_warnings() as messages, pytest.raises(Exception, match=r".") as caught:
        train_script.main([text.format(rank=rank) for text in line])
    return caught.type.__name__, str(caught.value), " ".join(messages[-1:])


@pytest.mark.shows("H63", "U22")
def test_an_error_that_only_rank_0_can_see_is_raised_by_all(tmp_path: Path) -> None:
    undisturbed(folder=tmp_path, replicas=2, steps=2)
    first, second = run_ranks(fail_in_group, 2, f"--folder={tmp_path}", "--name=other")
    assert first[0] == second[0] == RunMismatchError.__name__
    assert first[1] == second[1]
    assert "belongs to the run 'net'" in first[1]
    assert "because another process has ended" in second[2]
    assert "Training ended with an error" in first[2]


@pytest.mark.shows("K7")
def test_data_that_cannot_be_prepared_is_told_once_and_nobody_waits() -> None:
    first, second = run_ranks(fail_in_group, 2, "--replicas=2", "--fault=prepare")
    assert (first[0], second[0]) == ("ConnectionError", "ConnectionError")
    assert "Training ended with an error" in first[2]
    assert "because another process has ended" in second[2]


def test_a_folder_that_is_not_shared_is_an_error_that_names_it(tmp_path: Path) -> None:
    undisturbed(folder=tmp_path / "0", replicas=2, steps=2)
    (tmp_path / "1").mkdir()
    line = (f"--folder={tmp_path}/{{rank}}", "--replicas=2")
    first, second = run_ranks(fail_in_group, 2, *line)
    assert first[0] == second[0] == CheckpointError.__name__
    assert first[1] == second[1]
    path = tmp_path / "1" / "net"
    assert f"Rank 0 of 2 saves to {path}, but rank 1 does not see" in first[1]


def write_in_group(rank: int, folder: Path) -> None:
    done = train_script.main([f"--folder={folder}", "--replicas=2", "--profile"])
    again = train_script.main([f"--folder={folder}", "--replicas=2"])
    assert (done["weights"], done["fit"]) == (again["weights"], True)
    assert get_global_rank() == rank


@pytest.mark.shows("H19", "R41")
def test_rank_0_writes_and_a_finished_run_is_loaded_by_all(tmp_path: Path) -> None:
    run_ranks(write_in_group, 2, tmp_path)
    found = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert len([name for name in found if name.endswith(".log")]) == 1
    assert len([name for name in found if "tfevents" in name]) == 1
    assert len([name for name in found if name.endswith(".pth")]) == 4
    assert [name for name in found if name.endswith(".csv")] == ["rows_0.csv"]
    assert [name.split("/")[0] for name in found if name.startswith("traces")] == ["traces_0"]


@slow
def test_a_script_without_a_main_guard_is_explained_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import helios\nfrom tests.distributed.train_script import Module, Net, parse\n"
        "trainer = helios.Trainer(total_steps=1, use_cpu=True, nproc=2, max_restarts=1)\n"
        "trainer.fit(Net('net'), Module(parse([])))\n"
    )
    code, _, log = start(script=script)
    assert code == 1
    assert log.count("must start training below the line") == 1
    assert "Starting all ranks again" not in log


@slow
def test_torchrun_resumes_what_a_script_has_begun_and_the_other_way_round(tmp_path: Path) -> None:
    expected = undisturbed(folder=tmp_path / "alone", replicas=4, steps=12)
    folder = tmp_path / "run"
    (first,), _ = start_well(f"--folder={folder}", "--nproc=3", "--replicas=4", "--steps=4")
    assert first["weights"] != expected["weights"]
    line = (f"--folder={folder}", "--steps=8", f"--prepared={tmp_path / 'prepared'}")
    both, log = start_well(*line, torchrun=("--nproc-per-node=2",))
    assert sorted(found.pop("place") for found in both) == [[0, 0], [1, 1]]
    assert both[0] == both[1]
    assert log.count(" - Resumed from net_epoch_2_iter_4.pth; run: ") == 1
    assert len((tmp_path / "prepared").read_text().split()) == 1
    # The number of threads is that of the first start, whatever this machine has.
    variables = {"OMP_NUM_THREADS": ""}
    (last,), log = start_well(f"--folder={folder}", "--steps=12", variables=variables)
    assert last == expected | {"items": []}
    assert "processes: 1 process, 4 replicas" in log
    sidecars = sorted((folder / "net").glob("net_*.json"))
    levels = {json.loads(path.read_text())["level"] for path in sidecars}
    assert (len(sidecars), levels) == (6, {"elastic"})
    # Rank 0 writes: one log file for each start, all of the run in the first.
    assert len(list(folder.glob("*.log"))) == 1
