"""Training runs and checkpoints of commit cdb25de, which fill every section of their files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.cli import main
from helios.ledger import verify
from tests.support.full_state import FULL_STATE
from tests.support.sharded import IS_ABLE

RUNS = [
    (run, counts[0])
    for run, counts in FULL_STATE.runs.items()
    if IS_ABLE or not run.startswith("sharded-")
]
RESUMES = [
    pytest.param(run, path, count, id=f"{run}-{path.stem}-{count}")
    for run, _ in RUNS
    for path in FULL_STATE.checkpoints(run)
    for count in FULL_STATE.runs[run]
]
LEDGERS = [run for run in FULL_STATE.runs if run.startswith("ledgers-")]

KEYS = {
    *("schema", "version", "training_state", "cursor", "model", "by_rank", "tables", "is_manual"),
    *("plugins", "loops", "data", "engine", "rng", "num_threads", "num_replicas", "obstacles"),
    *("unshared", "mismatches", "missing", "claims", "owners", "options", "machine", "added"),
    *("resumed_from", "log_path", "run_path", "events", "ledger", "rewinds"),
}
"""Of a checkpoint of schema 2, with one that a hook added; without ``migrated_from``."""
SECTIONS = {
    *("objects", "kinds", "members", "built", "drivers", "forms", "ties", "blocks", "parameters"),
    *("flags", "grads", "omitted", "tables", "values", "inner", "generators", "aliases", "orders"),
}
"""Of the state of an owner, besides what says that something is missing."""
FULL_OWNERS = {
    *("the model", "model", "engine", "data", "plugin 'plain'", "plugin 'leaving'"),
    "loop 'fit.epoch.batch'",
}
"""Those with all sections: ``model`` is what a model with a state of its own leaves out."""
SMALL_OWNERS = {
    "data set": {"values", "generators"},
    "data set.inside": {"values", "generators"},
    "collate function": {"values", "generators"},
    "context 0 (Context) of on_batch in 'pipeline-hooks'": {"values", "generators"},
    "context 0 (ContextWithState) of on_model_forward in 'pipeline-hooks'": {"values"},
    "plugin 'place'": {"objects", "values", "inner", "generators", "aliases"},
}
PARTS = {
    "values": {"changed", "deleted"},
    "aliases": {"set", "deleted", "lengths"},
    "by_rank": {"values", "places", "objects", "owners"},
    "places": {"inner", "generators", "aliases", "orders"},
    "data": {"description", "state", "length"},
    "engine": {"scaler"},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("run", "num_processes"), RUNS)
def test_a_frozen_script_gives_its_bits_from_the_start(
    run: str, num_processes: int, tmp_path: Path
) -> None:
    found, expected = FULL_STATE.run(run, tmp_path, num_processes), FULL_STATE.load(run)["whole"]
    if run in LEDGERS:
        assert found["end"] != expected["end"]
        for result in (found, expected):
            result["end"] = [_without_version(text) for text in result["end"]]
    assert found == expected


def _without_version(text: str) -> str:
    """Return a line of a ledger without what version 2 has added, which all hashes cover."""
    if not text.startswith("ledger "):
        return text
    line = json.loads(text.removeprefix("ledger "))
    del line["h"]
    line.pop("ledger", None)
    line.pop("buffers", None)
    return json.dumps(line)


@pytest.mark.parametrize(("run", "path", "num_processes"), RESUMES)
def test_a_frozen_checkpoint_resumes_to_its_bits(
    run: str, path: Path, num_processes: int, tmp_path: Path
) -> None:
    expected = FULL_STATE.load(run)[path.stem]
    found = FULL_STATE.resume(run, path, tmp_path, num_processes)
    if num_processes != FULL_STATE.runs[run][0]:
        # Processes may take the replicas of an iteration in another order.
        found["steps"].sort()
        expected["steps"].sort()
    assert found == expected


@pytest.mark.parametrize("run", FULL_STATE.runs)
def test_frozen_resumes_end_as_the_undisturbed_run(run: str) -> None:
    """Else what is frozen would be a fault."""
    whole, *resumed = FULL_STATE.load(run).values()
    assert len(resumed) == len(FULL_STATE.checkpoints(run)) > 0
    for result in resumed:
        assert result["end"] == whole["end"] != []
        count = len(result["steps"])
        assert 0 < count < len(whole["steps"])
        assert result["steps"] == whole["steps"][-count:]


def test_no_frozen_byte_has_changed() -> None:
    lines = (FULL_STATE.folder / "sha256.txt").read_text("utf-8").splitlines()
    listed = {name: digest for digest, name in map(str.split, lines)}
    assert FULL_STATE.digests() == listed
    assert sum(path.stat().st_size for path in FULL_STATE.content()) < 3 * 2**20


def test_what_is_frozen_is_not_written_again(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="never written again"):
        FULL_STATE.freeze("owners", tmp_path)


@pytest.mark.parametrize("run", LEDGERS)
def test_a_frozen_ledger_has_its_chain_and_fits_its_checkpoint(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / run
    shutil.copytree(FULL_STATE.folder / "checkpoints" / run, folder)
    assert verify(folder / "ledger.jsonl").findings == []
    assert main(["verify", str(folder), "--json"]) == 0
    assert "ledger_epoch_1_iter_4.pth" in capsys.readouterr().out
    lines = (folder / "ledger.jsonl").read_text("utf-8").splitlines(keepends=True)
    (folder / "ledger.jsonl").write_text("".join([*lines[:2], *lines[3:]]), "utf-8")
    assert main(["verify", str(folder)]) == 1


@pytest.mark.parametrize("run", ["ledgers-v1_bf16_steps", "ledgers-v1_fp64_full"])
def test_a_ledger_that_a_kill_cut_off_behind_the_checkpoint_ends_the_same(
    run: str, tmp_path: Path
) -> None:
    (path,) = FULL_STATE.checkpoints(run)
    ledger = FULL_STATE.folder / "checkpoints" / run / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    done = [line for line in lines if json.loads(line).get("at", [0, 0, 0])[2] <= 4]
    folder = tmp_path / "ledger"
    folder.mkdir()
    for source in (path, path.with_suffix(".json")):
        shutil.copyfile(source, folder / source.name)
    (folder / "ledger.jsonl").write_bytes(b"".join(done) + lines[len(done)][:-5])
    assert 4 < len(done) < len(lines)
    assert FULL_STATE.run(run, tmp_path) == FULL_STATE.load(run)[path.stem]
    assert (folder / "ledger.jsonl").read_bytes() == ledger.read_bytes()


def test_the_frozen_checkpoints_fill_every_section_of_every_owner() -> None:
    keys: set[str] = set()
    sections: dict[str, set[str]] = {}
    parts: dict[str, set[str]] = {}
    for payload in _payloads():
        assert payload["schema"] == 2
        keys |= _filled(payload)
        owners = payload["owners"]
        if "objects" in payload["model"]:
            owners = {**owners, "the model": payload["model"]}
        for name, state in owners.items():
            sections.setdefault(name, set()).update(_filled(state))
            for section in ("values", "aliases"):
                parts.setdefault(section, set()).update(_filled(state[section]))
        for part in payload["by_rank"]:
            parts.setdefault("by_rank", set()).update(_filled(part))
            parts.setdefault("places", set()).update(_filled(part["places"]))
        for key in ("data", "engine"):
            parts.setdefault(key, set()).update(_filled(payload[key]))
    assert keys == KEYS
    wanted = {**dict.fromkeys(FULL_OWNERS, SECTIONS), **SMALL_OWNERS}
    assert [name for name, names in wanted.items() if not names <= sections[name]] == []
    assert [name for name, names in PARTS.items() if not names <= parts[name]] == []
    assert "missing" in sections["the model"]
    assert set().union(*sections.values()) <= SECTIONS | {"missing", "is_partial"}


def test_sharded_folders_of_three_ranks_are_among_them() -> None:
    folders = FULL_STATE.checkpoints("sharded-on_3")
    assert [folder.suffix for folder in folders] == [".ckpt", ".ckpt"]
    for folder in folders:
        assert len([*folder.glob("rank-*-of-00003.safetensors")]) == 3
    assert {path.suffix for path in FULL_STATE.checkpoints("sharded-on_1")} == {".pth"}


def _payloads() -> Iterator[dict[str, Any]]:
    """Yield what lies in the files, as torch reads it."""
    for run in FULL_STATE.runs:
        for path in FULL_STATE.checkpoints(run):
            file = path / "record.pth" if path.is_dir() else path
            yield torch.load(file, weights_only=True)


def _filled(table: dict[str, Any]) -> set[str]:
    return {key for key, value in table.items() if _is_filled(value)}


def _is_filled(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_filled, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_is_filled, value))
    return isinstance(value, torch.Tensor) or bool(value)
