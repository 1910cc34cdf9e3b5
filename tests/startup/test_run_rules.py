"""What is computed in another way than by the version that began a run is said once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import helios
from helios.startup.run_identity import RULES, adopt_rules
from helios.storage import codec
from tests.support.runs import Setting, train

_SETTING = Setting(total_steps=2, accumulation=2, validates=False, valid_frequency=None)
_NEWS = "An earlier version of Helios began this run. From here on: "


def _begin_with_an_earlier_version(folder: Path) -> None:
    newest = helios.find_last_checkpoint(folder / "small")
    assert newest is not None
    payload = codec.read(newest)
    assert payload["options"].pop("rules") == {rule.name: True for rule in RULES}
    with newest.open("wb") as handle:
        codec.write_encoded(handle, codec.encode(payload, where=""))
    newest.with_suffix(".json").unlink()


@pytest.mark.shows("P120")
def test_a_run_of_an_earlier_version_is_told_once_what_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, _SETTING)
    _begin_with_an_earlier_version(tmp_path)
    assert _NEWS not in capsys.readouterr().err
    train(tmp_path, dataclasses.replace(_SETTING, total_steps=4))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if _NEWS in line]
    assert "totals of scores and losses are added in float64" in line
    assert "(unknown before iteration 4 (step 2))" in line
    train(tmp_path, dataclasses.replace(_SETTING, total_steps=6))
    assert _NEWS not in capsys.readouterr().err
    newest = helios.find_last_checkpoint(tmp_path / "small")
    assert newest is not None
    stored = json.loads(newest.with_suffix(".json").read_text())["options"]["rules"]
    assert stored == {rule.name: not rule.is_kept_out for rule in RULES}


@pytest.mark.shows("P120")
def test_a_rule_of_a_later_version_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    known = {rule.name: True for rule in RULES} | {"later": False}
    assert adopt_rules({"rules": known}) == known
    assert caplog.text == ""
