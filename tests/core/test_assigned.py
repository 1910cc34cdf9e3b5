"""What reads an attribute that is not set yet is told by whom and when it is set."""

from __future__ import annotations

import pytest

from helios.core.assigned import assigned
from helios.errors import UsageError


class Owner:
    rank: int = assigned("{kind}.rank is not set yet: a run sets it.")
    run: str = assigned("{kind} has no run.", refusal="{kind}.run must not be assigned.")


class Derived(Owner): ...


def test_an_attribute_that_is_not_set_names_the_class_of_its_object() -> None:
    owner = Derived()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"^Derived\.rank is not set yet: a run sets it\.$"):
            _ = owner.rank
        owner.rank = 3
        assert (owner.rank, vars(owner)) == (3, {"rank": 3})
        del owner.rank
