"""What a loop of your own may see: exactly what docs/loops.md names, and a session has it all."""

from __future__ import annotations

import re
from pathlib import Path

from helios.loops.view import SessionView
from tests.loops.sessions import Stepper, attached, make_fit_loop, make_session

_PAGE = Path(__file__).resolve().parents[2] / "docs/loops.md"
_MEMBERS = {name for name in vars(SessionView) if not name.startswith("_")}


def _named_in_the_docs() -> set[str]:
    """Return the names in the first column of the table of `self.session`."""
    _, _, rest = _PAGE.read_text("utf-8").partition("| `self.session.…` | |\n")
    table = rest.partition("\n\n")[0].splitlines()[1:]
    return {name for row in table for name in re.findall(r"`(\w+)(?:\(\))?`", row.split("|")[1])}


def test_the_view_has_exactly_the_members_that_the_page_names() -> None:
    assert len(_named_in_the_docs()) > 5, "The search for the table finds nothing."
    assert _named_in_the_docs() == _MEMBERS


def test_a_loop_sees_the_session_itself_and_a_session_has_all_members() -> None:
    session = make_session(Stepper())
    loop = attached(make_fit_loop(), session)
    seen: SessionView = loop.session
    assert seen is session
    assert isinstance(session, SessionView)
    assert all(getattr(seen, name) is not None for name in _MEMBERS)


def test_each_member_says_what_it_is() -> None:
    assert [name for name in _MEMBERS if not getattr(SessionView, name).__doc__] == []
