"""Single numbers out of losses, scores and what is logged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helios.core.loss_means import as_number
from helios.errors import UsageError


@pytest.mark.parametrize("value", [None, "two", [2.0], torch.zeros(2), {}])
def test_anything_else_is_an_error_that_names_it(value: Any) -> None:
    with pytest.raises(UsageError, match=r"must be a single number, but 'loss' is"):
        as_number("loss", value)
