"""What an editor completes in what users extend is what the pages name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helios import Context, Engine, Plugin
from helios.loops import BatchLoop, EpochLoop, FitLoop, Loop, OptimizerLoop, YieldLoop
from helios.model import BatchProcessor
from helios.plugins import HookContext, PipelineHooks

DOCS = Path(__file__).parents[2] / "docs"
LOOPS, CHANNELS = ("loops.md",), ("channels.md",)
PAGES: dict[type, tuple[str, ...]] = {
    Context: ("channels.md",),
    Engine: ("engines.md", "sharding.md"),
    Loop: LOOPS,
    OptimizerLoop: LOOPS,
    YieldLoop: LOOPS,
    BatchLoop: LOOPS,
    EpochLoop: LOOPS,
    FitLoop: LOOPS,
    Plugin: ("plugins.md", "hooks.md"),
    HookContext: CHANNELS,
    PipelineHooks: ("channels.md", "plugins.md", "hooks.md"),
    BatchProcessor: CHANNELS,
}


def words_of(*pages: str) -> set[str]:
    """Return the words in the code of pages."""
    text = "".join((DOCS / page).read_text("utf-8") for page in pages)
    code = re.findall(r"^```.*?^```|`[^`\n]+`", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"\w+", " ".join(code)))


@pytest.mark.parametrize("kind", PAGES)
def test_what_completion_shows_is_named_in_the_pages(kind: type) -> None:
    shown = {name for name in dir(kind) if not name.startswith("_")}
    assert sorted(shown - words_of(*PAGES[kind])) == []


@pytest.mark.parametrize(("kind", "most"), [(Context, 53), (Engine, 40), (Loop, 19)])
def test_completion_shows_no_more_than_before(kind: type, most: int) -> None:
    assert len([name for name in dir(kind) if not name.startswith("_")]) <= most
