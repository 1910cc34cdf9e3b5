"""Evaluations of several processes, beside a training that deletes what they look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helios.checkpoint import loading
from helios.checkpoint.store import CheckpointStore, RunFolder
from helios.errors import CheckpointError
from helios.start.origin import CheckpointChoice, find_chosen
from tests.checkpoint.helpers import save
from tests.engines.joined import replicas_on
from tests.start.test_arguments import make
from tests.support.ranks import run_ranks


def _call(choice: CheckpointChoice, options: Any, team: Any) -> Any:
    """Return a call of an evaluation, as far as the search asks for it."""
    model = SimpleNamespace(save_name="run", types_for_safe_load=list)
    return SimpleNamespace(
        choice=choice, options=options, model=model, name="run", team=team, share=None
    )


def _find(rank: int, root: Path, patch: Callable[[pytest.MonkeyPatch, int, Path], None]) -> Any:
    options = make(chkpt_root=root)
    with replicas_on(rank, 2, 2) as team, pytest.MonkeyPatch.context() as context:
        patch(context, rank, root / "run")
        try:
            loaded, _ = find_chosen(_call(CheckpointChoice(), options, team))
        except CheckpointError as error:
            return str(error)
        return None if loaded is None else loaded.path.name


def _save_behind_rank_0(patch: pytest.MonkeyPatch, rank: int, path: Path) -> None:
    """Let a training go on between the loading of rank 0 and that of rank 1."""
    load, rest = loading.load_present, [3, 2]

    def load_and_save(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        if rank == 0 and rest:
            save(RunFolder(path, CheckpointStore(keep_last=1)), 1, rest.pop())
        return loaded

    patch.setattr(loading, "load_present", load_and_save)


def test_all_processes_load_the_newer_file_where_one_of_them_comes_too_late(
    tmp_path: Path,
) -> None:
    save(RunFolder(tmp_path / "run"), 1, 1)
    assert run_ranks(_find, 2, tmp_path, _save_behind_rank_0) == ["run_epoch_1_iter_3.pth"] * 2


def _hide_from_rank_1(patch: pytest.MonkeyPatch, rank: int, path: Path) -> None:
    def refuse(place: Path, *args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError(str(place))

    if rank == 1:
        patch.setattr(loading, "load_present", refuse)
        patch.setattr(Path, "is_file", lambda path: False)


def test_a_folder_that_is_not_shared_is_named_and_not_looked_for_again(tmp_path: Path) -> None:
    save(RunFolder(tmp_path / "run"), 1, 1)
    texts = run_ranks(_find, 2, tmp_path, _hide_from_rank_1)
    assert len(set(texts)) == 1
    assert "rank 1 finds no such file" in texts[0]
