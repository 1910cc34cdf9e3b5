"""Start, interrupt, requeue and kill trainings on a real SLURM, and compare all bits.

A controller and two nodes run on this machine, in a temporary folder. The jobs are those of
docs/recipes/clusters.md, with fewer tasks; they train on the digits of docs/examples/cluster.py.
Each run must end with the ledger and the weights of an undisturbed one, which a single process has
made without SLURM. Debian's packages slurm-wlm and munge must be installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import helios  # noqa: E402 (found by the line above)
from helios.ledger.run_file import START, read_run_file  # noqa: E402
from tests.support.slurm_cluster import Cluster, ClusterError, missing, wait_until  # noqa: E402
from tests.support.started import interrupt_at_signals  # noqa: E402

PAGE = ROOT / "docs" / "recipes" / "clusters.md"
SCRIPT = ROOT / "docs" / "examples" / "cluster.py"
SECONDS = 300
# Less than what the page asks for: four tasks instead of eight, and room for two jobs at once.
LESS = ("--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1")


def job_files() -> list[str]:
    """Return the job files that the page prints: of an array, and of one node or two."""
    return re.findall(r"^```bash\n(#!/bin/bash\n#SBATCH.*?)^```", PAGE.read_text(), re.M | re.S)


def digest(folder: Path) -> str:
    """Return a digest of the bytes of all weights in the newest checkpoint of a run."""
    newest = helios.find_last_checkpoint(folder)
    if newest is None:
        return "no checkpoint"
    found = hashlib.sha256(newest.name.encode())
    networks = helios.load_checkpoint(newest)["model"]["objects"]
    for name, tensor in sorted(networks["network"].items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()[:16]


def start_places(folder: Path) -> list[str]:
    """Return for each start of a run: on how many processes, and after which iteration."""
    events = [event for event in read_run_file(folder) if event["event"] == START]
    return [f"{event['processes']}@{event['iteration']}" for event in events]


@dataclasses.dataclass
class Outcome:
    """What came of a run.

    Attributes:
        case: what was done to it.
        starts: its starts, as ``processes@iteration``.
        ledger: the digest of its ledger.
        weights: the digest of its weights.
        faults: what is not as it must be.
        seconds: how long it took.
    """

    case: str
    starts: list[str]
    ledger: str
    weights: str
    faults: list[str]
    seconds: float


class Scene:
    """A folder with the script and the job files of one case.

    Args:
        cluster: where jobs run.
        folder: a new folder.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        (folder / "logs").mkdir(parents=True)
        shutil.copy(SCRIPT, folder / "train.py")
        for name, text in zip(("array.sh", "elastic.sh"), job_files(), strict=True):
            (folder / name).write_text(text)

    def submit(self, job: str, *options: str, pause: float = 0.1) -> str:
        """Submit a job, which pauses for that many seconds after each step of its first start."""
        self.cluster.variables["PAUSE"] = str(pause)
        return self.cluster.call("sbatch", "--parsable", *LESS, *options, job, folder=self.folder)

    def run_of(self, seed: int) -> Path:
        return self.folder / "runs" / f"run-{seed}"

    def wait_for_a_checkpoint(self, seed: int = 0) -> None:
        """Return in the middle of the training: after the first checkpoint, before the last."""
        folder = self.run_of(seed)
        wait_until(lambda: helios.find_last_checkpoint(folder) is not None, "a checkpoint", SECONDS)

    def wait_for_state(self, job: str, *states: str) -> str:
        """Return the state of a job once it is one of these."""
        found = ""

        def is_there() -> bool:
            nonlocal found
            found = self.cluster.state(job)
            return found in states

        wait_until(is_there, f"job {job} to be {' or '.join(states)}", SECONDS)
        return found

    def resume(self, job: str, *changes: str) -> None:
        """Start a requeued job soon, for which SLURM waits two minutes; perhaps change it."""
        self.wait_for_state(job, "PENDING")
        # What its last start still has to report would count as the end of the next one, and a
        # start within the same second is refused with its credential.
        wait_until(lambda: self.cluster.has_ended(job), f"the last start of job {job} to end")
        self.cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now+3", *changes)
        self.wait_for_state(job, "RUNNING", "COMPLETED", "FAILED")

    def complete(self, job: str) -> None:
        """Wait for the regular end, through as many requeues as there are."""
        while self.wait_for_state(job, "PENDING", "COMPLETED", "FAILED") == "PENDING":
            self.resume(job)
        if self.cluster.state(job) != "COMPLETED":
            raise ClusterError(f"job {job} failed")

    def logs(self) -> str:
        """Return the ends of what the jobs and the controller have said."""
        texts = [path.read_text() for path in sorted((self.folder / "logs").iterdir())]
        return "\n".join([*texts, self.cluster.read_log()[-3000:]])


def train_by_srun(scene: Scene) -> dict[int, int]:
    scene.cluster.variables["PAUSE"] = "0"
    command = ("srun", "-n", "4", "-N", "2", "--kill-on-bad-exit=1", "python", "train.py")
    scene.cluster.call(*command, folder=scene.folder)
    return {0: 1}


def signal_all_tasks(scene: Scene) -> dict[int, int]:
    job = f"{scene.submit('array.sh', '--array=0')}_0"
    scene.wait_for_a_checkpoint()
    scene.cluster.call("scancel", "--signal=USR1", job)
    scene.resume(job)
    scene.complete(job)
    return {0: 2}


def signal_before_training(scene: Scene) -> dict[int, int]:
    job = scene.submit("elastic.sh")
    steps = ("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i")
    wait_until(lambda: f"{job}.0" in scene.cluster.call(*steps).split(), "tasks that import")
    scene.cluster.call("scancel", "--signal=USR1", job)
    scene.resume(job)
    scene.complete(job)
    return {0: 1}


def requeue_on_fewer_tasks(scene: Scene) -> dict[int, int]:
    cluster, second = scene.cluster, scene.cluster.nodes[1]
    job = scene.submit("elastic.sh")
    scene.wait_for_a_checkpoint()
    cluster.call("scancel", "--signal=USR1", job)
    scene.wait_for_state(job, "PENDING")
    cluster.call("scontrol", "update", f"NodeName={second}", "State=DRAIN", "Reason=test")
    try:
        # As the page has it, with the tasks of one node.
        scene.resume(job, "NumNodes=1-2", "NumTasks=2")
        scene.complete(job)
    finally:
        cluster.call("scontrol", "update", f"NodeName={second}", "State=RESUME")
    return {0: 2}


def requeue_one_of_an_array(scene: Scene) -> dict[int, int]:
    name = scene.submit("array.sh", "--array=0-1")
    jobs = [f"{name}_{seed}" for seed in (0, 1)]
    scene.wait_for_a_checkpoint(0)
    # SLURM sends SIGTERM, and SIGKILL some time later.
    scene.cluster.call("scontrol", "requeue", jobs[0])
    scene.resume(jobs[0])
    for job in jobs:
        scene.complete(job)
    return {0: 2, 1: 1}


def reach_the_time_limit(scene: Scene) -> dict[int, int]:
    # SLURM sends the signal up to a minute early, and its limits are whole minutes.
    options = ("--array=2", "--time=3", "--signal=USR1@60")
    job = f"{scene.submit('array.sh', *options, pause=0.8)}_2"
    scene.resume(job)
    scene.complete(job)
    return {2: 2}


def end_and_submit_again(*command: str) -> Callable[[Scene], dict[int, int]]:
    """Return a case in which a command ends the job, which is then submitted again."""

    def case(scene: Scene) -> dict[int, int]:
        job = scene.submit("elastic.sh")
        scene.wait_for_a_checkpoint()
        scene.cluster.call(*command, job)
        scene.wait_for_state(job, "CANCELLED", "FAILED")
        scene.complete(scene.submit("elastic.sh", "--nodes=1"))
        return {0: 2}

    return case


CASES: dict[str, Callable[[Scene], dict[int, int]]] = {
    "srun -n 4 -N 2": train_by_srun,
    "scancel --signal=USR1": signal_all_tasks,
    "SIGUSR1 while python starts": signal_before_training,
    "requeue, another srun -n": requeue_on_fewer_tasks,
    "array, scontrol requeue": requeue_one_of_an_array,
    "time limit, --signal=USR1@60": reach_the_time_limit,
    "scancel, sbatch again": end_and_submit_again("scancel"),
    "SIGKILL, sbatch again": end_and_submit_again("scancel", "--signal=KILL"),
}
"""What is done, by its name; a case returns how many starts the run of each seed has had."""


class Trial:
    """Tries cases, each in a folder of its own.

    Args:
        cluster: where jobs run.
        folder: for the runs.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder

    def train_undisturbed(self, seed: int) -> Path:
        """Train in one process without SLURM; returns the folder of the run, made once a seed."""
        place = self.folder / "undisturbed"
        if not (place / "runs" / f"run-{seed}").exists():
            place.mkdir(exist_ok=True)
            command = [sys.executable, str(SCRIPT), "--seed", str(seed)]
            subprocess.run(command, cwd=place, check=True, capture_output=True)
        return place / "runs" / f"run-{seed}"

    def run(self, name: str) -> list[Outcome]:
        """Try a case; returns the outcome of each of its runs."""
        begin = time.monotonic()
        scene = Scene(self.cluster, self.folder / re.sub(r"\W+", "-", name))
        try:
            expected = CASES[name](scene)
        except ClusterError as error:
            text = f"{error}\n{scene.logs()}"
            return [Outcome(name, [], "-", "-", [text], time.monotonic() - begin)]
        seconds = time.monotonic() - begin
        return [self._judge(name, scene, *run, seconds) for run in expected.items()]

    def _judge(
        self, name: str, scene: Scene, seed: int, num_starts: int, seconds: float
    ) -> Outcome:
        run, whole = scene.run_of(seed), self.train_undisturbed(seed)
        faults = []
        command = [sys.executable, "-m", "helios", "diff", str(whole), str(run)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            faults.append(f"helios diff ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        ledgers = [(folder / "ledger.jsonl").read_bytes() for folder in (run, whole)]
        if ledgers[0] != ledgers[1]:
            faults.append("the ledgers have different bytes")
        weights = digest(run)
        if weights != digest(whole):
            faults.append(f"other weights: {weights}, undisturbed {digest(whole)}")
        starts = start_places(run)
        # SLURM sends USR1@60 again where what remains takes too long: more starts do no harm.
        if len(starts) < num_starts:
            faults.append(f"it had {len(starts)} starts instead of {num_starts}")
        if faults:
            faults.append(scene.logs())
        ledger = hashlib.sha256(ledgers[0]).hexdigest()[:16]
        return Outcome(f"{name} (seed {seed})", starts, ledger, weights, faults, seconds)


def show(outcomes: list[Outcome]) -> None:
    """Print a line for each run, and what is not as it must be."""
    head = ("case", "processes@iteration of each start", "ledger", "weights", "equal", "s")
    rows = [
        (
            *(outcome.case, " ".join(outcome.starts), outcome.ledger, outcome.weights),
            *("NO" if outcome.faults else "yes", f"{outcome.seconds:.0f}"),
        )
        for outcome in outcomes
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)))
    for outcome in outcomes:
        for fault in outcome.faults:
            print(f"FAULT {outcome.case}: {fault}")
    good = sum(not outcome.faults for outcome in outcomes)
    print(f"{good} of {len(outcomes)} runs have the bits of the undisturbed ones")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    names = ", ".join(f"'{name}'" for name in CASES)
    parser.add_argument("cases", nargs="*", help=f"which cases; all by default: {names}")
    parser.add_argument("--folder", type=Path, help="where to train; a temporary one by default")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}. There are {names}.")
    return options


def main() -> int:
    options = parse()
    interrupt_at_signals()
    if packages := missing():
        print(
            f"Not installed: {', '.join(packages)}. On Debian: apt-get install {' '.join(packages)}"
        )
        return 2
    # What jobs and the undisturbed runs have alike: the interpreter, Helios, one thread each.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        (folder / "slurm").mkdir()
        with Cluster(folder / "slurm") as cluster:
            trial = Trial(cluster, folder)
            outcomes: list[Outcome] = []
            for case in options.cases or CASES:
                print(f"{case} ...", flush=True)
                outcomes += trial.run(case)
    show(outcomes)
    return 1 if any(outcome.faults for outcome in outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
