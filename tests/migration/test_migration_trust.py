"""A file that wants something executed is refused by name, and nothing of it runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helios import chkpt_migrator
from helios.migration.folder_migration import Result, migrate_checkpoints
from tests.support import old_files as old

STATE = {"current_iteration": 4, "global_iteration": 4, "global_epoch": 1, "dataset_iter": 4}


class Call:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def reduce_of_a_stub(mark: Path) -> bytes:
    """The class that stands for TrainingState, called with a class as its argument, and built."""
    inner = b"cposix\nsystem\n" + _text(f"touch {mark}") + b"\x85R"
    return b"\x80\x02chelios.trainer\nTrainingState\n" + inner + b"\x85R."


def build_of_a_stub(mark: Path) -> bytes:
    """An instance whose state names __class__, __reduce__ and __setstate__."""
    state = b"}(" + _text("__class__") + b"cbuiltins\neval\n"
    state += _text("__setstate__") + b"cbuiltins\nexec\nu"
    return b"\x80\x02chelios.trainer\nTrainingState\n)\x81" + state + b"b."


def attribute_of_a_stub(mark: Path) -> bytes:
    """A dotted name that walks from a class which is allowed to what is not."""
    name = b"chelios.trainer\nTrainingState.__init__.__globals__\n"
    return b"\x80\x02" + name + b")R."


def stack_global(mark: Path) -> bytes:
    return (
        b"\x80\x04" + _text("os") + _text("system") + b"\x93" + _text(f"touch {mark}") + b"\x85R."
    )


@pytest.mark.shows("S17")
@pytest.mark.parametrize(
    "make", [reduce_of_a_stub, build_of_a_stub, attribute_of_a_stub, stack_global]
)
def test_tricks_with_the_names_that_are_known_execute_nothing(
    tmp_path: Path, make: Callable[[Path], bytes]
) -> None:
    mark = tmp_path / "mark"
    path = old.with_pickle(tmp_path / "a_epoch_1_iter_4.pth", make(mark))
    before = path.read_bytes()
    (report,) = migrate_checkpoints(path)
    assert report.result in (Result.REFUSED, Result.DAMAGED), report
    assert not mark.exists()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.shows("S17")
@pytest.mark.parametrize(
    ("place", "function"),
    [("training_state", os.system), ("model", eval), ("tensor", os.system)],
)
def test_a_call_anywhere_in_the_file_is_refused_and_not_made(
    tmp_path: Path, place: str, function: Any
) -> None:
    mark = tmp_path / "mark"
    call = Call(function, f"open({str(mark)!r}, 'w')" if function is eval else f"touch {mark}")
    tree: dict[Any, Any] = {"version": "1.0.0", "training_state": STATE, "model": {}}
    if place == "tensor":
        weight = torch.nn.Parameter(torch.zeros(2))
        weight.note = call  # type: ignore[attr-defined]
        tree |= {"model": {"weight": weight}}
    else:
        tree |= {place: call}
    path = tmp_path / "a_epoch_1_iter_4.pth"
    torch.save(tree, path)
    before = path.read_bytes()
    (report,) = migrate_checkpoints(path)
    assert report.result is Result.REFUSED
    assert function.__name__ in report.reason
    assert not mark.exists()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_command_reports_a_malicious_file_and_migrates_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = old.lay_out(tmp_path, old.FILES[0])
    bad = tmp_path / "linear" / "linear_epoch_9_iter_9.pth"
    torch.save({"training_state": Call(os.system, f"touch {tmp_path / 'mark'}")}, bad)
    assert chkpt_migrator.main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert f"refused:\n  {bad}: " in said
    assert "posix.system" in said or "nt.system" in said
    assert good.with_suffix(".json").exists()
    assert not (tmp_path / "mark").exists()
