"""What users may catch errors as."""

from __future__ import annotations

import pickle

from helios import errors


def test_an_interruption_is_no_exception_that_a_script_catches_by_the_way() -> None:
    error = pickle.loads(pickle.dumps(errors.Interrupted(75, "SIGTERM was received")))
    assert not isinstance(error, Exception)
    assert (error.code, error.reason) == (75, "SIGTERM was received")
