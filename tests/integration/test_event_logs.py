"""What runs of every kind tell, in which order, to whom: golden logs, grammar, docs and table."""

from __future__ import annotations

from pathlib import Path

import pytest

from helios.hooks.events import EVENTS, Event, Receiver, Verb
from scripts.site import event_page
from tests.support.event_grammar import parse
from tests.support.event_logs import CALLS, Call, Reaction, play
from tests.support.event_situations import (
    everything,
    golden_log,
    golden_log_of_exceptions,
    lines_of,
    situations,
)

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"
REMEDY = "Meant so? Run scripts/make_golden.py, and read the difference."
EVERYTHING = everything()


def told_in(name: str) -> list[str]:
    """Return the names of what was told in a situation."""
    return [line.name for line in lines_of(name)]


@pytest.mark.shows("H35", "H55", "K6", "K14", "K31", "K32", "K37", "L19", "R41")
@pytest.mark.parametrize("name", situations())
def test_a_run_tells_what_its_golden_log_says(name: str) -> None:
    """Every event, receiver and counter."""
    path = GOLDEN / "events" / f"{name}.txt"
    golden = path.read_text("utf-8") if path.exists() else ""
    assert golden_log(name) == golden, f"{path.name} differs. {REMEDY}"


@pytest.mark.shows("K34")
def test_exceptions_are_followed_by_what_their_golden_log_says() -> None:
    golden = (GOLDEN / "events" / "exceptions.txt").read_text("utf-8")
    assert golden_log_of_exceptions() == golden, f"exceptions.txt differs. {REMEDY}"


def _fail(owner: object) -> None:
    raise OSError


def _options(unit: str, total_steps: int, **more: int) -> dict[str, object]:
    return {"train_unit": unit, "total_steps": total_steps, **more}


_RESUMED = _options("iteration", 9, chkpt_frequency=2)
HAND = {
    "fit_by_epochs": (
        Call(
            options=_options("epoch", 2, valid_frequency=1, chkpt_frequency=1),
            training=2,
            evaluation=1,
        ),
    ),
    "fit_by_steps": (
        Call(
            options=_options(
                "iteration", 3, accumulation_steps=2, valid_frequency=2, chkpt_frequency=1
            ),
            evaluation=1,
        ),
    ),
    "exception_after_resume": (
        Call(options=_RESUMED, reactions=(Reaction("train_step", _fail, 3, "M"),), error=OSError),
        Call(options=_RESUMED, reactions=(Reaction("train_step", _fail, 2, "M"),), error=OSError),
    ),
}


@pytest.mark.shows(
    "H32", "H33", "H34", "H52", "H54", "K7", "K8", "K10", "K12", "K15", "K16", "K17", "K22"
)
@pytest.mark.shows(
    "K23", "K24", "K25", "K26", "K27", "K28", "K29", "K30", "K38", "C3", "C5", "C10", "C13"
)
@pytest.mark.parametrize("name", HAND)
def test_a_run_tells_what_was_written_down_by_hand(name: str, tmp_path: Path) -> None:
    """These files are no recordings."""
    text = (GOLDEN / "hand" / f"{name}.txt").read_text("utf-8")
    written = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    found = [play(call, tmp_path).lines for call in HAND[name]][-1]
    assert [str(line).split() for line in found] == written


def names_in(text: str) -> set[str]:
    """Return the events that stand in the blocks of a page, as something that is told."""
    blocks = text.split("```text\n")[1:]
    nodes = [node for block in blocks for node in parse(block.partition("```")[0])]
    return {node.name for top in nodes for node in top.walk() if node.name} - set(CALLS.values())


def test_the_page_of_events_is_what_the_table_and_the_docstrings_make() -> None:
    page = (ROOT / "docs" / "hooks.md").read_text("utf-8")
    assert page == event_page.render(), f"docs/hooks.md differs. {REMEDY}"
    assert page.count("\n| `") == len(EVENTS)
    assert all(len(line) <= 100 for line in page.splitlines() if not line.startswith("|"))


@pytest.mark.shows("K41")
def test_the_table_the_page_and_the_runs_have_the_same_events() -> None:
    """None is dead, and nothing is told that the table does not have."""
    told = {name for situation in EVERYTHING for name in told_in(situation)} - set(CALLS.values())
    assert told == set(EVENTS)
    assert names_in(event_page.render()) == set(EVENTS)


def letters_of(event: Event) -> str:
    """Return who hears an event in these runs, in the order of its row (C8, C14)."""
    plugins = "QP"
    if event.verb is Verb.TRANSFORM or Receiver.MONITOR in event.receivers:
        plugins = "P"
    letters = {
        Receiver.PLUGIN: plugins,
        Receiver.DATA: "D",
        Receiver.MODEL: "M",
        Receiver.ENGINE: "E",
        Receiver.MONITOR: "Q",
    }
    return "".join(letters[receiver] for receiver in event.receivers)


@pytest.mark.shows("K1", "K4", "K36", "C8")
@pytest.mark.parametrize("name", situations())
def test_everybody_in_an_events_row_hears_it_in_the_order_of_the_row(name: str) -> None:
    """Only an exception or StopIteration keeps those who come later from it."""
    left = "stop_iteration" in name
    for line in lines_of(name):
        if line.name in EVENTS:
            expected = letters_of(EVENTS[line.name])
            assert line.letters == expected or (left and line.letters == "QP"), line
