"""After ``fit`` the model is evaluated as it is; everything else loads, and the log says what.

The reference is an evaluation written by hand, of the networks that the script holds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import update_bn
from torch.utils.data import TensorDataset

import helios
from helios import DataLoaderParams, Trainer
from helios.engines.engine import Engine
from helios.plugins import EMA, SWA, Plugin
from tests.support.ranks import let_launcher_start_from_server, run_ranks
from tests.support.runs import RETURNS

EPOCHS = 3


class Data(helios.DataModule):
    def setup(self) -> None:
        # Drawn here, so that the parts are those of fit only under the same seed.
        self.x = torch.randn(24, 3)
        self.parts = torch.randperm(24)
        data = TensorDataset(self.x, self.x.sum(dim=1, keepdim=True))
        params = DataLoaderParams(batch_size=6, shuffle=True)
        self._train_dataset = self._create_dataset(data, params)
        rest = TensorDataset(self.x + 0.5, 2 * self.x.sum(dim=1, keepdim=True))
        params = DataLoaderParams(batch_size=5)
        self._valid_dataset = self._test_dataset = self._create_dataset(rest, params)
        self._predict_dataset = self._valid_dataset


class Net(helios.Model):
    unsaved = ("num_setups",)

    def __init__(self, name: str = "net") -> None:
        super().__init__(name)
        self.num_setups = 0

    def setup(self, fast_init: bool = False) -> None:
        self.num_setups += 1
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_step(self, batch: Any, state: helios.TrainingState) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def valid_step(self, batch: Any, step: int) -> dict[str, tuple[Any, int]]:
        return {"error": ((self.net(batch[0]) - batch[1]).double().square().sum(), len(batch[0]))}

    def test_step(self, batch: Any, step: int) -> dict[str, tuple[Any, int]]:
        return self.valid_step(batch, step)

    def predict_step(self, batch: Any, step: int) -> Any:
        return self.net(batch[0])


def make(root: Path | None, *plugins: Plugin, **options: Any) -> Trainer:
    frequency = None if root is None else 1
    defaults: dict[str, Any] = {"chkpt_frequency": frequency, "valid_frequency": 1}
    defaults |= {"total_steps": EPOCHS, "use_cpu": True, "print_banner": False}
    return Trainer(chkpt_root=root, plugins=list(plugins), **defaults | options)


def by_hand(net: nn.Module, data: Data) -> tuple[float, list[Tensor]]:
    """Return the error and the outputs of a network as it is."""
    net.eval()
    total, outputs = torch.zeros((), dtype=torch.float64), []
    with torch.inference_mode():
        for begin in range(0, 24, 5):
            x = data.x[begin : begin + 5] + 0.5
            outputs.append(net(x))
            target = 2 * data.x[begin : begin + 5].sum(dim=1, keepdim=True)
            total += (outputs[-1] - target).double().square().sum()
    net.train()
    return float(total) / 24, outputs


def require_as_it_is(trainer: Trainer, model: Net, data: Data) -> None:
    """Check each evaluation of a model in hand, bit for bit, and that nothing was built."""
    count = model.num_setups
    error, outputs = by_hand(model.net, data)
    trainer.test(model, data)
    assert model.test_scores["error"] == error
    trainer.validate(model, data)
    assert model.metrics["error"] == error
    found = trainer.predict(model, data)
    assert len(found) == len(outputs)
    assert all(map(torch.equal, found, outputs))
    assert model.num_setups == count


def apply_swa(model: Net, data: Data, average: EMA | SWA) -> None:
    average.copy_to(model)
    batches = data.x.split(6)
    update_bn(batches, model.net)  # type: ignore[no-untyped-call]


def apply_pruning(model: Net, data: Data, average: EMA | SWA) -> None:
    prune.l1_unstructured(model.net[0], "weight", amount=0.5)  # type: ignore[no-untyped-call]


def apply_mask(model: Net, data: Data, average: EMA | SWA) -> None:
    """Prune in a way that no version counter of autograd sees."""
    weight = model.net[0].weight
    weight.data.mul_(weight.data.abs() > weight.data.abs().median())


def apply_quantization(model: Net, data: Data, average: EMA | SWA) -> None:
    model.net = nn.Sequential(*(part.to(torch.bfloat16).float() for part in model.net))


CHANGES = [apply_swa, apply_pruning, apply_mask, apply_quantization]


@pytest.mark.shows("P132")
@pytest.mark.sampled(5)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [EMA, SWA])
@pytest.mark.parametrize("start", ["new", "finished", "without a folder"])
def test_what_a_script_does_to_the_model_after_fit_counts(
    start: str, kind: type, change: Callable[..., None], tmp_path: Path
) -> None:
    root = None if start == "without a folder" else tmp_path
    if start == "finished":
        assert make(root, EMA(0.5) if kind is EMA else SWA(2)).fit(Net(), Data())
    average = EMA(0.5) if kind is EMA else SWA(2)
    trainer, model, data = make(root, average), Net(), Data()
    assert trainer.fit(model, data)
    change(model, data, average)
    require_as_it_is(trainer, model, data)


def weights_of(model: Net) -> list[bytes]:
    return [bytes(part.detach().numpy().tobytes()) for part in model.net.state_dict().values()]


def stored(root: Path, epoch: int = EPOCHS) -> list[bytes]:
    path = root / "net" / f"net_epoch_{epoch}_iter_{4 * epoch}.pth"
    state = helios.load_checkpoint(path)["model"]["objects"]["net"]
    return [bytes(part.numpy().tobytes()) for part in state.values()]


@pytest.mark.shows("P132")
def test_everything_else_loads_and_the_log_says_which_weights_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_loaded(trainer: Trainer, model: Net, *texts: str, epoch: int = EPOCHS) -> None:
        capsys.readouterr()
        trainer.test(model, Data())
        assert weights_of(model) == stored(tmp_path, epoch)
        said = capsys.readouterr().err
        assert f"Testing of net_epoch_{epoch}_iter_{4 * epoch}.pth{''.join(texts)}." in said

    class Interrupting(Plugin):
        def setup(self) -> None:
            """Nothing to prepare."""

        def on_training_epoch_end(self, current_epoch: int) -> None:
            self.context.interrupt("a test")

    interrupting = Interrupting("interrupting")
    trainer, model = make(tmp_path, interrupting, signals=RETURNS), Net()
    assert not trainer.fit(model, Data())
    change_by_hand(model)
    is_loaded(trainer, model, ", the newest checkpoint, because fit was interrupted", epoch=1)
    trainer = make(tmp_path)
    assert trainer.fit(model, Data())
    is_loaded(trainer, Net())
    is_loaded(make(tmp_path), model)
    is_loaded(
        trainer, model, ", the newest checkpoint, because another call has set the model up since"
    )
    assert trainer.fit(model, Data()), "a finished run is found"
    change_by_hand(model)
    trainer.test(model, Data())
    assert weights_of(model) != stored(tmp_path)
    assert "Testing of the model as it is now, after fit." in capsys.readouterr().err
    other = Net()
    assert trainer.fit(other, Data())
    is_loaded(trainer, model)
    change_by_hand(other)
    trainer.test(other, Data(), checkpoint="newest")
    assert weights_of(other) == stored(tmp_path), "what is asked for is loaded"


def change_by_hand(model: Net) -> None:
    with torch.no_grad():
        model.net[0].weight.mul_(2)


@pytest.mark.shows("P132")
def test_an_evaluation_of_another_checkpoint_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else ``test("best")`` and then ``test()`` would show the best scores twice."""
    trainer, model, data = make(tmp_path), Net(), Data()
    assert trainer.fit(model, data)
    path = tmp_path / "net" / "net_epoch_1_iter_4.pth"
    for _ in range(2):
        trainer.test(model, data, checkpoint=path)
    assert capsys.readouterr().err.count("Testing of net_epoch_1_iter_4.pth.\n") == 2
    trainer.test(model, data)
    assert weights_of(model) == stored(tmp_path)


@pytest.mark.shows("P132")
def test_an_average_is_swapped_in_until_the_script_changes_its_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ema = EMA(0.5)
    trainer, model, data = make(tmp_path, ema), Net(), Data()
    assert trainer.fit(model, data)
    own, average = weights_of(model), Net()
    average.setup()
    average.net.load_state_dict(ema.averaged_state_dict(model))
    error, _ = by_hand(average.net, data)
    for _ in range(2):
        trainer.test(model, data)
        assert model.test_scores["error"] == error
        assert weights_of(model) == own
    assert "as it is now, after fit, with the average of plugin 'ema'." in capsys.readouterr().err
    assert ema.num_updates == 4 * EPOCHS
    change_by_hand(model)
    require_as_it_is(trainer, model, data)
    text = "without the average of plugin 'ema', because of changes to net since fit."
    assert capsys.readouterr().err.count(text) == 3


def _is_newest(root: Path, model: Net) -> bool:
    path = helios.find_last_checkpoint(root / "net")
    assert path is not None
    state = helios.load_checkpoint(path)["model"]["objects"]["net"]
    return all(map(torch.equal, model.net.state_dict().values(), state.values()))


def _test_changed(rank: int, root: Path, **options: Any) -> tuple[bool, bool]:
    trainer, model, data = make(root, **options), Net(), Data()
    assert trainer.fit(model, data)
    change_by_hand(model)
    is_changed = not _is_newest(root, model)
    trainer.test(model, data)
    return is_changed, _is_newest(root, model)


@pytest.mark.shows("P132")
def test_models_of_ended_process_groups_load(tmp_path: Path) -> None:
    """Else a change on one rank alone would be a part of the scores of all."""
    assert run_ranks(_test_changed, 2, tmp_path) == [(True, True)] * 2


def test_spawned_ranks_train_with_an_engine_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    let_launcher_start_from_server(monkeypatch)
    trainer = Trainer(total_steps=1, num_replicas=2, nproc=2, engine=Engine("cpu"))
    assert trainer.fit(Net(), Data())
