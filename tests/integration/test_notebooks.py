"""What docs/recipes/notebooks.md says of cells, in a notebook."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import codebase
from tests.support import tier

pytestmark = pytest.mark.long
_PAGE = codebase.ROOT / "docs" / "recipes" / "notebooks.md"
_EXECUTE = """
import sys, nbclient, nbformat
path = sys.argv[1]
notebook = nbformat.read(path, 4)
nbclient.NotebookClient(notebook, allow_errors=True, kernel_name="python3").execute()
nbformat.write(notebook, path)
"""
_OPTIONS = """
import os, signal, helios

options = {"valid_frequency": 1, "chkpt_frequency": 1, "chkpt_root": "runs", "use_cpu": True}
options |= {"max_epochs": 4, "print_banner": False}

class Interrupting(helios.Plugin):
    def setup(self):
        pass

    def on_training_batch_end(self, state, should_log=False):
        if state.global_iteration == 11:
            os.kill(os.getpid(), signal.SIGINT)  # what the button for it sends

def show(model):
    print("weights", *(part.item().hex() for part in model.network.parameters()))
"""


class Cell(NamedTuple):
    """What a cell has given: its text, its error, and the weights that it shows."""

    text: str
    error: str

    @property
    def weights(self) -> str:
        return self.text.rpartition("weights ")[2]


def _fit(name: str, options: str = "") -> str:
    train = f'trainer = Trainer(**options{options}); model = Line("{name}")'
    return f"{train}; trainer.fit(model, Data()); show(model)"


def _make_cells() -> dict[str, str]:
    """Return cells by name, in their order."""
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(), re.M | re.S)
    first, table, picture = blocks
    edited = first.replace("mse_loss(self.network(x), y)", "l1_loss(self.network(x), y)", 1)
    assert edited != first
    interrupted = _fit("cut", ', plugins=[Interrupting("interrupting")]')
    classes, _, _ = first.partition("trainer =")
    cells = {
        "first": first,
        "table": table,
        "picture": picture,
        "options": f"{_OPTIONS}show(model)",
        "first again": first,
        "interrupted": interrupted,
        "after it": "print(trainer.exit_code)",
        "interrupted again": interrupted,
        "edited": edited,
        "edited and longer": _fit("cut", ' | {"max_epochs": 5}'),
        "processes": _fit("two", ", nproc=2"),
    }
    if tier.is_full():
        cells |= {
            "replicas": f"{classes}\n{_fit('one', ', num_replicas=2')}",
            "from a file": f"Path('nets.py').write_text({classes!r})\n"
            f"from nets import Data, Line\n{_fit('two', ', nproc=2')}",
        }
    return cells


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def cells(folder: Path) -> dict[str, Cell]:
    named = _make_cells()
    bare: dict[str, Any] = {"cell_type": "code", "execution_count": None, "metadata": {}}
    made = [
        {**bare, "id": f"cell-{number}", "outputs": [], "source": source}
        for number, source in enumerate(named.values())
    ]
    path = folder / "notebook.ipynb"
    path.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    line = [sys.executable, "-c", _EXECUTE, str(path)]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())["cells"]
    return {name: _read(cell["outputs"]) for name, cell in zip(named, found, strict=True)}


def _read(outputs: list[dict[str, Any]]) -> Cell:
    texts = ["".join(each.get("text", "")) for each in outputs]
    errors = [f"{each['ename']}: {each['evalue']}" for each in outputs if "ename" in each]
    return Cell("".join(texts), "".join(errors))


def test_the_cells_of_the_page_show_scores_and_losses(cells: dict[str, Cell], folder: Path) -> None:
    assert [cells[name].error for name in ("first", "table", "picture", "options")] == [""] * 4
    assert re.findall(r"^(\d+) error [\d.]+$", cells["table"].text, re.M) == ["8", "16", "24", "32"]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_cell_that_is_run_again_after_the_end_is_an_error(cells: dict[str, Cell]) -> None:
    assert cells["first again"].error.startswith("UsageError: The run 'line' in runs/line was")


def test_an_interrupted_cell_ends_alone_and_resumes_to_the_bit(cells: dict[str, Cell]) -> None:
    assert cells["interrupted"].error == "KeyboardInterrupt: SIGINT was received"
    assert "resume from cut_epoch_2_iter_11.pth" in cells["interrupted"].text
    assert cells["after it"] == Cell("75\n", "")
    assert "Resumed from cut_epoch_2_iter_11.pth" in cells["interrupted again"].text
    assert cells["interrupted again"].weights == cells["options"].weights


def test_an_edited_cell_says_what_has_changed(cells: dict[str, Cell]) -> None:
    changed = "Line.train_step() has other code, in an edited cell"
    assert cells["edited"].error == cells["first again"].error
    assert changed in cells["edited and longer"].text
    assert cells["edited and longer"].error == ""
    assert "until epoch 5" in cells["edited and longer"].text


def test_several_processes_need_classes_in_a_file(cells: dict[str, Cell]) -> None:
    assert cells["processes"].error.startswith("UsageError: Several processes must be started")
    assert "Data and Line are defined here. Move your classes" in cells["processes"].error


@pytest.mark.full
def test_classes_of_a_file_train_on_several_processes(cells: dict[str, Cell]) -> None:
    assert cells["from a file"].error == ""
    assert cells["from a file"].weights == cells["replicas"].weights != cells["options"].weights
