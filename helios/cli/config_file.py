"""``config.yaml`` beside a run: the options of the command that has started it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from helios.checkpoint.file_names import CONFIG_NAME
from helios.ledger.run_file import without_nested_secrets
from helios.plugins.plugin import Plugin
from helios.start.options import ROWS, Scope
from helios.storage import files

_HEADER = "# The options of this run; --config with this file starts it again.\n"
_FORMER = re.compile(r"config-(\d+)\.yaml")


class ConfigFile(Plugin):
    """Writes the file when everything is checked and loaded, so that no refused start changes it.

    If the run continues with other values, the old file is kept as ``config-<n>.yaml``.

    Args:
        tree: the options, as plain data.
    """

    _internals: ClassVar[str] = "_tree"

    def __init__(self, tree: dict[str, Any]) -> None:
        super().__init__("config-file")
        # What is allowed to change is so for one start.
        trainer = {**tree["trainer"], "allow_changes": []}
        self._tree: dict[str, Any] = without_nested_secrets({**tree, "trainer": trainer})

    def setup(self) -> None:
        """Do nothing: the options are known."""

    def on_fit_start(self) -> None:
        """Write the file, on rank 0."""
        folder = self.context.run_folder
        if self.global_rank or self.context.is_replay or folder is None or not folder.is_dir():
            return
        path = folder / CONFIG_NAME
        # Without a step, a former file is that of a start which has left nothing.
        if self.context.state.global_iteration and path.exists():
            self._keep(path)
        text = yaml.safe_dump(self._tree, sort_keys=False, allow_unicode=True)
        files.write_text_durably(path, f"{_HEADER}{text}")

    def _keep(self, path: Path) -> None:
        """Copy the former file, if it defines another run and is not copied yet."""
        former = path.read_text("utf-8")
        if _defining(_read(former)) == _defining(self._tree):
            return
        matches = [(_FORMER.fullmatch(each.name), each) for each in path.parent.iterdir()]
        kept = {int(found[1]): each for found, each in matches if found}
        last = max(kept, default=0)
        if not kept or kept[last].read_text("utf-8") != former:
            files.copy_durably(path, path.with_name(f"config-{last + 1}.yaml"))


def _read(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def _defining(tree: Any) -> Any:
    """Return what defines a run; a file that somebody has edited may hold anything."""
    if not isinstance(tree, dict) or not isinstance(tree.get("trainer"), dict):
        return None
    rows = {name for name, row in ROWS.items() if row.scope is Scope.RUN} | {"params"}
    trainer = {name: tree["trainer"].get(name) for name in sorted(rows)}
    return tree.get("model"), tree.get("data"), trainer
