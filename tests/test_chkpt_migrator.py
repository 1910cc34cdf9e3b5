"""The migrator's doors: the function, the two module names, their options and exit codes."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import helios.chkpt_migrator as migrator
from helios.checkpoint import loading
from helios.errors import ArgumentError, CheckpointError
from helios.migration.folder_migration import BACKUP_FOLDER
from helios.state import TrainingState
from tests.support import old_files as old

HELP = Path(__file__).parent / "golden" / "help" / "migrate.txt"
NAMES = ("0.3.0/linear_epoch_1_iter_5.pth", "2.0.1/linear_epoch_2_iter_10.pth")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, name in enumerate(NAMES):
        old.lay_out(tmp_path / "runs" / str(number), name)
    return tmp_path / "runs"


def snapshot(root: Path) -> dict[Path, tuple[int, bytes]]:
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*") if p.is_file()}


@pytest.mark.shows("S23")
def test_the_command_migrates_below_a_folder_and_keeps_the_old_files(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(root)
    assert migrator.main([str(root), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"to be migrated": 2}
    assert snapshot(root) == before
    assert migrator.main([str(root)]) == 0
    assert capsys.readouterr().out.endswith("2 migrated.\n")
    for path, (_, data) in before.items():
        assert (path.parent / BACKUP_FOLDER / path.name).read_bytes() == data
        assert loading.load(path).sidecar is not None
    after = snapshot(root)
    assert migrator.main([str(root)]) == 0
    assert capsys.readouterr().out.endswith("2 already current.\n")
    assert snapshot(root) == after


@pytest.mark.shows("S23")
def test_wrong_usage_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        migrator.main(["--wrong", "."])
    assert ended.value.code == 2
    assert migrator.main([str(tmp_path / "gone")]) == 2
    assert "gone" in capsys.readouterr().err


@pytest.mark.shows("H27", "S23")
@pytest.mark.parametrize("module", ["helios.chkpt_migrator", "chkpt_migrator"])
def test_both_module_names_are_the_same_command(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chkpt_migrator", "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == HELP.read_text("utf-8")


@pytest.mark.shows("H27")
def test_the_function_migrates_what_lies_directly_in_a_folder_in_its_place(root: Path) -> None:
    (first, second) = sorted(root.rglob("*.pth"))
    before = second.read_bytes()
    result = migrator.migrate_checkpoints_to_current_version(first.parent)
    assert result is None
    assert sorted(p.name for p in first.parent.iterdir()) == [
        first.with_suffix(".json").name,
        first.name,
    ]
    migrator.migrate_checkpoints_to_current_version(root)
    assert second.read_bytes() == before
    loading.load(first)


@pytest.mark.shows("H27")
def test_the_function_raises_for_what_it_could_not_migrate_after_the_rest(tmp_path: Path) -> None:
    good = old.lay_out(tmp_path, NAMES[0])
    bad = good.with_name("a_epoch_1_iter_1.pth")
    bad.write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match=r"1 of 2 files.*a_epoch_1_iter_1"):
        migrator.migrate_checkpoints_to_current_version(good.parent)
    assert good.with_suffix(".json").exists()
    with pytest.raises(ArgumentError, match="folder that exists"):
        migrator.migrate_checkpoints_to_current_version(tmp_path / "gone")


@pytest.mark.shows("S70")
def test_a_dictionary_that_a_script_saved_with_the_present_state_is_migrated(
    tmp_path: Path,
) -> None:
    """As scripts of Helios 1 do by hand, whose ``TrainingState`` lives in another module now."""
    state = TrainingState(
        current_iteration=4, global_iteration=4, global_epoch=1, dataset_iter=4, running_iter=2
    )
    weight = torch.arange(3.0)
    path = tmp_path / "by_hand_epoch_1_iter_4.pth"
    content = {"version": "1.1.0", "training_state": state, "model": {"weight": weight}, "rng": {}}
    torch.save(content, path)
    migrator.migrate_checkpoints_to_current_version(tmp_path)
    found = loading.load_checkpoint(path)
    assert found["training_state"].running_iter == 2
    assert found["training_state"].global_iteration == 4
    assert torch.equal(found["model"]["weight"], weight)
