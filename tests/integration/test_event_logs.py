"""What runs of every kind tell, in which order, to whom: golden logs, grammar, docs and table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helios.hooks.events import EVENTS, Event, Receiver, Verb
from helios.trainer import Trainer
from scripts import event_page
from tests.support.event_grammar import Grammar, Node, parse, pseudocode_of
from tests.support.event_logs import CALLS, Call, Reaction, play
from tests.support.event_situations import (
    everything,
    golden_log,
    golden_log_of_exceptions,
    lines_after_exception,
    lines_of,
    situations,
)

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"
REMEDY = "Meant so? Run scripts/make_golden.py, and read the difference."
EVERYTHING = everything()
# A generator's batches have a sequence of their own on the page, and where on_fit_end raises, the
# ways out are under way already.
BY_DOCSTRING = [
    name for name in EVERYTHING if name not in ("generator_steps", "exception in on_fit_end")
]


def told_in(name: str) -> list[str]:
    """Return the names of what was told in a situation."""
    return [line.name for line in lines_of(name)]


@pytest.mark.shows("H35", "H55", "K6", "K14", "K31", "K32", "R41")
@pytest.mark.parametrize("name", situations())
def test_a_run_tells_what_its_golden_log_says(name: str) -> None:
    """FEATURES section 8 as DESIGN section 9 corrects it: every event, receiver and counter."""
    path = GOLDEN / "events" / f"{name}.txt"
    golden = path.read_text("utf-8") if path.exists() else ""
    assert golden_log(name) == golden, f"{path.name} differs. {REMEDY}"


@pytest.mark.shows("K34")
def test_exceptions_are_followed_by_what_their_golden_log_says() -> None:
    """K34, DESIGN section 7."""
    golden = (GOLDEN / "events" / "exceptions.txt").read_text("utf-8")
    assert golden_log_of_exceptions() == golden, f"exceptions.txt differs. {REMEDY}"


def test_every_golden_log_belongs_to_a_situation() -> None:
    names = {path.stem for path in (GOLDEN / "events").iterdir()}
    assert names == {*situations(), "exceptions"}, REMEDY


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
    "H32",
    "H33",
    "H34",
    "H52",
    "H54",
    "K7",
    "K8",
    "K10",
    "K12",
    "K15",
    "K16",
    "K17",
    "K22",
    "K23",
    "K24",
    "K25",
    "K26",
    "K27",
    "K28",
    "K29",
    "K30",
    "K38",
    "C3",
    "C5",
    "C10",
    "C13",
)
@pytest.mark.parametrize("name", HAND)
def test_a_run_tells_what_was_written_down_by_hand(name: str, tmp_path: Path) -> None:
    """FEATURES section 8, DESIGN sections 5, 7 and 9; these files are no recordings."""
    text = (GOLDEN / "hand" / f"{name}.txt").read_text("utf-8")
    written = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    found = [play(call, tmp_path).lines for call in HAND[name]][-1]
    assert [str(line).split() for line in found] == written


def test_every_recording_has_its_hand_written_file() -> None:
    assert {path.stem for path in (GOLDEN / "hand").iterdir()} == set(HAND)


def fault_of(name: str, nodes: tuple[Node, ...] | None = None) -> str:
    """Say where a log is no sentence of what the docstring of the call says; empty where it is."""
    situation = EVERYTHING[name]
    given = nodes or event_page.pseudocode(situation.call.verb)
    rules = event_page.pseudocode("validate")
    return Grammar(given, situation.facts, rules).fault_of(told_in(name))


@pytest.mark.shows("K31")
@pytest.mark.parametrize("name", BY_DOCSTRING)
def test_a_log_is_a_sentence_of_the_docstrings_pseudocode(name: str) -> None:
    """DESIGN sections 5 and 7; K34: an exception may come at any place."""
    assert fault_of(name) == ""


@pytest.mark.parametrize("name", BY_DOCSTRING)
def test_what_is_known_of_a_run_are_conditions_of_the_pseudocode(name: str) -> None:
    """Else a changed word in a docstring would make the grammar loose, in silence."""
    verbs = (EVERYTHING[name].call.verb, "validate")  # a fit has validation passes
    nodes = [node for verb in verbs for node in event_page.pseudocode(verb)]
    conditions = {part for top in nodes for node in top.walk() for part in node.conditions}
    assert set(EVERYTHING[name].facts) <= conditions


# The first two cannot both happen, and a loop may run no times, so their order is of no matter.
_HARMLESS = {
    "'if the run has ended before:' and 'if the run resumes:' change places",
    "'if StopIteration is raised:' and 'for each replica that the process runs:' change places",
}


def mutants(nodes: tuple[Node, ...]) -> Iterator[tuple[str, tuple[Node, ...]]]:
    """Yield pseudocode in which a line and what is below it is missing, or stands too late."""
    for place, node in enumerate(nodes):
        if node.text == "finally:":
            others: tuple[Node, ...] = ()
        else:
            others = nodes[place + 1 : place + 2]
            yield f"{node.text!r} is missing", nodes[:place] + nodes[place + 1 :]
        for other in others:
            if other.text != "finally:":
                what = f"{node.text!r} and {other.text!r} change places"
                yield what, (*nodes[:place], other, node, *nodes[place + 2 :])
        for what, body in mutants(node.body):
            yield what, (*nodes[:place], Node(node.text, body), *nodes[place + 1 :])


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_no_line_of_a_docstring_may_go_or_change_its_place(verb: str) -> None:
    """A grammar that accepts everything shows nothing: some log must refuse each change."""
    names = [name for name in BY_DOCSTRING if EVERYTHING[name].call.verb == verb]
    unseen = []
    for what, nodes in mutants(event_page.pseudocode(verb)):
        try:
            is_seen = any(fault_of(name, nodes) for name in names)
        except ValueError:  # a part that is used is missing
            is_seen = True
        if not is_seen and what not in _HARMLESS:
            unseen.append(what)
    assert not unseen


@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_the_pseudocode_names_events_with_the_arguments_of_the_table(verb: str) -> None:
    nodes = parse(pseudocode_of(getattr(Trainer, verb)))
    for node in (node for top in nodes for node in top.walk() if node.name):
        if node.name in EVENTS:
            assert node.arguments == EVENTS[node.name].parameters, node.text
        else:
            assert node.name in CALLS.values(), node.text


def names_in(text: str) -> set[str]:
    """Return the events that stand in the blocks of a page, as something that is told."""
    blocks = text.split("```text\n")[1:]
    nodes = [node for block in blocks for node in parse(block.partition("```")[0])]
    return {node.name for top in nodes for node in top.walk() if node.name} - set(CALLS.values())


def test_the_page_of_events_is_what_the_table_and_the_docstrings_make() -> None:
    """DESIGN section 7."""
    page = (ROOT / "docs" / "hooks.md").read_text("utf-8")
    assert page == event_page.render(), f"docs/hooks.md differs. {REMEDY}"
    assert page.count("\n| `") == len(EVENTS)
    assert all(len(line) <= 100 for line in page.splitlines() if not line.startswith("|"))


@pytest.mark.shows("K41")
def test_the_table_the_page_and_the_runs_have_the_same_events() -> None:
    """DESIGN section 7: none is dead, and nothing is told that the table does not have."""
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
    """C8, C14; only an exception or StopIteration keeps those who come later from it."""
    left = "stop_iteration" in name
    for line in lines_of(name):
        if line.name in EVENTS:
            expected = letters_of(EVENTS[line.name])
            assert line.letters == expected or (left and line.letters == "QP"), line


def test_the_rows_of_the_training_stand_in_the_order_in_which_they_are_told(tmp_path: Path) -> None:
    """The table is read as a story."""
    options = _options("epoch", 1, print_frequency=1, chkpt_frequency=1)
    told = [line.name for line in play(Call(options=options, training=1), tmp_path).lines]
    first = list(dict.fromkeys(name for name in told if name in EVENTS))
    assert first == [name for name in EVENTS if name in told]


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_the_rows_of_an_evaluation_stand_in_the_order_in_which_they_are_told(verb: str) -> None:
    forward = ("on_forward_start", "on_forward_end")
    first = [name for name in dict.fromkeys(told_in(verb)) if name in EVENTS]
    rows = [name for name in EVENTS if name in first]
    assert [name for name in first if name not in forward] == [
        name for name in rows if name not in forward
    ]


@pytest.mark.shows("K3", "C14")
def test_a_monitor_hears_the_ends_of_validations_and_epochs_after_the_model() -> None:
    """C14, K3, spelled out; it has registered first, and hears all else before the other plugin."""
    letters = {line.name: line.letters for line in lines_of("fit_by_epochs")}
    late = {name for name, heard in letters.items() if heard == "PMQE"}
    assert late == {"on_validation_end", "on_training_epoch_end"}
    assert letters["on_validation_start"] == letters["on_training_epoch_start"] == "QPME"


@pytest.mark.shows("K34", "R40")
@pytest.mark.parametrize("event", EVENTS)
def test_after_an_exception_only_the_ways_out_are_told(event: str) -> None:
    """K34, DESIGN section 7: no end of a scope, not the end of fit; modes are restored."""
    told = [line.name for line in lines_after_exception(event)]
    ways_out = ["on_exception", "model.train", "engine.teardown", "teardown"]
    assert told[0] == event
    rest = [name for name in told[1:] if name != event]
    assert rest == [name for name in ways_out if name in rest]
    assert told[-1] == "teardown"


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_an_interruption_inside_an_epoch_tells_what_the_page_says(unit: str) -> None:
    """DESIGN section 7: neither the end of the epoch nor that of the training."""
    told = told_in(f"interruption_by_{unit}")
    start = len(told) - told[::-1].index("on_training_step_end")
    facts = {
        condition: unit in condition for condition in ("epochs are counted", "steps are counted")
    }
    rules = (*event_page.pseudocode("fit"), *event_page.pseudocode("validate"))
    grammar = Grammar(parse(event_page.INTERRUPTION), facts, rules)
    assert grammar.fault_of(told[start:]) == ""
    assert not {"on_training_epoch_end", "on_training_end"} & set(told)


def test_a_step_that_is_a_generator_tells_what_the_page_says() -> None:
    """L27: forward, backward and update of each optimizer in its turn."""
    told = told_in("generator_steps")
    starts = [place for place, name in enumerate(told) if name == "on_training_batch_start"]
    ends = [place for place, name in enumerate(told) if name == "on_training_batch_end"]
    assert len(starts) == 2
    for start, end in zip(starts, ends, strict=True):
        grammar = Grammar(parse(event_page.GENERATOR), {"if it has parameters to train": True})
        assert grammar.fault_of(told[start + 1 : end]) == ""


@pytest.mark.shows("K26", "K38", "C3")
@pytest.mark.parametrize(
    ("resumed", "following"),
    [
        ("resume_in_mid_epoch_by_epochs", "on_training_step_start"),
        ("resume_in_mid_epoch_by_steps", "on_training_step_start"),
        ("resume_behind_a_validation", "should_training_stop"),
        ("resume_at_an_epochs_end_by_epochs", "should_training_stop"),
        ("resume_at_an_epochs_end_by_steps", "on_training_epoch_end"),
    ],
)
def test_a_resume_goes_on_behind_the_safe_point(resumed: str, following: str) -> None:
    """DESIGN R4, C3, K38."""
    told = told_in(resumed)
    assert told[told.index("on_training_resume") + 1] == following
    starts = told.count("on_training_epoch_start")
    ends = told.count("on_training_epoch_end")
    is_between_epochs = resumed == "resume_at_an_epochs_end_by_epochs"
    assert ends - starts == (0 if is_between_epochs else 1)


def test_a_log_that_breaks_the_grammar_is_told_with_what_was_expected() -> None:
    nodes = parse("for each batch:\n    on_a()\n    if it is so: on_b()\non_c()")
    assert Grammar(nodes, {}).fault_of(["on_a", "on_b", "on_c"]) == ""
    found = Grammar(nodes, {"it is so": False}).fault_of(["on_a", "on_b", "on_c"])
    assert found == "line 1: on_b follows on_a; expected on_a or on_c"
    assert Grammar(nodes, {}).fault_of(["on_a"]) == "the end; expected on_a or on_b or on_c"
    with pytest.raises(ValueError, match="'a pass' is no line of pseudocode"):
        Grammar(parse("a pass"), {})
