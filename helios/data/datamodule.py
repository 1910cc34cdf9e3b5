"""The data module, in which users define the data of a run and how it is loaded.

``prepare_data`` is called once, ``setup`` assigns the data sets, and ``teardown`` is always called
at the end. A data module also works without a trainer.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from helios.data.loader import LoaderPair, build_loader
from helios.data.params import DataLoaderParams
from helios.data.steps import Steps
from helios.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from helios import Trainer

__all__ = ["DataLoaderParams", "DataModule", "Dataset", "DatasetSplit"]


class DatasetSplit(Enum):
    """The splits of the data."""

    TRAIN = 0
    VALID = 1
    TEST = 2

    @classmethod
    def from_str(cls, label: str) -> DatasetSplit:
        """Return the split named ``"train"``, ``"valid"`` or ``"test"``.

        Raises:
            ArgumentError: if the label is any other string (a ``ValueError``).
        """
        for split in cls:
            if split.name.lower() == label:
                return split
        raise ArgumentError(f'DatasetSplit must be "train", "valid" or "test", got {label!r}.')


@dataclasses.dataclass
class Dataset:
    """A data set and the options of its loader.

    Attributes:
        dataset: the PyTorch data set.
        params: the options of the loader.
    """

    dataset: Any
    params: DataLoaderParams

    def dict(self) -> dict[str, Any]:
        """Return the arguments for ``create_dataloader``; the values are not copied."""
        return {"dataset": self.dataset, **self.params.to_dict()}


Datasets: TypeAlias = Dataset | list[Dataset] | tuple[Dataset, ...] | Mapping[str, Dataset]
"""The data of an evaluation: one data set, or several that are used in order."""

TrainingLoader: TypeAlias = LoaderPair | tuple[Steps, None]
"""The training loader with its sampler; a ``Steps`` has none."""

LoaderPairs: TypeAlias = LoaderPair | list[LoaderPair] | dict[str, LoaderPair]
"""A loader with its sampler, or a list or dict of such pairs."""


class DataModule(ABC):
    """The data of a run.

    ``setup`` assigns ``_train_dataset``, ``_valid_dataset``, ``_test_dataset`` and
    ``_predict_dataset``, as needed, each created by :meth:`_create_dataset`. The first may also be
    a :class:`Steps`; the others may be a list of data sets, or a dict of them by name.

    Attributes:
        unsaved: names of attributes that training changes, but that are not saved.
        is_distributed: whether replicas share the data; ``is_distributed`` of a data set takes
            precedence.
        num_replicas: the number of replicas that share the data; ``None`` without a trainer.
        trainer: the trainer that uses the data; for users, Helios itself does not read it. A
            ``UsageError`` if there is none yet.
        global_rank: number of this process among all, from 0.
        local_rank: number of this process on its machine, from 0.
    """

    _internals: ClassVar[str] = (
        "_predict_dataset _test_dataset _train_dataset _valid_dataset global_rank is_distributed "
        "local_rank num_replicas trainer"
    )
    unsaved: ClassVar[tuple[str, ...]] = ()
    is_distributed: bool = False
    num_replicas: int | None = None
    if TYPE_CHECKING:  # Where annotations are evaluated, the trainer is not known.
        trainer: Trainer
    global_rank: int = 0
    local_rank: int = 0

    _train_dataset: Dataset | Steps | None = None
    _valid_dataset: Datasets | None = None
    _test_dataset: Datasets | None = None
    _predict_dataset: Datasets | None = None

    @property
    def train_dataset(self) -> Any:
        """The data set for training, or ``None``."""
        return _dataset_of(self._train_dataset)

    @property
    def valid_dataset(self) -> Any:
        """The data set for validation, ``None``, or a list or dict of data sets."""
        return _dataset_of(self._valid_dataset)

    @property
    def test_dataset(self) -> Any:
        """The data set for testing, ``None``, or a list or dict of data sets."""
        return _dataset_of(self._test_dataset)

    @property
    def predict_dataset(self) -> Any:
        """The data set for prediction, ``None``, or a list or dict of data sets."""
        return _dataset_of(self._predict_dataset)

    def prepare_data(self) -> None:
        """Download or convert data; called once, before :meth:`setup`. Do not set attributes."""

    @abstractmethod
    def setup(self) -> None:
        """Create the data sets; called in every process."""

    def teardown(self) -> None:
        """Release the resources of :meth:`setup`; always called at the end of a run."""

    def train_dataloader(self) -> TrainingLoader | None:
        """Return a new loader and its sampler for training, or ``None`` without data."""
        pair = self._train_dataset
        if isinstance(pair, list | tuple | Mapping):
            raise ArgumentTypeError(
                f"{type(self).__name__} must have one training data set, got {len(pair)} in a "
                f"{type(pair).__name__}. Join them (torch.utils.data.ConcatDataset), or use a "
                "batch_sampler that mixes them."
            )
        if isinstance(pair, Steps):
            return pair, None
        return None if pair is None else _open_one(self, pair, "training data set")

    def valid_dataloader(self) -> LoaderPairs | None:
        """Return a new loader and its sampler for validation, or ``None`` without data.

        If there are several data sets, return a list of such pairs, or a dict of them by name.
        """
        return _open_all(self, self._valid_dataset, "validation data set")

    def test_dataloader(self) -> LoaderPairs | None:
        """Return a new loader and its sampler for testing, or ``None`` without data.

        If there are several data sets, return a list of such pairs, or a dict of them by name.
        """
        return _open_all(self, self._test_dataset, "test data set")

    def predict_dataloader(self) -> LoaderPairs | None:
        """Return a new loader and its sampler for prediction, or ``None`` without data.

        If there are several data sets, return a list of such pairs, or a dict of them by name.
        """
        return _open_all(self, self._predict_dataset, "prediction data set")

    def _create_dataset(
        self, dataset: Any, params: DataLoaderParams | Mapping[str, Any]
    ) -> Dataset:
        """Combine a data set with a copy of its options; a sampler in them is not copied.

        Args:
            dataset: the PyTorch data set.
            params: the options, or a table for ``DataLoaderParams.from_dict``.

        Raises:
            ArgumentError: if an option is invalid.
            ArgumentTypeError: if ``params`` has another type, or if a sampler does not derive from
                ``ResumableSampler`` or ``ResumableDistributedSampler``.
        """
        if isinstance(params, DataLoaderParams):
            params = dataclasses.replace(params)
        elif isinstance(params, Mapping):
            params = DataLoaderParams.from_dict(params)
        else:
            raise ArgumentTypeError(
                "DataModule._create_dataset(params=...) must be a DataLoaderParams or a dict, "
                f"got {params!r}."
            )
        params.check()
        return Dataset(dataset, params)


def _open_all(module: DataModule, pairs: Datasets | None, name: str) -> LoaderPairs | None:
    if isinstance(pairs, Mapping):
        return {key: _open_one(module, pair, f"{name} {key!r}") for key, pair in pairs.items()}
    if isinstance(pairs, list | tuple):
        return [_open_one(module, pair, f"{name} {i}") for i, pair in enumerate(pairs)]
    return None if pairs is None else _open_one(module, pairs, name)


def _open_one(module: DataModule, pair: Dataset, name: str) -> LoaderPair:
    if not isinstance(pair, Dataset):
        raise ArgumentTypeError(
            f"The {name} of {type(module).__name__} must be created by self._create_dataset, "
            f"got {pair!r}."
        )
    params = dataclasses.replace(pair.params)
    if params.is_distributed is None and module.is_distributed:
        # Otherwise keep None: False would mean that the user does not want the data to be shared.
        params.is_distributed = True
    return build_loader(pair.dataset, params, name=name, num_replicas=module.num_replicas)


def _dataset_of(pairs: Datasets | Steps | None) -> Any:
    if isinstance(pairs, Mapping):
        return {name: _dataset_of(pair) for name, pair in pairs.items()}
    if isinstance(pairs, list | tuple):
        return [_dataset_of(pair) for pair in pairs]
    return pairs.dataset if isinstance(pairs, Dataset) else pairs
