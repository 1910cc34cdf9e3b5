"""Pickles values and errors for other processes of the same job; tensors keep sharing memory.

Use it only for data from processes of the same job, never for files.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from helios.errors import RankError, UsageError


def dumps(value: Any) -> bytes:
    """Return a value as bytes for another process of this job.

    Raises:
        Exception: the error of ``pickle`` if the value cannot be pickled.
    """
    return _dump(value, pickle)


def _dump(value: Any, module: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, pickle_module=module, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """Return the value that another process of this job has dumped, with tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def pack_by_value(value: Any, what: str) -> bytes:
    """Return a value as bytes for another process that imports the same script.

    Args:
        value: the value; its tensors are copied.
        what: names the value in messages.

    Raises:
        UsageError: if a part of it cannot be pickled, or if another process could not import its
            class.
    """
    from_main: set[str] = set()

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
                from_main.add(value.__qualname__)
            return NotImplemented

    try:
        data = _dump(value, SimpleNamespace(__name__="pickle", Pickler=Pickler))
    except Exception as error:
        raise UsageError(
            f"{what} must be something that can be pickled, because each rank is a separate "
            f"process, but a part of it cannot be: {error}. Define classes and functions at the "
            "top level of a module, and create the rest in setup(), which runs in every process; "
            "or start the script with torchrun, which copies nothing."
        ) from error
    _check_main(from_main)
    return data


def _check_main(names: set[str]) -> None:
    """Check that another process can import the script that is run."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None or (file and Path(file).exists()):
        return
    if names or file:
        verb = "is" if len(names) == 1 else "are"
        found = f", and {' and '.join(sorted(names))} {verb} defined here" if names else ""
        raise UsageError(
            "Several processes must be started from a script in a file, because each of them "
            "imports it, but this is a notebook, an interactive session, python -c or a script "
            f"from standard input{found}. Move your classes and functions to a file, and import "
            "them here; or train in one process (nproc=1)."
        )


def pack_error(error: BaseException) -> bytes:
    """Pickle an error, or one with its text if it could not be restored."""
    with contextlib.suppress(Exception):
        data = pickle.dumps(error)
        again = pickle.loads(data)
        if type(again) is type(error) and str(again) == str(error):
            return data
    return pickle.dumps(RankError(f"{type(error).__name__}: {error}"))
