"""Trainings of any model that leave an ``Outcome``: what is compared on bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import helios
from helios.plugins import Plugin
from tests.support.runs import EventLog, Outcome, _EndRecorder


def record(
    folder: Path | None,
    model: helios.Model,
    data: helios.DataModule,
    *plugins: Plugin,
    prepare: Callable[[helios.Trainer], None] | None = None,
    **options: Any,
) -> Outcome:
    """Train a model that notes ``records``; goes on from what lies in the folder.

    Args:
        folder: the root of checkpoints; ``None`` for none.
        model: its ``records`` hold the ids and the bits of the losses, by iteration.
        data: its data.
        plugins: plugins to register.
        prepare: may change the trainer, before it trains.
        options: the trainer's options.
    """
    log, end = EventLog(), _EndRecorder()
    trainer = helios.Trainer(
        chkpt_root=folder,
        chkpt_frequency=None if folder is None else 1,
        print_banner=False,
        plugins=[*plugins, log, end],
        use_cpu=True,
        **options,
    )
    if prepare is not None:
        prepare(trainer)
    trainer.fit(model, data)
    nothing = {"model": {}, "tables": {}, "randomness": {}, "state": (), "cursor": None}
    return Outcome(
        records=model.records,
        events=log.events,
        saves=log.saves,
        fetched=[],
        has_ended=bool(end.end),
        **(end.end or nothing),
    )
