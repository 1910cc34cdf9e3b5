"""What is logged must be a mapping of names to numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from helios.errors import ArgumentTypeError
from helios.plugins.plugin import Plugin
from tests.support.runs import Setting, train


class Talker(Plugin):
    """Logs a number without a name."""

    def __init__(self) -> None:
        super().__init__("talker")

    def setup(self) -> None: ...

    def on_fit_start(self) -> None:
        self.context.log(0.5)  # type: ignore[arg-type]


def test_a_number_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match=r"mapping of names to numbers, got 0\.5\. Pass"):
        train(tmp_path, Setting(), Talker())
