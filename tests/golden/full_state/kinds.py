"""Plain values of every type that a checkpoint holds, and what they share."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import sys
import uuid
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

import helios
from tests.golden.today.exact import Exact, ExactModel, Numbers, Record, Recorder

NAME = "kinds"
TOTAL = 5
SAVED = (2,)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Point:
    x: float
    near: Any = None


@dataclasses.dataclass(frozen=True)
class Fixed:
    parts: tuple[Any, ...]


def values(number: int) -> dict[str, Any]:
    """Return new values that depend on a number."""
    half = torch.tensor([number, 0.5])
    base = torch.arange(number, number + 6)
    array_base = np.arange(number, number + 6, dtype=np.int16)
    inner: list[Any] = [number]
    return {
        "flag": number % 2 == 0,
        "large": 10**30 + number,
        "floats": [float("inf"), float("-inf"), -0.0, 5e-324, number / 3],
        "complex": complex(number, -0.0),
        "text": f"ä\0\n{number}",
        "bytes": bytes([number, 255]),
        "range": range(number, 30, 2),
        "slice": slice(number, None, -1),
        "nothing": None if number % 2 else ...,
        "tuple": (number, (), [inner, inner]),
        "set": {number, "a", (1, number)},
        "frozenset": frozenset({number}),
        "keys": {number: 1, 1.5: 2, None: 3, (1, "b"): 4, True: 5, b"c": 6},
        "deque": collections.deque([number, inner], maxlen=2),
        "ordered": collections.OrderedDict(b=number, a=1),
        "default": collections.defaultdict(list, a=[number]),
        "counter": collections.Counter(a=number),
        "path": Path("folder") / str(number),
        "pure": PurePosixPath(str(number)),
        "date": datetime.date(2024, 2, number),
        "moment": datetime.datetime(2024, 2, number, 3, tzinfo=datetime.timezone.utc),
        "span": datetime.timedelta(days=number, microseconds=1),
        "decimal": decimal.Decimal(f"1.{number}0"),
        "fraction": fractions.Fraction(number, 7),
        "uuid": uuid.UUID(int=number),
        "level": Level(1 + number % 2),
        "point": Point(number, Point(0.5)),
        "fixed": Fixed((number, [inner])),
        "inner": inner,
        "dtype": (torch.float16, torch.bool)[number % 2],
        "size": torch.Size([number, 2]),
        "device": torch.device("cpu"),
        "numpy_scalars": [np.int8(number), np.float32(0.5), np.bool_(True), np.complex64(1j)],
        "numpy_times": [np.datetime64(f"2024-02-0{number}"), np.timedelta64(number, "s")],
        "numpy_text": np.array([f"a{number}", "b"]),
        "numpy_rows": np.array([(number, 0.5)], dtype=[("id", "i4"), ("weight", "f8")]),
        "numpy_large_endian": np.array([number], dtype=">i4"),
        "numpy_fortran": np.asfortranarray(np.arange(6).reshape(2, 3) + number),
        "numpy_base": array_base,
        "numpy_view": array_base[1::2],
        "numpy_reversed": array_base[::-1],
        "from_numpy": torch.from_numpy(array_base)[2:],
        "tensors": [half.to(dtype) for dtype in TYPES],
        "bools": torch.tensor([number % 2 == 0, True]),
        "scalar": torch.tensor(number),
        "empty": torch.empty(0, number),
        "base": base,
        "view": base[1::2],
        "grid": base.view(2, 3).T,
        "expanded": base[:1].expand(3),
        "loose": torch.tensor([float(number)], requires_grad=True),
    }


TYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
)


def describe(value: Any) -> str:
    """Return the type and the content of a value."""
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        places = f"{list(value.shape)} {list(value.stride())} {value.requires_grad}"
        raw = value.detach().contiguous().view(-1).view(torch.uint8).tolist()
        return f"{value.dtype} {places} {raw if value.numel() else []}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype.descr} {value.shape} {value.strides} {value.tolist()}"
    if isinstance(value, np.generic):
        return f"{value.dtype} {value.item()!r}"
    if isinstance(value, dict):
        pairs = [(describe(key), describe(part)) for key, part in value.items()]
        return f"{name} {pairs} {getattr(value, 'default_factory', None) is list}"
    if isinstance(value, (set, frozenset)):
        return f"{name} {sorted(map(describe, value))}"
    if isinstance(value, (list, tuple, collections.deque)):
        return f"{name} {[*map(describe, value)]} {getattr(value, 'maxlen', None)}"
    if dataclasses.is_dataclass(value):
        return f"{name} {[*map(describe, vars(value).values())]}"
    return f"{name} {value!r}"


class Kinds(helios.Plugin):
    """Holds all of them, each in an attribute of its own and all of one moment together."""

    def setup(self) -> None:
        for name, value in values(1).items():
            setattr(self, name, value)
        self.together = values(1)

    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        number = state.global_iteration + 1
        # Later ones change in place what the first ones have made.
        if number == 3:
            for name, value in values(number).items():
                setattr(self, name, value)
            self.together = values(number)
        if number > 3:
            self.inner.append(number)
            self.base += 1
            self.numpy_base += 1
            self.together["inner"].append(number)
            self.together["base"] += 1
            self.together["numpy_base"] += 1
            self.point.near.x += 1

    def all(self) -> list[str]:
        names = [name for name in values(1) if hasattr(self, name)]
        lines = [f"{name} {describe(getattr(self, name))}" for name in names]
        return lines + [f"together {name} {describe(v)}" for name, v in self.together.items()]


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        self.net = Exact()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.25)
        self.known: Any = None

    def types_for_safe_load(self) -> list[Any]:
        return [Point, Level, Fixed]

    def train_step(self, batch: Any, state: Any) -> torch.Tensor:
        ids, numbers = batch
        loss = self.net.loss(ids, numbers)
        self._loss_items["loss"] = loss.detach()
        self.record.step(state.global_iteration, ids, numbers, loss)
        # Of types that no value of setup has.
        before = self.known.near if self.known else Level.LOW
        self.known = Point(state.global_iteration, Fixed((before,)))
        return loss

    def on_training_end(self) -> None:
        self.describe("net")
        self.note(known=describe(self.known))


class Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=4, shuffle=True)
        self._train_dataset = self._create_dataset(Numbers(26), params)


def train(root: Path) -> dict[str, list[str]]:
    record = Record()
    kinds = Kinds("kinds")
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=TOTAL,
        chkpt_frequency=1,
        chkpt_root=root,
        random_seed=18,
        print_banner=False,
        use_cpu=True,
        plugins=[kinds, Recorder(record)],
    )
    trainer.fit(Learner(record, "kinds"), Data())
    record.end += kinds.all()
    return record.result()


if __name__ == "__main__":
    print(*train(Path(sys.argv[1])).values(), sep="\n")
