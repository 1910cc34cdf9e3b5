"""Mistakes in what users extend, each with the first line that its user sees."""

from __future__ import annotations

import pytest

from tests.support import mistakes


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The lines of the golden file, by mistake."""
    lines = mistakes.PAGE.read_text("utf-8").splitlines()
    return dict(zip(lines[::2], (line.strip() for line in lines[1::2]), strict=True))


@pytest.mark.shows("K45")
@pytest.mark.parametrize("name", mistakes.MISTAKES)
def test_a_mistake_in_what_users_extend_has_its_first_line(
    name: str, expected: dict[str, str]
) -> None:
    assert mistakes.first_line(name) == expected[name]


def test_no_mistake_is_silent(expected: dict[str, str]) -> None:
    assert list(expected) == list(mistakes.MISTAKES)
    assert len(expected) >= 83
    assert "nothing" not in expected.values()


def test_each_message_is_of_helios_or_names_a_class_of_the_user(expected: dict[str, str]) -> None:
    of_python = {
        "loop: the session has no such attribute",
        "loop: a batch loop calls super().advance without the batch",
        "plugin: an attribute of the context is misspelt",
        "plugin: an optimizer is replaced in the table",
        "plugin: request_stop without a reason",
        "plugin: no setup",
        "plugin: the model as an attribute",
    }
    others = ("AttributeError", "TypeError", "KeyError", "ValueError", "IndexError", "TimeoutError")
    found = {name for name, line in expected.items() if line.startswith(others)}
    assert found == of_python
