"""The data module, in which users define the data of a run and how it is loaded.

``prepare_data`` is called once, ``setup`` assigns the data sets, and ``teardown`` is always called
at the end. A data module also works without a trainer.
"""

from __future__ import annotations

import dataclasses
import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)
from typing_extensions import final

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

Assigned: TypeAlias = (
    Dataset | DataLoader[Any] | Sequence[Dataset | DataLoader[Any]] | Mapping[str, Any] | None
)
"""What ``setup`` may assign as the data of an evaluation."""

LoaderPairs: TypeAlias = LoaderPair | list[LoaderPair] | dict[str, LoaderPair]
"""A loader with its sampler, or a list or dict of such pairs."""


class DataModule(ABC):
    """The data of a run.

    ``setup`` assigns :attr:`train_dataset`, :attr:`valid_dataset`, :attr:`test_dataset` and
    :attr:`predict_dataset`, as needed, each created by :meth:`create_dataset`. The first may also
    be a :class:`Steps`; the others may be a list of data sets, or a dict of them by name.
    :meth:`from_datasets` makes a data module of data sets.

    Attributes:
        unsaved: names of attributes that training changes, but that are not saved.
        is_distributed: whether replicas share the data; ``is_distributed`` of a data set takes
            precedence.
        num_replicas: the number of replicas that share the data; ``None`` without a trainer.
        trainer: the trainer that uses the data, for your own code. A ``UsageError`` if there is
            none yet.
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

    @staticmethod
    def from_datasets(
        *,
        train: Any = None,
        valid: Any = None,
        test: Any = None,
        predict: Any = None,
        **params: Any,
    ) -> DataModule:
        """Return a data module with these data sets.

        Args:
            train: the data set for training, which is shuffled, or a :class:`Steps`.
            valid: the data set for validation, or a dict of several by name.
            test: the data set for testing, or a dict of several by name.
            predict: the data set for prediction, or a dict of several by name.
            **params: options of :class:`DataLoaderParams`. ``shuffle``, ``drop_last``, ``sampler``
                and ``batch_sampler`` apply to the training data only; the others are read from
                beginning to end. A ``DataLoader`` instead of a data set keeps its own options.

        Raises:
            ArgumentError: if an option is invalid.
            ArgumentTypeError: for a name that is no option, or a ``DataLoader`` that is not plain.

        Example:
            >>> data = DataModule.from_datasets(train=range(8), valid=range(4), batch_size=2)
            >>> len(data.train_dataloader()[0]), list(data.valid_dataloader()[0])
            (4, [tensor([0, 1]), tensor([2, 3])])
        """
        given = {"train": train, "valid": valid, "test": test, "predict": predict}
        names = [*given, *(each.name for each in dataclasses.fields(DataLoaderParams))]
        for odd in params.keys() - names:
            close = difflib.get_close_matches(odd, names, n=1)
            raise ArgumentTypeError(
                f"DataModule.from_datasets({odd}=...) must be a data set (train, valid, test, "
                "predict) or an option of DataLoaderParams. "
                f"Did you mean {(*close, 'batch_size')[0]}?"
            )
        return _FromDatasets(given, params)

    @property
    def train_dataset(self) -> Any:
        """The data set for training, or ``None``.

        Assign the result of :meth:`create_dataset`, here and to the other data sets, or a plain
        ``torch.utils.data.DataLoader``, whose data set and options are used.
        """
        return _dataset_of(self._train_dataset)

    @train_dataset.setter
    def train_dataset(self, dataset: Dataset | Steps | DataLoader[Any] | None) -> None:
        self._train_dataset = _take(self, "train_dataset", dataset)

    @property
    def valid_dataset(self) -> Any:
        """The data set for validation, ``None``, or a list or dict of data sets."""
        return _dataset_of(self._valid_dataset)

    @valid_dataset.setter
    def valid_dataset(self, dataset: Assigned) -> None:
        self._valid_dataset = _take(self, "valid_dataset", dataset)

    @property
    def test_dataset(self) -> Any:
        """The data set for testing, ``None``, or a list or dict of data sets."""
        return _dataset_of(self._test_dataset)

    @test_dataset.setter
    def test_dataset(self, dataset: Assigned) -> None:
        self._test_dataset = _take(self, "test_dataset", dataset)

    @property
    def predict_dataset(self) -> Any:
        """The data set for prediction, ``None``, or a list or dict of data sets."""
        return _dataset_of(self._predict_dataset)

    @predict_dataset.setter
    def predict_dataset(self, dataset: Assigned) -> None:
        self._predict_dataset = _take(self, "predict_dataset", dataset)

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

    def create_dataset(
        self,
        dataset: Any,
        params: DataLoaderParams | None = None,
        **options: Any,
    ) -> Dataset:
        """Combine a data set with the options of its loader.

        Args:
            dataset: the PyTorch data set.
            params: the options.
            **options: options as keywords, which take precedence.

        Raises:
            ArgumentError: if an option is invalid.
            ArgumentTypeError: as :meth:`_create_dataset`.
        """
        found = DataLoaderParams() if params is None else _as_params(params)
        return self._create_dataset(dataset, dataclasses.replace(found, **options))

    def _create_dataset(
        self, dataset: Any, params: DataLoaderParams | Mapping[str, Any]
    ) -> Dataset:
        """Combine a data set with a copy of its options; a sampler in them is not copied.

        Args:
            dataset: the PyTorch data set.
            params: the options, or a table for ``DataLoaderParams.from_dict``.

        Raises:
            ArgumentError: if an option is invalid.
            ArgumentTypeError: for other params, and if a sampler does not derive from
                ``ResumableSampler`` or ``ResumableDistributedSampler``.
        """
        found = _as_params(params)
        found.check()
        return Dataset(dataset, dataclasses.replace(found))


def _as_params(params: object) -> DataLoaderParams:
    if isinstance(params, Mapping):
        return DataLoaderParams.from_dict(params)
    if not isinstance(params, DataLoaderParams):
        raise ArgumentTypeError(
            f"create_dataset(dataset, params) must get a DataLoaderParams, got {params!r}. Pass "
            "options by name: create_dataset(dataset, batch_size=32)."
        )
    return params


_OF_TRAINING = {"shuffle", "drop_last", "sampler", "batch_sampler"}
"""The options of an order, which is that of the training data."""


@final
class _FromDatasets(DataModule):
    """Has the data sets that it was given."""

    def __init__(self, given: Mapping[str, Any], params: Mapping[str, Any]) -> None:
        super().__init__()
        has_order = isinstance(given["train"], IterableDataset) or (
            params.get("sampler") is not None or params.get("batch_sampler") is not None
        )
        read: Any = {name: each for name, each in params.items() if name not in _OF_TRAINING}
        self.train_dataset = self._make(given["train"], {"shuffle": not has_order, **params})
        self.valid_dataset = self._make(given["valid"], read)
        self.test_dataset = self._make(given["test"], read)
        self.predict_dataset = self._make(given["predict"], read)

    def setup(self) -> None:
        """Do nothing: the data sets are there."""

    def _make(self, found: Any, params: Mapping[str, Any]) -> Any:
        if isinstance(found, Mapping):
            return {name: self._make(each, params) for name, each in found.items()}
        if found is None or isinstance(found, Steps | DataLoader):
            return found
        return self.create_dataset(found, **params)


def _take(module: DataModule, attribute: str, found: Any) -> Any:
    """Return what is assigned as a data set, with the options of a plain loader.

    Raises:
        ArgumentTypeError: if it is neither created by ``create_dataset`` nor a plain loader.
    """
    if isinstance(found, Mapping):
        return {name: _take(module, attribute, each) for name, each in found.items()}
    if isinstance(found, list | tuple):
        return [_take(module, attribute, each) for each in found]
    if isinstance(found, DataLoader):
        return module.create_dataset(found.dataset, _take_apart(found, attribute))
    if found is None or isinstance(found, Dataset | Steps):
        return found
    raise ArgumentTypeError(
        f"{type(module).__name__}.{attribute} must be created by self.create_dataset, got "
        f"{found!r}. Write self.{attribute} = self.create_dataset(dataset, batch_size=...)."
    )


def _open_all(module: DataModule, pairs: Datasets | None, name: str) -> LoaderPairs | None:
    if isinstance(pairs, Mapping):
        return {key: _open_one(module, pair, f"{name} {key!r}") for key, pair in pairs.items()}
    if isinstance(pairs, list | tuple):
        return [_open_one(module, pair, f"{name} {i}") for i, pair in enumerate(pairs)]
    return None if pairs is None else _open_one(module, pairs, name)


def _open_one(module: DataModule, pair: Dataset, name: str) -> LoaderPair:
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


def _take_apart(loader: DataLoader[Any], attribute: str) -> DataLoaderParams:
    """Return the options of a loader.

    A random order is that of Helios, which a resumed run repeats.

    Args:
        loader: the loader.
        attribute: what it was assigned to, such as ``"train_dataset"``.

    Raises:
        ArgumentTypeError: if no options stand for the loader.
    """
    obstacle = _find_obstacle(loader)
    if obstacle:
        raise ArgumentTypeError(
            f"{attribute} must be created by create_dataset, or be a plain DataLoader, but got "
            f"one with {obstacle}, which could not resume exactly. Write self.{attribute} = "
            "self.create_dataset(dataset, batch_size=..., shuffle=...), with a batch_sampler, or a "
            "sampler that derives from ResumableSampler, as an option."
        )
    usual = default_convert if loader.batch_sampler is None else default_collate
    return DataLoaderParams(
        batch_size=loader.batch_size,
        shuffle=isinstance(loader.sampler, RandomSampler),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        collate_fn=None if loader.collate_fn is usual else loader.collate_fn,
        persistent_workers=loader.persistent_workers,
        prefetch_factor=loader.prefetch_factor,
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=loader.worker_init_fn,
        worker_timeout=loader.timeout or DataLoaderParams.worker_timeout,
    )


def _find_obstacle(loader: DataLoader[Any]) -> str:
    """Return what of a loader has no option; empty if there is nothing."""
    if type(loader) is not DataLoader:
        return f"the class {type(loader).__name__}"
    batches = loader.batch_sampler
    # PyTorch makes one for each batch size.
    is_own = loader.batch_size is None and batches is not None
    if is_own or type(batches) not in (BatchSampler, type(None)):
        return f"a batch_sampler of its own, a {type(batches).__name__}"
    if loader.generator is not None:
        return "a generator of its own"
    if not loader.in_order:
        return "in_order=False"
    if isinstance(loader.dataset, IterableDataset):
        return ""
    sampler = loader.sampler
    return "" if _is_plain(sampler, loader.dataset) else f"a {type(sampler).__name__} of its own"


def _is_plain(sampler: object, dataset: object) -> bool:
    if type(sampler) is SequentialSampler:
        return sampler.data_source is dataset
    return (
        type(sampler) is RandomSampler
        and sampler.data_source is dataset
        and not sampler.replacement
        and sampler.generator is None
        and sampler.num_samples == len(sampler.data_source)
    )
