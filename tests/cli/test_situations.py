"""Commands where files are not as they should be: no folder, half a run, damage, several ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helios.checkpoint.store import RunFolder
from helios.cli import main
from tests.checkpoint.helpers import save
from tests.checkpoint.sharded_helpers import save_sharded
from tests.support.paused import locked
from tests.support.synthetic_run import write_run, write_run_file

READ = {
    "ls": ["ls", "RUN"],
    "inspect": ["inspect", "RUN"],
    "verify": ["verify", "RUN"],
    "diff": ["diff", "RUN", "RUN"],
    "replay": ["replay", "RUN"],
    "report": ["report", "RUN", "--out", "OUT/report.html"],
    "compare": ["compare", "RUN", "OTHER", "--plot", "OUT/compare.png"],
    "export": ["export", "RUN", "--to", "pt", "--out", "OUT/weights.pt"],
    "migrate": ["migrate", "RUN"],
}


def make_empty(folder: Path) -> None:
    folder.mkdir()


def make_run(folder: Path) -> RunFolder:
    write_run(folder, {"options": {"a": 1}}, scores={"error": [2.0, 1.0]})
    write_run_file(folder, {"event": "start", "iteration": 0})
    run = RunFolder(folder)
    for iteration in (1, 2):
        save(run, 1, iteration)
    return run


def make_damaged(folder: Path) -> None:
    path = newest(make_run(folder))
    path.write_bytes(path.read_bytes()[:-100])


def make_flipped(folder: Path) -> None:
    """Flip a bit of a tensor, which only who reads all bytes can see."""
    path = newest(make_run(folder))
    data = bytearray(path.read_bytes())
    data[data.find((torch.arange(50.0) * 2).numpy().tobytes()) + 9] ^= 1
    path.write_bytes(data)


def make_under_way(folder: Path) -> None:
    """Leave half a line of the ledger and half a checkpoint, as a run that goes on does."""
    path = newest(make_run(folder))
    with (folder / "ledger.jsonl").open("r+b") as ledger:
        data = ledger.read()
        ledger.seek(0)
        ledger.truncate()
        ledger.write(data[: data.rindex(b"{") + 20])
    (folder / "run_epoch_1_iter_3.pth.tmp").write_bytes(path.read_bytes()[:500])


def make_sharded(folder: Path) -> None:
    make_run(folder)
    save_sharded(RunFolder(folder), 1, 4)


def newest(run: RunFolder) -> Path:
    return sorted(run.path.glob("*.pth"))[-1]


SITUATIONS: dict[str, tuple[Callable[[Path], object], dict[str, int]]] = {
    "empty": (
        make_empty,
        {
            **dict.fromkeys(READ, 2),
            "ls": 0,
            "migrate": 0,
        },
    ),
    "damaged": (make_damaged, {"verify": 1, "migrate": 0, "export": 0}),
    "flipped": (make_flipped, {"verify": 1, "export": 1}),
    "under way": (make_under_way, {"verify": 1}),
    "sharded": (make_sharded, {}),
}


def words_of(command: str, folder: Path, other: Path, out: Path) -> list[str]:
    places = {"RUN": folder, "OTHER": other, "OUT": out}
    words = []
    for word in READ[command]:
        first, slash, rest = word.partition("/")
        words.append(f"{places.get(first, first)}{slash}{rest}")
    return words


@pytest.mark.shows("P145")
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("command", READ)
def test_every_command_ends_with_a_code_and_a_message(
    command: str, situation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, codes = SITUATIONS[situation]
    folder, other, out = (tmp_path / name for name in ("run", "other", "out"))
    make(folder)
    make_run(other)
    out.mkdir()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    usual = {"replay": 2}
    with locked(folder):
        code = main(words_of(command, folder, other, out))
    printed = capsys.readouterr()
    assert code == codes.get(command, usual.get(command, 0)), printed
    assert "Traceback" not in printed.out + printed.err
    assert bool(printed.err) == (code == 2 or (command, code) == ("export", 1)), printed
    if printed.err:
        assert str(folder) in printed.err
    left = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {path: left.get(path) for path in before} == before


@pytest.mark.shows("P145")
def test_of_a_folder_the_checkpoint_counts_from_which_a_start_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_damaged(tmp_path / "run")
    for words in (["inspect"], ["export", "--to", "pt"]):
        assert main([*words, str(tmp_path / "run"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        name = Path(found.get("source", found["path"])).name
        assert name == "run_epoch_1_iter_1.pth"
    # With nothing but damage there is still something to look at.
    oldest = tmp_path / "run" / "run_epoch_1_iter_1.pth"
    oldest.write_bytes(oldest.read_bytes()[:-100])
    assert main(["inspect", str(tmp_path / "run")]) == 1
    assert "run_epoch_1_iter_2.pth" in capsys.readouterr().out
