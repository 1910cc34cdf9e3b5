"""Leaves out what shards networks where PyTorch cannot; it is refused by name there."""

from __future__ import annotations

from pathlib import Path

from tests.support.sharded import IS_ABLE

_WITHOUT_FSDP = {"test_recomputation.py", "test_requirements.py", "test_waves.py"}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore a file whose tests need an FSDP that reduces as we say."""
    is_test = collection_path.name.startswith("test_")
    return True if is_test and not IS_ABLE and collection_path.name not in _WITHOUT_FSDP else None
