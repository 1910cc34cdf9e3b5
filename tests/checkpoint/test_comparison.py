"""Two checkpoints are compared tensor by tensor, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.checkpoint.outline import compare_checkpoints
from helios.cli.commands import main


def _write(path: Path, tensors: dict[str, Any]) -> Path:
    torch.save({"model": tensors, "counters": {"n": 3}}, path)
    return path


def _compare(folder: Path, one: Any, other: Any) -> Any:
    return compare_checkpoints(
        _write(folder / "one.pth", {"w": one}), _write(folder / "other.pth", {"w": other})
    )


@pytest.mark.shows("P13")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [-0.0, 1.5])
def test_distances_are_counted_in_units_of_the_last_place(
    dtype: torch.dtype, start: float, tmp_path: Path
) -> None:
    one = torch.full((3, 4), start, dtype=dtype)
    other = one.clone()
    for _ in range(5):
        other[1, 2] = other[1, 2].nextafter(torch.tensor(math.inf, dtype=dtype))
    other[0, 0] = other[0, 0].nextafter(torch.tensor(-math.inf, dtype=dtype))
    (found,) = _compare(tmp_path, one, other).tensors
    assert (found.path, found.what) == ("model.w", "values")
    assert (found.num_elements, found.size) == (2, 12)
    # From -0.0 the next number up is the smallest positive one: +0.0 lies between.
    assert found.max_ulp == (6 if start == 0 else 5)


@pytest.mark.shows("P13")
def test_the_command_names_a_flipped_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = torch.linspace(-1, 1, 40).view(5, 8)
    one = _write(tmp_path / "one.pth", {"bias": torch.ones(5), "weight": weights})
    flipped = weights.clone()
    flipped.view(torch.int32)[3, 3] ^= 1
    other = _write(tmp_path / "other.pth", {"bias": torch.ones(5), "weight": flipped})
    assert main(["diff", str(one), str(one)]) == 0
    assert capsys.readouterr().out == "equal: 2 tensors\n"
    assert main(["diff", str(one), str(other)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "tensors that differ: 1, such as",
        "  model.weight: 1 of 40 elements, by at most 1 ulp",
    ]
    assert main(["diff", str(one), str(tmp_path)]) == 2
    assert "got one of each" in capsys.readouterr().err
