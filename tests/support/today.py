"""The frozen trainings of ``tests/golden/today``: how they are run, and how they were frozen."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

from tests.support.ranks import run_ranks

FOLDER = Path(__file__).parents[1] / "golden" / "today"
COMMIT = "e702e9a"
SCRIPTS = {
    "one_replica": (1,),
    "by_epochs": (1,),
    "four_replicas": (2, 1, 4),
    "manual": (1,),
    "yields": (1,),
    "averaged": (1,),
    "by_rank": (4,),
    "own_loader": (2,),
    "carried": (1,),
}
"""On how many processes a script was run, and on how many its checkpoints are resumed too."""

Result = dict[str, list[str]]


def run(script: str, root: Path, num_processes: int = 1) -> Result:
    """Run a script in a folder, from what lies there; return what it recorded."""
    if num_processes == 1:
        return _train(0, script, root)
    results = run_ranks(_train, num_processes, script, root)
    is_shared = all(result["end"] == results[0]["end"] for result in results)
    ends = results[:1] if is_shared else results
    # A process has replicas that follow each other: so the order is that of one process.
    steps = [line for result in results for line in result["steps"]]
    return {
        "steps": sorted(steps, key=lambda line: int(line.split()[0])),
        "lines": results[0]["lines"],
        "end": [line for result in ends for line in result["end"]],
    }


def _train(rank: int, script: str, root: Path) -> Result:
    module = importlib.import_module(f"tests.golden.today.{script}")
    result: Result = module.train(root)
    return result


def checkpoints(script: str) -> list[Path]:
    """Return the frozen checkpoints of a script."""
    return sorted((FOLDER / "checkpoints" / script).glob("*.pth"))


def resume(script: str, path: Path, root: Path, num_processes: int = 1) -> Result:
    """Run a script in a fresh folder in which there is one checkpoint."""
    name = re.split("_epoch_", path.stem)[0]
    (root / name).mkdir(parents=True)
    for source in (path, path.with_suffix(".json")):
        shutil.copyfile(source, root / name / source.name)
    return run(script, root, num_processes)


def load(script: str) -> dict[str, Result]:
    """Return the frozen results: of the whole run, and of each resume."""
    text = (FOLDER / "results" / f"{script}.json").read_text("utf-8")
    results: dict[str, Result] = json.loads(text)
    return results


def freeze(script: str, root: Path) -> None:
    """Write the checkpoints and results of a script, once.

    Raises:
        FileExistsError: if they are there: what is frozen is never written again.
    """
    target = FOLDER / "results" / f"{script}.json"
    if target.exists():
        raise FileExistsError(f"{target} is frozen at {COMMIT}, and never written again.")
    saved = importlib.import_module(f"tests.golden.today.{script}").SAVED
    num_processes = SCRIPTS[script][0]
    results = {"whole": run(script, root / "whole", num_processes)}
    folder = FOLDER / "checkpoints" / script
    folder.mkdir(parents=True)
    for path in sorted((root / "whole").glob("*/*.pth")):
        if int(path.stem.split("_iter_")[1]) in saved:
            for source in (path, path.with_suffix(".json")):
                shutil.copyfile(source, folder / source.name)
    for path in checkpoints(script):
        results[path.stem] = resume(script, path, root / path.stem, num_processes)
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=0) + "\n", "utf-8")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or SCRIPTS:
        with tempfile.TemporaryDirectory() as scratch:
            freeze(chosen, Path(scratch))
