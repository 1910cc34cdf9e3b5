"""Checkpoints of helios-ml: the golden ones, a reader that shares no code with ours, and fakes.

``Model`` and ``Data`` are what wrote the golden files: two linear networks at most, manual steps,
and a ``state_dict`` of the user's own. Samples know their index.
"""

from __future__ import annotations

import io
import pickle
import shutil
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import helios
from helios.state import TrainingState
from tests.support.sums import bits

GOLDEN = Path(__file__).parents[1] / "golden" / "old_checkpoints"
FILES = sorted(path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*.pth"))
NUM_SAMPLES, BATCH_SIZE, NUM_BATCHES = 40, 8, 5


class Stub:
    """Anything that is no tensor."""

    parts: tuple[Any, ...] = ()

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __setstate__(self, state: Any) -> None:
        self.parts = (*self.parts, state)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("torch", "collections"):
            return super().find_class(module, name)
        return type("Stub", (Stub,), {})


def read_raw(path: Path) -> Any:
    """Read a file with PyTorch alone; what is neither a tensor nor plain is a stub."""
    module = types.ModuleType("unpickling")
    vars(module).update(vars(pickle), Unpickler=_Unpickler)
    return torch.load(path, weights_only=False, pickle_module=module)


def entry(tree: Any, name: str) -> Any:
    """Return what stands under a key, plain or an enum's member."""
    for key, value in tree.items():
        if (key.parts[0] if isinstance(key, Stub) else key) == name:
            return value
    raise KeyError(name)


def raw_model(path: Path) -> Any:
    model = entry(read_raw(path), "model")
    return entry(model, "user") if any(isinstance(key, Stub) for key in model) else model


def raw_counters(path: Path) -> dict[str, Any]:
    state = entry(read_raw(path), "training_state")
    return dict(state.parts[0] if isinstance(state, Stub) else state)


def is_same(raw: Any, value: Any) -> bool:
    """Whether a value has the structure, the types and the bytes of what was read raw."""
    if type(raw) is not type(value):
        return False
    if isinstance(value, torch.Tensor):
        kinds = [(each.dtype, each.shape, each.stride()) for each in (raw, value)]
        return kinds[0] == kinds[1] and bits(raw) == bits(value)
    if isinstance(raw, dict):
        is_ordered = list(raw) == list(value)
        return is_ordered and all(is_same(raw[key], value[key]) for key in raw)
    if isinstance(raw, list | tuple):
        return len(raw) == len(value) and all(map(is_same, raw, value))
    return bool(raw == value)


def lay_out(root: Path, name: str, *, as_name: str = "") -> Path:
    """Copy a golden file into the folder of a run below ``root``."""
    source = GOLDEN / name
    target = root / "linear" / (as_name or source.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target


class _Samples(Dataset):
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        features = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return index, features + torch.rand(4) / 100, features.sum()


class Data(helios.DataModule):
    def __init__(self, length: int = NUM_SAMPLES) -> None:
        super().__init__()
        self._length = length

    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=BATCH_SIZE, shuffle=True, random_seed=3)
        self._train_dataset = self._create_dataset(_Samples(self._length), params)
        self._valid_dataset = self._create_dataset(_Samples(BATCH_SIZE), params)
        self._test_dataset = self._create_dataset(_Samples(BATCH_SIZE), params)


class Model(helios.Model):
    """A script of the old package: what it saves, it says itself."""

    def __init__(self, names: tuple[str, ...] = ("net", "optimizer")) -> None:
        super().__init__("linear")
        self._names = names
        self.loaded: dict[str, Any] | None = None
        self.records: dict[int, tuple[list[int], bytes]] = {}
        self.accumulation = 1
        self.before_end: Callable[[TrainingState], None] | None = None

    def setup(self, fast_init: bool = False) -> None:
        is_rich = "net2" in self._names
        self.net = nn.Linear(4, 1, bias=not is_rich)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        if is_rich:
            self.net2 = nn.Linear(4, 1, bias=False)
            self.optimizer2 = torch.optim.SGD(self.net2.parameters(), lr=1e-2, momentum=0.9)
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
            self.ema = torch.optim.swa_utils.AveragedModel(self.net)
            self.best, self.seen = 1e9, [1]

    def state_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self, name) for name in self._names}
        return {
            name: part.state_dict() if callable(getattr(part, "state_dict", None)) else part
            for name, part in parts.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any], fast_init: bool = False) -> None:
        self.loaded = state_dict
        for name in self._names:
            part = getattr(self, name)
            if callable(getattr(part, "load_state_dict", None)):
                part.load_state_dict(state_dict[name])
            else:
                setattr(self, name, state_dict[name])

    def train_step(self, batch: Any, state: TrainingState) -> None:
        ids, features, wanted = batch
        self.ids = ids.tolist()
        loss = (self.net(features)[:, 0] - wanted).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if "net2" in self._names:
            other = (self.net2(features)[:, 0] - wanted).square().mean()
            self.optimizer2.zero_grad()
            other.backward()
            self.optimizer2.step()
            self.scheduler.step()
            self.ema.update_parameters(self.net)
        self._loss_items["loss"] = loss.detach()

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        loss = self._loss_items["loss"].numpy().tobytes()
        self.records[state.global_iteration] = (self.ids, loss)
        if self.before_end is not None:
            self.before_end(state)

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        _, features, wanted = batch
        return {"mse": ((self.net(features)[:, 0] - wanted).square().sum(), len(features))}

    def test_step(self, batch: Any, step: int) -> dict[str, tuple[Any, Any]]:
        return self.valid_step(batch, step)


RICH = ("net", "optimizer", "net2", "optimizer2", "scheduler", "ema", "best", "seen")


def names_for(name: str) -> tuple[str, ...]:
    if name.startswith("1.0.0"):
        return ()
    return RICH if name.endswith("epoch_4_iter_8.pth") else ("net", "optimizer")


def make_trainer(root: Path, unit: str, total: int, **options: Any) -> helios.Trainer:
    """Return a trainer that goes on in ``root`` as the golden runs were started."""
    return helios.Trainer(
        train_unit=unit,
        total_steps=total,
        chkpt_frequency=1,
        chkpt_root=root,
        random_seed=3,
        print_banner=False,
        use_cpu=True,
        **options,
    )


def with_pickle(path: Path, data: bytes) -> Path:
    """Write a container as torch makes them, around a pickle of any content."""
    donor = io.BytesIO()
    torch.save({}, donor)
    with zipfile.ZipFile(donor) as container, zipfile.ZipFile(path, "w") as made:
        for record in container.infolist():
            content = container.read(record.filename)
            is_pickle = record.filename.endswith("/data.pkl")
            made.writestr(record.filename, data if is_pickle else content)
    return path


@contextmanager
def pickled_as(name: str, kind: type) -> Iterator[type]:
    """Let a class be pickled under another module's name, whatever that module really is."""
    module, _, last = name.rpartition(".")
    kind.__module__, kind.__qualname__, kind.__name__ = module, last, last
    found = sys.modules.get(module)
    fake = types.ModuleType(module)
    vars(fake).update({} if found is None else vars(found))
    setattr(fake, last, kind)
    sys.modules[module] = fake
    try:
        yield kind
    finally:
        if found is None:
            del sys.modules[module]
        else:
            sys.modules[module] = found
