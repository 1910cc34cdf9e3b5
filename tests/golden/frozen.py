"""The frozen training runs of this folder: scripts, and what they recorded."""

from __future__ import annotations

import importlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.ranks import run_ranks

GOLDEN = Path(__file__).parent
Result = dict[str, list[str]]

RUNS: Mapping[str, tuple[int, ...]] = {
    "today/one_replica": (1,),
    "today/by_epochs": (1,),
    "today/four_replicas": (2, 1, 4),
    "today/manual": (1,),
    "today/own_loader": (2,),
    "full_state/own_places": (2,),
    "full_state/windows": (2, 1),
    "full_state/sources-mixture": (2, 1),
    "full_state/sources-packed": (1,),
    "full_state/sources-read_again": (1, 2),
    "full_state/sources-stateful": (2, 1),
    "full_state/sources-steps": (1,),
    "full_state/sources-workers": (1, 2),
    **{
        f"full_state/ledgers-{variant}": counts
        for variant, counts in {
            "v1_fp32": (1,),
            "v1_bf16": (1,),
            "v1_fp64": (1,),
            "v2_fp32": (1, 2),
            "v4_fp64": (2, 1, 3, 4),
        }.items()
    },
}
"""The runs, each a script of a folder, ``script`` or ``script-variant`` for one with variants, and
on how many processes each was run; its checkpoints are resumed on those, and on the others."""


def run(name: str, root: Path, num_processes: int = 1) -> Result:
    if num_processes == 1:
        return _train(0, name, root)
    results = run_ranks(_train, num_processes, name, root)
    is_shared = all(result["end"] == results[0]["end"] for result in results)
    ends = results[:1] if is_shared else results
    # A process has replicas that follow each other: so the order is that of one process.
    steps = [line for result in results for line in result["steps"]]
    return {
        "steps": sorted(steps, key=lambda line: int(line.split()[0])),
        "lines": results[0]["lines"],
        "end": [line for result in ends for line in result["end"]],
    }


def checkpoints(name: str, root: Path) -> list[Path]:
    """Return the checkpoints of a run in a folder from which it is resumed."""
    module = vars(_module(name))
    return [
        path
        for path in sorted(root.glob(f"{module.get('NAME', '*')}/*_iter_*"))
        if path.suffix in (".pth", ".ckpt") and int(path.stem.split("_iter_")[1]) in module["SAVED"]
    ]


def resume(name: str, path: Path, root: Path, num_processes: int = 1) -> Result:
    """Run a script in a fresh folder with one checkpoint, and the files of no checkpoint."""
    folder = root / path.parent.name
    folder.mkdir(parents=True)
    for source in path.parent.iterdir():
        if source.stem == path.stem or source.name in vars(_module(name)).get("KEPT", ()):
            _copy(source, folder)
    return run(name, root, num_processes)


def results_file(name: str) -> Path:
    folder, _, script = name.partition("/")
    return GOLDEN / folder / "results" / f"{script}.json"


def load(name: str) -> Result:
    result: Result = json.loads(results_file(name).read_text("utf-8"))
    return result


def golden_results() -> dict[Path, str]:
    found = {}
    for name, counts in RUNS.items():
        with tempfile.TemporaryDirectory() as scratch:
            result = run(name, Path(scratch), counts[0])
        found[results_file(name)] = json.dumps(result, indent=0) + "\n"
    return found


def _copy(source: Path, folder: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, folder / source.name)
    else:
        shutil.copyfile(source, folder / source.name)


def _module(name: str) -> object:
    return importlib.import_module(f"tests.golden.{name.partition('-')[0].replace('/', '.')}")


def _train(rank: int, name: str, root: Path) -> Result:
    variant = name.partition("-")[2]
    module = vars(_module(name))
    train = module["train"]
    result: Result = train(root, variant) if variant else train(root)
    return result
