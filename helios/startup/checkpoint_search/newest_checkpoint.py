"""Loads the newest checkpoint for an evaluation, while a training may be writing to the folder.

That training deletes old checkpoints. A file that disappears while it is loaded, in one process or
between two, is not an error: a newer one was committed before, and is searched for then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helios.checkpoint import file_names, loading
from helios.checkpoint.store import Loaded, RunFolder
from helios.errors import DamagedCheckpointError
from helios.replicas.replicas import Replicas
from helios.startup.checkpoint_search.resume_point import load_found_by_rank_0
from helios.startup.checkpoint_search.run_folder import open_folder
from helios.startup.launching.on_all_ranks import on_each, on_first
from helios.startup.options.checkpoint_options import CheckpointOptions


def find_newest(
    options: CheckpointOptions, save_name: str, safe_types: list[Any], *, team: Replicas
) -> Loaded | None:
    """Load the newest undamaged checkpoint, the same one in all processes of a team.

    Args:
        options: where checkpoints are.
        save_name: name of the run's folder.
        safe_types: types that may be built.
        team: the processes; rank 0 searches.

    Raises:
        CheckpointError: if there is a checkpoint that cannot be used.
    """
    folder = open_folder(options, save_name)
    return None if folder is None else run_search(Search(folder, safe_types, team))


def run_search(search: Search) -> Loaded | None:
    """Search until all processes have loaded the same checkpoint; ``None`` if there is none."""
    for _ in file_names.listings(search.folder.path):
        if search.succeeds():
            break
    return search.found


class Search:
    """The search in one process of a team; all of them do the same at the same time.

    Args:
        folder: the run's folder.
        safe_types: types that may be built.
        team: the processes; rank 0 searches.

    Attributes:
        found: the checkpoint, once it is loaded.
    """

    def __init__(self, folder: RunFolder, safe_types: list[Any], team: Replicas) -> None:
        self.found: Loaded | None = None
        self.folder = folder
        self._types = safe_types
        self._team = team

    def succeeds(self) -> bool:
        """Search and load; returns whether all processes have it, or there is none."""
        name = on_first(self._team, self._look)
        if name is None:
            return True
        path = self.folder.path / name
        reports = on_each(self._team, lambda: self._try(path))
        damage = next((text for text in reports if text), "")
        if damage:
            on_first(self._team, lambda: self._pass_over(path, damage))
            return False
        if None not in reports:
            return True
        if on_first(self._team, lambda: file_names.is_gone(path)):
            return False
        # Rank 0 still sees it: the folder is not shared.
        on_each(self._team, lambda: self._insist(path))
        return True

    def _look(self) -> str | None:
        self.found = self.folder.load_newest(self._types, renames_damaged=False)
        return None if self.found is None else self.found.path.name

    def _try(self, path: Path) -> str | None:
        """Load what rank 0 has found; returns what is damaged of it, ``None`` if it is gone."""
        if self._team.rank == 0:
            return ""
        try:
            self.found = loading.load_present(path, self._types, maps=True, share=self.folder.share)
        except FileNotFoundError:
            return None
        except DamagedCheckpointError as error:
            return str(error)
        return ""

    def _pass_over(self, path: Path, damage: str) -> None:
        """Look for an older checkpoint instead of one that another process found damaged."""
        self.folder.pass_over(path, damage, renames=False)

    def _insist(self, path: Path) -> None:
        if self._team.rank != 0:
            self.found = load_found_by_rank_0(self.folder, path, self._types, self._team)
