"""The package without its extras."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


_EXTRAS = {
    **{name: name for name in ("jinja2", "jsonargparse", "matplotlib", "optuna", "safetensors")},
    **{name: name for name in ("torchmetrics", "wandb", "yaml")},
    "mlflow": "mlflow-skinny",
    "sklearn": "scikit-learn",
}
"""What extras install, by the name of the module; ``yaml`` comes with ``jsonargparse``."""
_WITHOUT = """
import sys

sys.modules.update(dict.fromkeys(sys.argv[1:]))

import helios
import torch
from helios import plugins
from helios.cli import main
from tests.support.command_line import Data, Net

options = {"chkpt_root": "runs", "use_cpu": True, "print_banner": False, "run_path": "events"}
options |= {"enable_tensorboard": True, "max_epochs": 2, "valid_frequency": 1}

def make():
    kinds = [plugins.EMA(), plugins.NaNGuard(), plugins.CSVLogger("rows.csv")]
    return helios.Trainer(**options, plugins=kinds)

assert len(make().find_lr(Net(), Data(), num_steps=10).rates) == 10
assert make().fit(Net(), Data())
options["max_epochs"] = 3
trainer = make()
assert trainer.fit(Net(), Data())
assert trainer.replay(Net(), Data()).is_equal
for call in ("validate", "test", "predict"):
    assert getattr(make(), call)(Net(), Data())
last = str(helios.find_last_checkpoint("runs/net"))
helios.load_weights(last, torch.nn.Sequential(torch.nn.Linear(1, 6)), strict=False)
for words in ("ls runs", f"inspect {last}", "verify runs", f"export {last} --to pt", "doctor"):
    assert main(words.split()) == 0, words
for words in (f"diff {last} {last}", "diff runs/net runs/net", "compare runs/net"):
    assert main(words.split()) == 0, words

doors = {
    "cli": lambda: helios.run(Net, Data, ["fit"]),
    "sweep": lambda: __import__("helios.sweep"),
    "report": lambda: make().find_lr(Net(), Data(), num_steps=10).plot(),
    "safetensors": lambda: helios.load_weights("runs/a.safetensors", torch.nn.Linear(1, 1)),
    "wandb": lambda: plugins.WandbLogger("a"),
    "mlflow": lambda: plugins.MlflowLogger("a"),
}
open("runs/a.safetensors", "w").close()
for extra, door in doors.items():
    try:
        door()
    except (ImportError, helios.UsageError) as error:
        assert f'pip install "helios-trainer[{extra}]"' in str(error), error
    else:
        raise AssertionError(extra)
"""


def test_without_any_extra_everything_else_works(tmp_path: Path) -> None:
    _, _, text = (_ROOT / "pyproject.toml").read_text("utf-8").partition("optional-dependencies]")
    extras = dict(re.findall(r"^(\w+) = \[(.*)\]$", text.partition("[project")[0], re.M))
    del extras["dev"], extras["docs"]
    assert {*re.findall(r'"([\w-]+)', str([*extras.values()]))} == {*_EXTRAS.values()} - {"yaml"}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, *_EXTRAS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
