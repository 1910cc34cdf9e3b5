"""Stands in for Weights & Biases: what Helios uses of it, with JSON in place of its own format.

As in the real library, an offline run has a folder of its own, the values of one step are merged,
a step that is smaller than the last one is ignored, and so is a value without a name.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace


def Settings(**options: object) -> SimpleNamespace:  # noqa: N802
    return SimpleNamespace(**options)


class Image:
    def __init__(self, path: str) -> None:
        self.path = path


class Run:
    def __init__(self, folder: Path, facts: dict) -> None:
        self.dir = str(folder / "files")
        Path(self.dir).mkdir(parents=True)
        self.facts = facts
        self.config = facts["config"]
        self.summary: dict = {}
        self.history: list[dict] = []
        self.files: list[str] = []

    def log(self, values: dict, step: int) -> None:
        shown = {}
        for name, value in values.items():
            if isinstance(value, Image):
                target = Path(self.dir) / "media" / f"{name}_{step}.png"
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(value.path, target)
                value = {"path": str(target.relative_to(self.dir))}
            if name:
                shown[name] = value
        if self.history and step < self.history[-1]["_step"]:
            return
        if not self.history or step > self.history[-1]["_step"]:
            self.history.append({"_step": step})
        self.history[-1].update(shown)

    def save(self, path: str, base_path: str, policy: str) -> None:
        self.files.append(str(Path(path).relative_to(base_path)))

    def finish(self, exit_code: int) -> None:
        content = {
            "history": self.history,
            "summary": self.summary,
            "files": self.files,
            "exit_code": exit_code,
            **self.facts,
        }
        path = Path(self.dir).parent / f"run-{self.facts['id']}.wandb"
        path.write_text(json.dumps(content))


def init(dir: str, id: str, **options: object) -> Run:  # noqa: A002
    root = Path(dir) / "wandb"
    number = len(list(root.glob("offline-run-*"))) if root.exists() else 0
    settings = options.pop("settings")
    assert options.pop("mode") == "offline"
    assert settings.console == "off"
    return Run(root / f"offline-run-20260101_00{number:04d}-{id}", {"id": id, **options})
