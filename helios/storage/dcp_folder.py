"""Writes tensors in the format of ``torch.distributed.checkpoint``, in one process.

Each tensor gets a file of its own: of the tensors in one file, PyTorch may hold all in memory
until the file is complete.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from helios.errors import CheckpointError, HeliosError
from helios.storage.codec import find_cause


def write_dcp_folder(
    folder: Path, tensors: Mapping[str, Tensor], read: Callable[[Tensor], Tensor]
) -> None:
    """Write tensors into a folder, and return when the bytes of its files are on the disk.

    Args:
        folder: the folder.
        tensors: by name; of those that are not read yet, type and shape are enough.
        read: returns a tensor with its values, which is dropped before the next one is read.

    Raises:
        CheckpointError: if the format cannot hold a tensor.
        OSError: if the disk fails.
        Exception: what ``read`` has raised.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            return read(super().lookup_object(index))

    writer = FileSystemWriter(folder, single_file_per_rank=False, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        # That there is only one process is meant so; PyTorch 2.6 cannot be told,
        # and uses what it has deprecated.
        warnings.filterwarnings("ignore", "torch.distributed is .*uninitialized", UserWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        try:
            save(dict(tensors), storage_writer=writer, planner=Planner())
        # It is not an Exception, and has the errors of each process.
        except CheckpointException as failed:
            error = find_cause(next(iter(failed.failures.values()))[0])
            if isinstance(error, HeliosError | OSError | MemoryError | KeyboardInterrupt):
                raise error from None
            raise CheckpointError(
                f"{folder} was not written: PyTorch reports {error!r}. Check the disk; what "
                "torch.distributed.checkpoint does not support can be exported to pt."
            ) from error
