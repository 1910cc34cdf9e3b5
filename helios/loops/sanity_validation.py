"""A trial validation before the training, which leaves no trace (C17, K14)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from helios.core import rng
from helios.model.snapshot import Snapshot
from helios.session import Session
from helios.state import Phase
from helios.terminal import root_logger as log


@contextmanager
def trying(session: Session, *others: object) -> Iterator[None]:
    """Run a trial validation; what it has changed is put back.

    After an error nothing is put back: the run ends before the training begins.

    Args:
        session: the run.
        others: what it may change besides the model, plugins, engine and loaders.
    """
    sources = session.sources[Phase.VALIDATION]
    with rng.stream(rng.key(session.seed, "sanity")):
        session.hooks.emit("on_sanity_check_start")
        requests = session.agreement.remember()
        loaders = [source.loader for source in sources]
        plugins = session.plugins.values()
        trace = Snapshot([session.model, session.engine, *plugins, *loaders, *others])
        session.is_sanity_check = True
        try:
            with log.muted_tensorboard():
                yield
        finally:
            session.is_sanity_check = False
        # Workers that live from pass to pass end here, and not when they are collected.
        for source in sources:
            source.close()
        trace.erase()
        session.agreement.take_back(requests)
        session.agree()
        session.hooks.emit("on_sanity_check_end")
