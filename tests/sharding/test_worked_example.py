"""The example of docs/sharding.md: a model of transformers, sharded, killed, and continued."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_DIE = """
import os, signal, helios

class Die(helios.Plugin):
    def setup(self): ...

    def on_backward_start(self, loss):
        if self.context.state.global_iteration == 4 and self.context.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def run_script(folder: Path, *arguments: str, text: str = "") -> int:
    (block,) = _BLOCK.findall((_ROOT / "docs" / "sharding.md").read_text())
    folder.mkdir(exist_ok=True)
    plugged = block.replace("**options,\n    )", "plugins=[Die('die')], **options)")
    (folder / "gpt.py").write_text(text + plugged if text else block)
    variables = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "gpt.py", *arguments]
    return subprocess.run(command, cwd=folder, env=variables, check=False).returncode


_LOGITS = """
import torch
from transformers import GPT2LMHeadModel

logits = GPT2LMHeadModel.from_pretrained("gpt")(torch.arange(16)[None]).logits
print(logits.detach().numpy().tobytes().hex())
"""


def read_logits(folder: Path) -> bytes:
    # In a process of its own, since transformers leaves a thread.
    command = [sys.executable, "-c", _LOGITS]
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=True).stdout


@pytest.mark.full
def test_the_example_is_killed_and_ends_on_fewer_processes(tmp_path: Path) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert run_script(alone, "1") == 0
    assert run_script(killed, "4", text=_DIE) == 1
    assert run_script(killed, "3") == 0
    assert run_script(alone, "export") == run_script(killed, "export") == 0
    ledgers = [each / "runs" / "gpt" / "ledger.jsonl" for each in (alone, killed)]
    assert ledgers[0].read_bytes() == ledgers[1].read_bytes()
    assert read_logits(alone) == read_logits(killed)
