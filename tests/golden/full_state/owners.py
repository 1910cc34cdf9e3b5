"""Every owner holds something for each section of a saved state; all steps are manual."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

import helios
from helios.loops import BatchLoop
from helios.plugins import HookContext, PipelineHooks
from tests.golden.full_state.parts import build, describe, move
from tests.golden.today.exact import ExactModel, Numbers, Record, Recorder, bits, draw

NAME = "owners"
TOTAL = 8
SAVED = (3, 5)


class Learner(ExactModel):
    def setup(self, fast_init: bool = False) -> None:
        build(self, 2)

    def train_step(self, batch: Any, state: Any) -> None:
        ids, numbers = batch
        moved = move(self, state.global_iteration, ids)
        self._loss_items["moved"] = torch.tensor(float(moved))
        self.record.step(state.global_iteration, ids, numbers, torch.tensor(moved))


class Plain(helios.Plugin):
    """A plugin without a state of its own."""

    def setup(self) -> None:
        build(self, 4)


class Leaving(helios.Plugin):
    """A plugin with a state that holds little of it."""

    def setup(self) -> None:
        build(self, 5)

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first.load_state_dict(state_dict["first"])


class Loop(BatchLoop):
    """A loop without a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        build(self, 6)


class Engine(helios.Engine):
    """An engine with attributes."""

    def __init__(self) -> None:
        super().__init__("cpu")
        build(self, 7)


class Context(HookContext):
    """A context that counts batches, without a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.generator = [], random.Random(3)

    def on_enter(self, ctx: Any) -> None:
        self.entered.append((len(self.entered), self.generator.getrandbits(8)))

    def on_exit(self, ctx: Any) -> None: ...


class ContextWithState(HookContext):
    """A context with a state of its own, and one more attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.exits, self.others = 0, []

    def on_enter(self, ctx: Any) -> None: ...

    def on_exit(self, ctx: Any) -> None:
        self.exits += 1
        self.others.append(draw())

    def state_dict(self) -> dict[str, Any]:
        return {"exits": self.exits}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.exits = state_dict["exits"]


class Drawing(Numbers):
    """A data set with plain values and generators, around another one."""

    def __init__(self, length: int, inside: Numbers | None = None) -> None:
        super().__init__(length)
        self.inside = inside
        self.read, self.counts = 0, {"odd": 0}
        self.generator = torch.Generator()
        self.random = random.Random(length)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        self.read += 1
        self.counts["odd"] += index % 2
        drawn = int(torch.randint(0, 8, (1,), generator=self.generator))
        drawn += self.random.getrandbits(2) + self.read + self.counts["odd"]
        ids, numbers = (self.inside or super()).__getitem__(index)
        return ids, numbers + drawn % 16


class Collate:
    """A collate function with plain values."""

    def __init__(self) -> None:
        self.calls, self.generator = 0, random.Random(1)

    def __call__(self, samples: list[Any]) -> Any:
        self.calls += 1
        ids, numbers = zip(*samples, strict=True)
        shift = self.calls + self.generator.getrandbits(3)
        return torch.tensor(ids), torch.stack(numbers) + shift


class Data(helios.DataModule):
    def setup(self) -> None:
        params = helios.DataLoaderParams(batch_size=4, shuffle=True, collate_fn=Collate())
        self._train_dataset = self._create_dataset(Drawing(14, Drawing(14)), params)
        build(self, 10)


class Mover(helios.Plugin):
    """Moves what the other owners hold."""

    unsaved = ("owners", "record", "numbers")

    def __init__(self, owners: dict[str, Any], record: Record) -> None:
        super().__init__("mover")
        self.owners, self.record = owners, record
        self.numbers: list[int] = []

    def setup(self) -> None: ...

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = {"numbers": self.numbers}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.numbers = [*checkpoint["added"]["numbers"]]

    def on_training_batch_end(self, state: Any, should_log: bool) -> None:
        number = state.global_iteration
        self.numbers.append(number + len(self.numbers))
        moved = [
            (name, move(owner, number, torch.tensor([number, 2])))
            for name, owner in self.owners.items()
        ]
        self.record.steps.append(f"{number} moved {moved} {self.numbers}")


def train(root: Path) -> dict[str, list[str]]:
    record, engine, loop = Record(), Engine(), Loop()
    data, plain, leaving = Data(), Plain("plain"), Leaving("leaving")
    owners = {"data": data, "plain": plain, "leaving": leaving, "engine": engine, "loop": loop}
    hooks, contexts = PipelineHooks(), (Context(), ContextWithState())
    for channel, context in zip(("on_batch", "on_model_forward"), contexts, strict=True):
        hooks.register(channel, context)
    trainer = helios.Trainer(
        train_unit="iteration",
        total_steps=TOTAL,
        chkpt_frequency=1,
        chkpt_root=root,
        random_seed=12,
        print_banner=False,
        engine=engine,
        plugins=[plain, leaving, Mover(owners, record), hooks, Recorder(record)],
    )
    trainer.fit_loop.epoch_loop.connect(batch_loop=loop)
    learner = Learner(record, NAME)
    trainer.fit(learner, data)
    for key, owner in ({"model": learner} | owners).items():
        record.end += [f"{key}: {line}" for line in describe(owner)]
    first, second = contexts
    record.end += [f"contexts {first.entered} {second.exits} {second.others}"]
    dataset, collate = data.train_dataset, data._train_dataset.params.collate_fn
    record.end += [f"data set {bits((dataset.read, dataset.counts, dataset.inside.counts))}"]
    record.end += [f"collate {collate.calls}"]
    return record.result()


if __name__ == "__main__":
    print(*train(Path(sys.argv[1])).values(), sep="\n")
