"""A real SLURM on this machine: a controller and two nodes that share the machine.

Everything lies in one folder, and every daemon is a child of this process, so that a job of another
SLURM is never touched. Nothing is installed: ``missing()`` says what has to be.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

_PACKAGES = {"munged": "munge"}
_PACKAGES |= dict.fromkeys(("slurmctld", "slurmd", "sbatch", "srun", "scontrol"), "slurm-wlm")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
# Four files that stand for the GPUs of a node: SLURM counts only devices that exist.
_DEVICES = ("null", "zero", "full", "random")
_SETTINGS = """\
ClusterName=helios
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/log/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 Port={first} CPUs=64 RealMemory=4096 Gres=gpu:4
NodeName={host}-2 NodeAddr=127.0.0.1 Port={second} CPUs=64 RealMemory=4096 Gres=gpu:4
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class ClusterError(RuntimeError):
    """SLURM did not do what a step needs."""


def missing() -> list[str]:
    """Return the Debian packages whose programs are not installed here."""
    absent = {of for name, of in _PACKAGES.items() if shutil.which(name, path=_PATH) is None}
    return sorted(absent)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise ClusterError(f"waited {seconds:g} s in vain: {what}")
        time.sleep(0.1)


class Cluster:
    """Two nodes, each with 64 CPUs and four GPUs by its own account.

    Args:
        folder: empty, and gone or kept by its owner; no path of its parents may be writable by all
            users, except with the sticky bit.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        host = socket.gethostname().partition(".")[0]
        self.nodes = (host, f"{host}-2")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.variables = kept | {"PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        munge = self.folder / "munge"
        for name in ("munge", "state", "log"):
            (self.folder / name).mkdir(mode=0o700)
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o400)
        ports = dict(zip(("controller", "first", "second"), _free_ports(3), strict=True))
        who = {"host": self.nodes[0], "user": getpass.getuser(), "folder": self.folder}
        (self.folder / "slurm.conf").write_text(_SETTINGS.format(**who, **ports))
        devices = [f"Name=gpu File=/dev/{name}\n" for name in _DEVICES]
        (self.folder / "gres.conf").write_text("".join(devices))
        places = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
        paths = [f"--{option}={munge / name}" for option, name in places.items()]
        paths.append(f"--log-file={munge / 'log'}")
        self._serve("munged", "munged", "--foreground", "--force", *paths)
        wait_until((munge / "socket").exists, "munged listens")
        self._serve("slurmctld", "slurmctld", "-D")
        for node in self.nodes:
            self._serve(node, "slurmd", "-D", "-N", node)
        self._stack.callback(self._end_jobs)
        wait_until(lambda: self._states() == ["idle", "idle"], f"both nodes idle: {self.folder}")

    def _serve(self, name: str, *command: str) -> None:
        log = (self.folder / "log" / name).open("a")
        self._stack.callback(log.close)
        daemon = subprocess.Popen(
            command, env=self.variables, stdout=log, stderr=log, start_new_session=True
        )
        self._stack.callback(_end, daemon)

    def _states(self) -> list[str]:
        return self.call("sinfo", "--noheader", "--Node", "--format=%t", check=False).split()

    def _end_jobs(self) -> None:
        self.call("scancel", f"--user={getpass.getuser()}", check=False)
        wait_until(lambda: not self.call("squeue", "--noheader", check=False), "no job is left")

    def call(self, *command: str, check: bool = True, folder: Path | None = None) -> str:
        """Run a command of SLURM; returns what it prints."""
        done = subprocess.run(
            command,
            env=self.variables,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if check and done.returncode:
            raise ClusterError(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job or of an element of an array, such as ``"PENDING"``."""
        return self._describe(job)["JobState"]

    def has_ended(self, job: str) -> bool:
        """Return whether the job script of each earlier start of a requeued job has ended."""
        facts = self._describe(job)
        line = f"[{facts['JobId']}.batch] done with job"
        logs = "".join((self.folder / "log" / f"{node}.log").read_text() for node in self.nodes)
        return logs.count(line) >= int(facts["Restarts"])

    def read_log(self) -> str:
        return (self.folder / "log" / "slurmctld").read_text()

    def _describe(self, job: str) -> dict[str, str]:
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(20)
    except subprocess.TimeoutExpired:
        daemon.send_signal(signal.SIGKILL)
        daemon.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        ears = [stack.enter_context(socket.socket()) for _ in range(count)]
        for ear in ears:
            ear.bind(("127.0.0.1", 0))
        return [ear.getsockname()[1] for ear in ears]
