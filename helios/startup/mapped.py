"""Copies of what is kept of a checkpoint whose tensors lie in its file.

Mapping the file spares a copy of the whole state at every start. What goes on living must not lie
there: somebody may write to the file.
"""

from __future__ import annotations

import copy
from typing import Any

from helios.model.model import Model


def detach(payload: dict[str, Any], model: Model, *, is_shown: bool = False) -> dict[str, Any]:
    """Return the content of a checkpoint with copies of all tensors that somebody may keep.

    Args:
        payload: the content.
        model: takes its part; Helios' own way of loading keeps nothing of it.
        is_shown: whether user code gets to see the whole.
    """
    keeps_nothing = type(model).load_state_dict is Model.load_state_dict and not is_shown
    kept = {key: part for key, part in payload.items() if key != "model" or not keeps_nothing}
    return payload | copy.deepcopy(kept)
