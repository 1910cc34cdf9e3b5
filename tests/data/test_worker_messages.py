"""Workers that get the data set by pickle: what cannot be pickled is named by the path to it."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import helios
from helios.data import DataLoaderParams, Stream
from helios.data.phase_sources import open_source
from helios.errors import UsageError
from tests.typed.user_script import Line


class Transform:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


class Images(Dataset[Any]):
    """Samples with whatever else a data set holds."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)
        self.large = torch.zeros(1 << 20)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1), torch.zeros(1)


class Data(helios.DataModule):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def setup(self) -> None:
        self._train_dataset = self.make(self)


def spawned(**options: Any) -> DataLoaderParams:
    return DataLoaderParams(num_workers=1, multiprocessing_context="spawn", **options)


def fit(make: Any) -> str:
    trainer = helios.Trainer(total_steps=1, use_cpu=True, print_banner=False)
    with pytest.raises(UsageError) as caught:
        trainer.fit(Line("line"), Data(make))
    return str(caught.value)


def read_part(index: int, count: int) -> Iterator[Any]:
    yield from (torch.zeros(1) for _ in range(4))


@pytest.mark.shows("U33")
def test_a_member_of_the_data_set_is_named() -> None:
    images = Images(transform=Transform(steps=[1, {"crop": lambda image: image}]))
    text = fit(lambda data: data._create_dataset(images, spawned()))
    assert "Images.transform.steps[1]['crop'] is <function" in text
    assert "of type builtins.function" in text
    assert text.endswith("or pass num_workers=0.")
    lock = Images(lock=threading.Lock(), table=multiprocessing.get_context("spawn").Lock())
    assert "Images.lock is <unlocked _thread.lock" in fit(
        lambda data: data._create_dataset(lock, spawned(persistent_workers=True))
    )


@pytest.mark.shows("U33")
def test_functions_streams_and_own_loaders_are_named() -> None:
    collate = fit(lambda data: data._create_dataset(Images(), spawned(collate_fn=lambda x: x)))
    assert "but collate_fn is <function" in collate
    stream = Stream(read_part)
    stream.handle = threading.Lock()  # type: ignore[attr-defined]
    assert "Stream.handle is" in fit(lambda data: data._create_dataset(stream, spawned()))
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = DataLoader(Images(lock=threading.Lock()), **options)
    source = open_source(loader, run_seed=4, purpose="fetch")
    with pytest.raises(UsageError, match=r"Images\.lock is"):
        next(source.batches(0))
