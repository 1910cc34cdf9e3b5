"""A start maps the checkpoint's file, and keeps nothing that lies in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import Setting, train


@pytest.mark.shows("S40")
def test_the_file_is_mapped_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    load = torch.load

    def watched(*args: Any, **options: Any) -> Any:
        asked.append(options["mmap"])
        return load(*args, **options)

    train(tmp_path / "run", Setting(total_steps=3))
    monkeypatch.setattr(torch, "load", watched)
    train(tmp_path / "run", Setting(total_steps=5))
    assert asked == [True]
