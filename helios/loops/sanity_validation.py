"""The sanity check: a validation before training, without side effects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from helios.core import rng
from helios.data.keyed import data_sets_of
from helios.session import Session
from helios.state import Phase
from helios.state_graph.rollback import Rollback
from helios.terminal import root_logger as log


@contextmanager
def trying(session: Session, *others: object) -> Iterator[None]:
    """Run a sanity check; everything that it has changed is restored.

    After an error nothing is restored: the run ends before training begins.

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
        owners = [session.model, session.engine, *plugins, *loaders, *others]
        trace = Rollback(owners, leaving=[data for each in loaders for data in data_sets_of(each)])
        session.is_sanity_check = True
        try:
            with log.muted_tensorboard():
                yield
        finally:
            session.is_sanity_check = False
        # Persistent workers end here, not when they are garbage collected.
        for source in sources:
            source.close()
        trace.put_back()
        session.agreement.take_back(requests)
        session.agree()
        session.hooks.emit("on_sanity_check_end")
