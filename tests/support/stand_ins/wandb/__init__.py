"""Stands in for Weights & Biases: what Helios uses of it, with JSON in place of its own format.

As in the real library, an offline run has a folder of its own, whose name is numbered if another
one of its second is there, the values of one step are merged, a step that is smaller than the last
one is ignored, and so is a value without a name.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace


def Settings(**options: object) -> SimpleNamespace:  # noqa: N802
    return SimpleNamespace(**options)


class Image:
    def __init__(self, path: str) -> None:
        self.path = path
        self.place = ""

    def bind_to_run(self, run: OnlineRun, key: str, step: int) -> None:
        digest = hashlib.sha256(Path(self.path).read_bytes()).hexdigest()[:20]
        self.place = f"media/images/{key}_{step}_{digest}.png"
        run.stored["files"].append(self.place)
        run.write()

    def to_json(self, run: OnlineRun) -> dict:
        return {"path": self.place}


class errors:  # noqa: N801
    class UsageError(Exception):
        """As the library has it."""

    class AuthenticationError(Exception):
        """As the library has it."""


class Run:
    def __init__(self, folder: Path, facts: dict) -> None:
        self.dir = str(folder / "files")
        Path(self.dir).mkdir(parents=True)
        self.facts = facts
        self.config = facts["config"] = _Config(facts["config"])
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


class OnlineRun(Run):
    """A run on a server: the file in ``WANDB_STAND_IN``, where lines are stored as they are logged.

    As in the real library, ``step`` begins at 0, and ``starting_step`` after the server's last one.
    """

    step = 0

    def __init__(self, folder: Path, facts: dict) -> None:
        super().__init__(folder, facts)
        self.server = _read_server()
        new = {"history": [], "files": [], "summary": {}}
        self.stored = self.server.setdefault(facts["id"], new)
        self.stored["config"] = self.stored.get("config", {}) | facts["config"]
        self.config, self.summary = _Config(self.stored["config"]), self.stored["summary"]
        self.stored.update(state="running", name=facts["name"])
        self.history = self.stored["history"]
        self.starting_step = self.history[-1]["_step"] + 1 if self.history else 0
        self.path = f"{facts['entity']}/{facts['project']}/{facts['id']}"
        self.url = f"http://server/{self.path}"
        self.write()

    def write(self) -> None:
        partial = _server_path().with_suffix(".partial")
        partial.write_text(json.dumps(self.server))
        partial.replace(_server_path())

    def log(self, values: dict, step: int, commit: bool) -> None:
        assert commit
        assert not self.history or step > self.history[-1]["_step"], "an iteration is sent twice"
        shown = {"_step": step}
        for name, value in values.items():
            if isinstance(value, Image):
                value.bind_to_run(self, name, step)
                value = value.to_json(self)
            shown[name] = value
        self.history.append(shown)
        self.write()

    def save(self, path: str, base_path: str, policy: str) -> None:
        self.stored["files"].append(str(Path(path).relative_to(base_path)))

    def finish(self, exit_code: int) -> None:
        self.stored["state"] = "failed" if exit_code else "finished"
        self.stored["exit_code"] = exit_code
        self.write()


class _Config(dict):
    def update(self, values: dict, allow_val_change: bool) -> None:
        super().update(values)


class Api:
    """What is asked of a server about a run."""

    def __init__(self, timeout: int) -> None:
        self.server = _read_server()

    def run(self, path: str) -> Api:
        self.found = self.server[path.rpartition("/")[2]]
        return self

    @property
    def lastHistoryStep(self) -> int:  # noqa: N802
        return self.found["history"][-1]["_step"] if self.found["history"] else -1

    def files(self, per_page: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name, size=1) for name in self.found["files"]]


def _server_path() -> Path:
    return Path(os.environ["WANDB_STAND_IN"])


def _read_server() -> dict:
    path = _server_path()
    if path.with_suffix(".down").exists():
        raise ConnectionError("the server is down")
    return json.loads(path.read_text()) if path.exists() else {}


def teardown() -> None:
    """There is no other process."""


def init(dir: str, id: str, **options: object) -> Run:  # noqa: A002
    root = Path(dir) / "wandb"
    settings, mode = options.pop("settings"), options.pop("mode")
    assert settings.console == "off"
    kind = "offline-run" if mode == "offline" else "run"
    name = f"{kind}-20260101_000000-{id}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(1)))
    folder = next(root / each for each in names if not (root / each).exists())
    if mode == "offline":
        return Run(folder, {"id": id, **options})
    assert options.pop("resume") == "allow"
    if not os.environ.get("WANDB_API_KEY"):
        raise errors.UsageError("No API key configured. Use `wandb login` to log in.")
    _read_server()
    return OnlineRun(folder, {"id": id, **options})
