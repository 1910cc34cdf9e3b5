"""Averages of a sharded run, and other plugins that hold its tensors, in a later process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helios.plugins import EMA
from tests.support.keyed import Keyed, fit_keyed
from tests.support.ranks import run_ranks
from tests.support.sharded import digest_of

SETTING = Keyed(network="gpt", total_steps=2)


class Watching(EMA):
    """Notes its averages at the end of the training, and those that a later start finds."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0.5)
        self.folder = folder

    def digests(self) -> str:
        averages = self.state_dict()["averages"]["net"]
        return "\n".join(f"{name} {digest_of(part)}" for name, part in averages.items())

    def on_training_end(self) -> None:
        found = self.digests()
        if self.context.global_rank == 0:
            (self.folder / "averages.txt").write_text(found)


def train(folder: Path, num_processes: int, setting: Keyed = SETTING) -> str:
    run_ranks(fit_keyed, num_processes, folder, setting, Watching(folder))
    return (folder / "averages.txt").read_text()


@pytest.mark.shows("P110")
def test_they_do_not_depend_on_who_has_loaded_them(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 1, replace(SETTING, sharding="none", total_steps=3))
    folder = tmp_path / "sharded"
    for num_processes, total_steps in ((2, 1), (1, 2), (3, 3)):
        found = train(folder, num_processes, replace(SETTING, total_steps=total_steps))
    assert found == whole
