"""The data module: what users write to say which data a run has, and how it is loaded.

``prepare_data`` runs once, ``setup`` assigns the data sets, ``teardown`` always runs at the end
(H17). It works without a trainer too.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from helios.data.loader import LoaderPair, build_loader
from helios.data.multi_loader import check_names, check_some
from helios.data.params import DataLoaderParams
from helios.errors import ArgumentError, ArgumentTypeError, UsageError

if TYPE_CHECKING:
    from helios.trainer import Trainer

__all__ = ["DataLoaderParams", "DataModule", "Dataset", "DatasetSplit"]


class DatasetSplit(Enum):
    """The parts that data is split into."""

    TRAIN = 0
    VALID = 1
    TEST = 2

    @classmethod
    def from_str(cls, label: str) -> DatasetSplit:
        """Return the split named ``"train"``, ``"valid"`` or ``"test"``.

        Raises:
            ArgumentError: for any other label (a ``ValueError``).
        """
        for split in cls:
            if split.name.lower() == label:
                return split
        raise ArgumentError(f'DatasetSplit must be "train", "valid" or "test", got {label!r}.')


@dataclasses.dataclass
class Dataset:
    """A data set and how it is loaded.

    Attributes:
        dataset: the PyTorch data set.
        params: the options of its loader.
    """

    dataset: Any
    params: DataLoaderParams

    def dict(self) -> dict[str, Any]:
        """Return the arguments of ``create_dataloader`` by name; the values are not copied."""
        return {"dataset": self.dataset, **self.params.to_dict()}


Datasets: TypeAlias = Dataset | list[Dataset] | tuple[Dataset, ...] | Mapping[str, Dataset]
"""The data of an evaluation: one data set, or several that are gone through in order (L32)."""

LoaderPairs: TypeAlias = LoaderPair | list[LoaderPair] | dict[str, LoaderPair]
"""A loader with its sampler, or several of them; in a dict under the names of the data sets."""


class DataModule(ABC):
    """The data of a run (API section 14).

    ``setup`` assigns ``_train_dataset``, ``_valid_dataset``, ``_test_dataset`` and
    ``_predict_dataset``, those that there are, with :meth:`_create_dataset`. All but the first may
    be a list of what that returns, or a dict of them by name (L32).

    Attributes:
        unsaved: names of attributes that training changes and that no checkpoint needs.
        global_rank: number of this process among all, from 0.
        local_rank: number of this process on its machine, from 0.
    """

    _internals: ClassVar[str] = (
        "_is_distributed _num_replicas _predict_dataset _test_dataset _train_dataset _trainer "
        "_valid_dataset global_rank local_rank"
    )
    unsaved: ClassVar[tuple[str, ...]] = ()
    global_rank: int = 0
    local_rank: int = 0

    _train_dataset: Dataset | None = None
    _valid_dataset: Datasets | None = None
    _test_dataset: Datasets | None = None
    _predict_dataset: Datasets | None = None
    _is_distributed: bool = False
    _num_replicas: int | None = None
    _trainer: Trainer | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether replicas share the data, where the options of a data set do not say."""
        return self._is_distributed

    @is_distributed.setter
    def is_distributed(self, value: bool) -> None:
        self._is_distributed = value

    @property
    def num_replicas(self) -> int | None:
        """The replicas of the run, which share the data; ``None`` where no trainer has set it."""
        return self._num_replicas

    @num_replicas.setter
    def num_replicas(self, value: int | None) -> None:
        self._num_replicas = value

    @property
    def trainer(self) -> Trainer:
        """The trainer that uses the data; for users, the package itself does not read it.

        Raises:
            UsageError: outside of a trainer.
        """
        if self._trainer is None:
            raise UsageError(
                "DataModule.trainer is not there: fit, validate, test and predict set it."
            )
        return self._trainer

    @trainer.setter
    def trainer(self, value: Trainer) -> None:
        self._trainer = value

    @property
    def train_dataset(self) -> Any:
        """The data set for training, or ``None``."""
        return _dataset_of(self._train_dataset)

    @property
    def valid_dataset(self) -> Any:
        """The data set for validation, or ``None``; a list or dict of them where it is one."""
        return _dataset_of(self._valid_dataset)

    @property
    def test_dataset(self) -> Any:
        """The data set for testing, or ``None``; a list or dict of them where it is one."""
        return _dataset_of(self._test_dataset)

    @property
    def predict_dataset(self) -> Any:
        """The data set for prediction, or ``None``; a list or dict of them where it is one."""
        return _dataset_of(self._predict_dataset)

    def prepare_data(self) -> None:
        """Download or convert data; called once, before :meth:`setup`. Assign nothing here."""

    @abstractmethod
    def setup(self) -> None:
        """Create the data sets; called in every process."""

    def teardown(self) -> None:
        """Release what :meth:`setup` took; called on every way out of a run (H17)."""

    def train_dataloader(self) -> LoaderPair | None:
        """Return a new loader and its sampler for training, or ``None`` without data."""
        pair = self._train_dataset
        if isinstance(pair, list | tuple | Mapping):
            raise ArgumentTypeError(
                f"The training data set of {type(self).__name__} must be one, got {len(pair)} in a "
                f"{type(pair).__name__}. Join them (torch.utils.data.ConcatDataset), or use a "
                "batch_sampler that mixes them."
            )
        return None if pair is None else _open_one(self, pair, "training data set")

    def valid_dataloader(self) -> LoaderPairs | None:
        """Return a new loader and its sampler for validation, or ``None`` without data.

        Of several data sets a list of such pairs, or a dict of them by name.
        """
        return _open_all(self, self._valid_dataset, "validation data set")

    def test_dataloader(self) -> LoaderPairs | None:
        """Return a new loader and its sampler for testing, or ``None`` without data.

        Of several data sets a list of such pairs, or a dict of them by name.
        """
        return _open_all(self, self._test_dataset, "test data set")

    def predict_dataloader(self) -> LoaderPairs | None:
        """Return a new loader and its sampler for prediction, or ``None`` without data.

        Of several data sets a list of such pairs, or a dict of them by name.
        """
        return _open_all(self, self._predict_dataset, "prediction data set")

    def _create_dataset(
        self, dataset: Any, params: DataLoaderParams | Mapping[str, Any]
    ) -> Dataset:
        """Pair a data set with a copy of its options; a sampler in them is not copied.

        Args:
            dataset: the PyTorch data set.
            params: the options, or a table for ``DataLoaderParams.from_dict``.

        Raises:
            ArgumentError: for an option that breaks its rule.
            ArgumentTypeError: for options of another type, and for a sampler that does not derive
                from one of the bases (H10).
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
        check_some(f"{name}s", pairs)
        check_names(f"{name}s", pairs)
        return {key: _open_one(module, pair, f"{name} {key!r}") for key, pair in pairs.items()}
    if isinstance(pairs, list | tuple):
        check_some(f"{name}s", pairs)
        return [_open_one(module, pair, f"{name} {i}") for i, pair in enumerate(pairs)]
    return None if pairs is None else _open_one(module, pairs, name)


def _open_one(module: DataModule, pair: Dataset, name: str) -> LoaderPair:
    if not isinstance(pair, Dataset):
        raise ArgumentTypeError(
            f"The {name} of {type(module).__name__} must be made by self._create_dataset, "
            f"got {pair!r}."
        )
    params = dataclasses.replace(pair.params)
    if params.is_distributed is None and module.is_distributed:
        # Not False where it is not: that would be the user's word against sharing.
        params.is_distributed = True
    return build_loader(pair.dataset, params, name=name, num_replicas=module.num_replicas)


def _dataset_of(pairs: Datasets | None) -> Any:
    if isinstance(pairs, Mapping):
        return {name: _dataset_of(pair) for name, pair in pairs.items()}
    if isinstance(pairs, list | tuple):
        return [_dataset_of(pair) for pair in pairs]
    return None if pairs is None else pairs.dataset
