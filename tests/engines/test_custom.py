"""The two engines of docs/engines.md that override a method, in trainings."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.engines.engine import Engine
from tests.support.resume import copy_checkpoint
from tests.support.runs import digest

_PAGE = Path(__file__).parents[2] / "docs/engines.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the page defines; its trainings run here, too."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    exec("\n".join(_BLOCK.findall(_PAGE.read_text())), names)
    return names


def fit(page: dict[str, Any], engine: Engine, folder: Path | None = None) -> helios.Model:
    saves: dict[str, Any] = {} if folder is None else {"chkpt_root": folder, "chkpt_frequency": 1}
    trainer = helios.Trainer(
        train_unit="iteration", total_steps=5, engine=engine, print_banner=False, **saves
    )
    model: helios.Model = page["Curve"]("curve")
    trainer.fit(model, page["Data"]())
    return model


def weights(model: Any) -> str:
    return digest(model.network.state_dict())


@pytest.mark.shows("E20", "E40")
def test_gradients_are_zeroed_in_place(page: dict[str, Any]) -> None:
    model: Any = fit(page, page["InPlaceEngine"]("cpu"))
    gradients = [parameter.grad for parameter in model.network.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
    assert weights(model) == weights(fit(page, Engine("cpu")))


@pytest.mark.shows("E21", "E40")
def test_noise_is_added_and_a_resume_repeats_it(page: dict[str, Any], tmp_path: Path) -> None:
    """Its count is state."""
    make: Callable[..., Engine] = page["NoisyEngine"]
    whole = fit(page, make("cpu"), tmp_path / "whole")
    assert weights(whole) != weights(fit(page, Engine("cpu")))
    for path in sorted((tmp_path / "whole/curve").glob("*.pth"))[:-1]:
        root = copy_checkpoint(path, tmp_path / path.stem)
        engine: Any = make("cpu")
        assert weights(fit(page, engine, root)) == weights(whole)
        assert engine.num_steps == 5
