"""What processes had of their own: each gets it back in a start with as many of them."""

from __future__ import annotations

import logging
from typing import Any

from helios.engines.replicated import Replicas

_LOGGER = logging.getLogger(__name__)


def take_own_parts(payload: dict[str, Any], replicas: Replicas) -> dict[str, Any]:
    """Return the content of a checkpoint as this process left it.

    Args:
        payload: the content, with ``by_rank``: what every replica changes on its own, and the state
            of loaders that Helios did not make.
        replicas: says which process this is.
    """
    by_rank = payload.get("by_rank", [])
    if not by_rank:
        return payload
    if len(by_rank) != replicas.num_processes:
        _LOGGER.warning(
            "%d processes went on each with its own %s, and now there are %d: all take what rank 0 "
            "had, so bits may differ from an undisturbed run's.",
            len(by_rank),
            ", ".join(payload["unshared"]) or "loader",
            replicas.num_processes,
        )
        return payload
    own = by_rank[replicas.rank]
    model, data = payload["model"], payload["data"]
    if own["values"] is not None:
        objects = {**model["objects"], **own["objects"]}
        model = {**model, "values": own["values"], "objects": objects}
    if own["data"] is not None:
        data = {**data, "state": own["data"]}
    return {**payload, "model": model, "data": data}
