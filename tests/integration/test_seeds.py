"""Another seed at a resume: refused until it is allowed, and then the epoch begins again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import helios
from helios.cli import main
from helios.errors import RunMismatchError
from tests.support.runs import Setting, train

SETTING = Setting(total_steps=8, valid_frequency=None, validates=False)


@pytest.mark.shows("P30")
def test_another_seed_is_refused_at_a_resume_until_it_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, SETTING)
    changed = dataclasses.replace(SETTING, total_steps=14, seed=6)
    with pytest.raises(RunMismatchError, match=r"random_seed: 5 -> 6\..*allow_changes") as caught:
        train(tmp_path, changed)
    assert 'Trainer(allow_changes=("random_seed",))' in str(caught.value)
    options = {"allow_changes": ("random_seed",)}
    resumed = train(tmp_path, dataclasses.replace(changed, options=options))
    assert sorted(resumed.records) == [*range(9, 15)]
    # The six batches of an epoch, in the order of the other seed.
    ids = [i for n in range(9, 15) for i in resumed.records[n][0]]
    assert sorted(ids) == [*range(22)]
    fresh = train(tmp_path / "fresh", dataclasses.replace(SETTING, seed=6, total_steps=12))
    assert ids == [i for n in range(7, 13) for i in fresh.records[n][0]]
    newest = helios.find_last_checkpoint(tmp_path / "small")
    assert newest is not None
    assert "random_seed: 5 -> 6" in newest.with_suffix(".json").read_text()
    capsys.readouterr()
    assert main(["inspect", str(newest)]) == 0
    assert "random_seed 6" in capsys.readouterr().out
