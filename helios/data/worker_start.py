"""What loader workers get that cannot be pickled is named by the path to it.

Workers that are spawned or started by a server, as by default on macOS, on Windows and since Python
3.14, get the data set by ``pickle``, whose error names a type.
"""

from __future__ import annotations

import io
import multiprocessing
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from helios.data.params import DataLoaderParams
from helios.distributed.pickling import describe_value, find_culprit
from helios.errors import UsageError


@contextmanager
def naming_culprits(dataset: object, options: DataLoaderParams | DataLoader[Any]) -> Iterator[None]:
    """Start the workers of a loader.

    Args:
        dataset: the user's data set.
        options: the options of its loader.

    Raises:
        UsageError: if something that workers get cannot be pickled.
    """
    try:
        yield
    except Exception as error:
        if options.num_workers and not _are_forked(options.multiprocessing_context):
            parts = {
                type(dataset).__name__: dataset,
                "collate_fn": options.collate_fn,
                "worker_init_fn": options.worker_init_fn,
            }
            for name, part in parts.items():
                if not _is_fine(part):
                    raise _refuse(*find_culprit(part, name, _is_fine), error) from error
        raise


def _are_forked(context: str | BaseContext | None) -> bool:
    if isinstance(context, str):
        return context == "fork"
    # A context without a method of its own has the default one.
    return (context or multiprocessing).get_start_method() == "fork"


def _refuse(place: str, culprit: object, error: Exception) -> UsageError:
    return UsageError(
        f"What loader workers get must be something that can be pickled, but {place} is "
        f"{describe_value(culprit)} ({error}). Define functions and classes at the top level of a "
        "module, and open files and connections in the worker, when the first sample is read; or "
        "pass num_workers=0."
    )


class _Probe(ForkingPickler):
    """Pickles as for a worker, and writes nothing; arrays of numbers are not read."""

    def reducer_override(self, value: Any) -> Any:
        is_array = isinstance(value, np.ndarray) and not value.dtype.hasobject
        return (int, ()) if is_array or isinstance(value, Tensor) else NotImplemented


def _is_fine(value: object) -> bool:
    try:
        _Probe(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        # Locks and queues of multiprocessing can be sent only while a process is started.
        return "through inheritance" in str(error)
    return True
