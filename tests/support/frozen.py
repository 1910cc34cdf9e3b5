"""Frozen training runs of earlier commits: how they are run, and how they were frozen."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from helios.plugins import EarlyStopping
from tests.support.ranks import run_ranks

GOLDEN = Path(__file__).parents[1] / "golden"
Result = dict[str, list[str]]


@dataclass(frozen=True)
class Frozen:
    """The frozen runs of a folder of ``tests/golden``.

    A run is a script of the folder, ``script``, or ``script-variant`` for one with variants.

    Attributes:
        name: of the folder.
        commit: whose code has written them.
        runs: on how many processes each was run, and on how many its checkpoints are resumed too.
    """

    name: str
    commit: str
    runs: Mapping[str, tuple[int, ...]]

    @property
    def folder(self) -> Path:
        """Where they are."""
        return GOLDEN / self.name

    def run(self, run: str, root: Path, num_processes: int = 1) -> Result:
        """Run a script in a folder, from what lies there; return what it recorded."""
        if num_processes == 1:
            return _train(0, self.name, run, root)
        results = run_ranks(_train, num_processes, self.name, run, root)
        is_shared = all(result["end"] == results[0]["end"] for result in results)
        ends = results[:1] if is_shared else results
        # A process has replicas that follow each other: so the order is that of one process.
        steps = [line for result in results for line in result["steps"]]
        return {
            "steps": sorted(steps, key=lambda line: int(line.split()[0])),
            "lines": results[0]["lines"],
            "end": [line for result in ends for line in result["end"]],
        }

    def checkpoints(self, run: str) -> list[Path]:
        """Return the frozen checkpoints of a run."""
        return [path for path in self.files(run) if path.suffix in (".pth", ".ckpt")]

    def files(self, run: str) -> list[Path]:
        """Return all that is frozen of the folder of a run."""
        return sorted((self.folder / "checkpoints" / run).glob("*"))

    def resume(self, run: str, path: Path, root: Path, num_processes: int = 1) -> Result:
        """Run a script in a fresh folder with one checkpoint, and the files of no checkpoint."""
        folder = root / re.split("_epoch_", path.stem)[0]
        folder.mkdir(parents=True)
        for source in self.files(run):
            if source.stem == path.stem or "_epoch_" not in source.stem:
                _copy(source, folder)
        return self.run(run, root, num_processes)

    def load(self, run: str) -> dict[str, Result]:
        """Return the frozen results: of the whole run, and of each resume."""
        text = (self.folder / "results" / f"{run}.json").read_text("utf-8")
        results: dict[str, Result] = json.loads(text)
        return results

    def content(self) -> list[Path]:
        """Return all frozen files: scripts, results and checkpoints."""
        found = [*self.folder.glob("*.py"), *self.folder.glob("[cr]*/**/*")]
        return sorted(path for path in found if path.is_file())

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each frozen file, by its path in the folder."""
        return {
            path.relative_to(self.folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in self.content()
        }

    def freeze(self, run: str, root: Path) -> None:
        """Write the checkpoints and results of a run, once.

        Raises:
            FileExistsError: if they are there: what is frozen is never written again.
        """
        target = self.folder / "results" / f"{run}.json"
        if target.exists():
            raise FileExistsError(f"{target} is frozen at {self.commit}, and never written again.")
        module = vars(_module(self.name, run))
        num_processes = self.runs[run][0]
        results = {"whole": self.run(run, root / "whole", num_processes)}
        folder = self.folder / "checkpoints" / run
        folder.mkdir(parents=True)
        kept = module.get("KEPT", ())
        for source in sorted((root / "whole" / module["NAME"]).glob("*")):
            number = source.stem.partition("_iter_")[2]
            if source.name in kept or (number and int(number) in module["SAVED"]):
                _copy(source, folder)
        for path in self.checkpoints(run):
            results[path.stem] = self.resume(run, path, root / path.stem, num_processes)
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(results, indent=0) + "\n", "utf-8")

    def freeze_all(self) -> None:
        """Write the runs that the command line names, or all."""
        for chosen in sys.argv[1:] or self.runs:
            with tempfile.TemporaryDirectory() as scratch:
                self.freeze(chosen, Path(scratch))
        lines = [f"{digest}  {name}\n" for name, digest in self.digests().items()]
        (self.folder / "sha256.txt").write_text("".join(lines), "utf-8")


def _copy(source: Path, folder: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, folder / source.name)
    else:
        shutil.copyfile(source, folder / source.name)


def _module(name: str, run: str) -> object:
    return importlib.import_module(f"tests.golden.{name}.{run.partition('-')[0]}")


def _train(rank: int, name: str, run: str, root: Path) -> Result:
    variant = run.partition("-")[2]
    module = vars(_module(name, run))
    with pytest.MonkeyPatch.context() as patch:
        if "EarlyStopping" in module:
            # At these commits it had a default; today a frozen script cannot name the mode.
            patch.setitem(module, "EarlyStopping", partial(EarlyStopping, mode="min"))
        train = module["train"]
        result: Result = train(root, variant) if variant else train(root)
    return result
