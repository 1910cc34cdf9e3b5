"""What a call refuses, reads, locks, cuts and writes is ordered as in golden/call_order.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from helios.storage.folder_lock import LOCK_NAME
from tests.support.file_trails import PAGE, SITUATIONS, WRONGS, leave, play, render


def _read(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != LOCK_NAME
    }


@pytest.mark.shows("P148")
@pytest.mark.parametrize("name", SITUATIONS)
def test_a_call_does_to_files_what_the_page_shows(name: str, tmp_path: Path) -> None:
    folder, situation = tmp_path / "all", SITUATIONS[name]
    folder.mkdir()
    leave(folder, situation)
    played = play(folder, situation)
    assert played.error == ""
    assert render(situation, played.lines) in f"{PAGE.read_text('utf-8')}\n"


@pytest.mark.shows("P148")
@pytest.mark.parametrize("name", [name for name, each in SITUATIONS.items() if each.refuses])
def test_the_first_of_two_refusals_counts_and_no_file_of_the_run_changes(
    name: str, tmp_path: Path
) -> None:
    folder, situation = tmp_path / "all", SITUATIONS[name]
    folder.mkdir()
    leave(folder, situation)
    files, events = _read(folder / "runs"), _read(folder / "tb")
    for wrong, *others in zip(situation.refuses, [*situation.refuses[1:], None], strict=True):
        played = play(folder, situation, [wrong, *filter(None, others)])
        assert played.error.startswith(WRONGS[wrong].error), (wrong, played.error)
        assert WRONGS[wrong].says in played.error, wrong
        assert _read(folder / "runs") == files, wrong
        assert events.items() <= _read(folder / "tb").items(), wrong
