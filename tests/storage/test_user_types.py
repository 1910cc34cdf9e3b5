"""Types of the training script have one name in all processes of a run."""

from __future__ import annotations

import enum
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from helios.core.plain_values import qualified_name
from helios.storage import codec


class Mode(enum.Enum):
    WARM = 1
    MAIN = 2


class Box:
    """An object that only its own class can hold."""

    def __init__(self) -> None:
        self.count = 7


SAFE = (Mode, Box)


def _in_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the types be those of a module of that name, as if it was imported."""
    module = types.ModuleType(name)
    for kind in SAFE:
        monkeypatch.setattr(kind, "__module__", name)
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.shows("P112")
@pytest.mark.parametrize(
    ("writer", "reader"), [("__main__", "__mp_main__"), ("__mp_main__", "__main__")]
)
@pytest.mark.parametrize("value", [Mode.MAIN, Box()], ids=["enum", "object"])
def test_a_script_and_a_rank_that_it_started_read_each_others_types(
    value: Any, writer: str, reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python names the script ``__mp_main__`` in a process that it has started."""
    with monkeypatch.context() as patch:
        _in_module(writer, patch)
        written = qualified_name(type(value))
        code = codec.encode({"value": value}, where="model", safe_types=SAFE)
        codec.write_file(tmp_path / "file", code)
    _in_module(reader, monkeypatch)
    found = codec.read(tmp_path / "file", SAFE)["value"]
    assert type(found) is type(value)
    assert qualified_name(type(found)) == written
    assert found.count == 7 if isinstance(found, Box) else found == value
