"""The paths of ``tests/golden/import_paths.txt`` import for ever."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest

from tests import codebase

_PATHS = (codebase.ROOT / "tests/golden/import_paths.txt").read_text("utf-8").splitlines()
_PAGES = [
    page
    for page in [codebase.ROOT / "README.md", *sorted((codebase.ROOT / "docs").rglob("*.md"))]
    if page.name not in ("architecture.md", "design.md")
]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

_IMPORT_EACH_FIRST = """
import importlib, os, sys, traceback, warnings
import torch, numpy, tqdm, torch.distributed.checkpoint, torch.distributed.fsdp, torch._dynamo
# What takes long: each module of Helios is the first of its process.

def load(path):
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path or "." not in path:
            raise
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)

groups = {}
for path in sys.stdin.read().split():
    groups.setdefault(path.rpartition(".")[0] or path, []).append(path)
for module, paths in groups.items():
    child = os.fork()
    if child == 0:
        warnings.filterwarnings("error", "(?s).*helios", DeprecationWarning)
        for path in [module, *paths]:
            try:
                load(path)
            except BaseException as error:
                print(path, type(error).__name__, error, flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(module, "ended its process", flush=True)
print("done", len(groups))
"""


@pytest.mark.long
def test_every_frozen_path_imports_first_of_all_and_without_a_warning() -> None:
    wrong = ["helios.core.buffers", "helios.core.rng.no_such_name", "helios.nn.create_network"]
    ran = subprocess.run(
        [sys.executable, "-c", _IMPORT_EACH_FIRST],
        input="\n".join([*_PATHS, *wrong]),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(codebase.ROOT)},
    )
    *failures, last = ran.stdout.splitlines()
    failing = {path: error for path, error, *_ in map(str.split, failures)}
    assert last.startswith("done"), ran.stderr
    assert sorted({*failing} - {"helios.nn"}) == sorted(wrong), failing


def test_every_import_on_a_users_page_is_among_the_frozen_paths() -> None:
    imported = set()
    for page in _PAGES:
        for block in _BLOCK.findall(page.read_text("utf-8")):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.Import):
                    imported |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    own = {path for path in imported if path.split(".")[0] == "helios"}
    assert len(own) > 30
    assert own - {*_PATHS} == set()
