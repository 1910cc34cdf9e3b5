"""``helios.load_weights``: from which files, by which names, and not again at a resume."""

from __future__ import annotations

import copy
import json
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import helios
from helios import finetune
from helios.errors import (
    ArgumentError,
    CheckpointError,
    IncompatibleCheckpointError,
    RunMismatchError,
    StateError,
    UsageError,
)
from helios.storage.content_hash import fingerprint
from tests.support.ranks import let_launcher_start_from_server


class Data(helios.DataModule):
    def setup(self) -> None:
        x = torch.linspace(-1, 1, 32).unsqueeze(1)
        self.train_dataset = self.create_dataset(TensorDataset(x, x.sin()), batch_size=8)
        self.valid_dataset = self.create_dataset(TensorDataset(x, x.sin()), batch_size=8)


class Net(helios.Model):
    width = 1

    def __init__(self, save_name: str = "net", change: Callable[[Any], None] | None = None) -> None:
        super().__init__(save_name)
        self.change = change
        self.report: Any = None

    unsaved = ("report", "change")

    def setup(self, fast_init: bool = False) -> None:
        self.body = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, self.width)
        if self.change is not None:
            self.change(self)
        networks = [*self.body.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.Adam([x for x in networks if x.requires_grad], lr=0.01)

    def train_step(self, batch: Any) -> Any:
        loss = nn.functional.mse_loss(self.head(self.body(batch[0])).mean(1, True), batch[1])
        self.loss_items["loss"] = loss.detach()
        return loss

    def valid_step(self, batch: Any) -> Any:
        error = (self.head(self.body(batch[0])).mean(1, True) - batch[1]).square().sum()
        return {"error": (error, len(batch[0]))}


def make_trainer(folder: Path | None = None, **options: Any) -> helios.Trainer:
    options = {"max_epochs": 2, "use_cpu": True, "print_banner": False} | options
    return helios.Trainer(chkpt_root=folder, **options)


def state_of(model: Net) -> dict[str, Tensor]:
    named = {"body": model.body.state_dict(), "head": model.head.state_dict()}
    return {f"{path}.{key}": part for path, each in named.items() for key, part in each.items()}


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Train a model; returns its checkpoint and its weights."""
    model = Net("trained")
    make_trainer(tmp_path / "pretrained").fit(model, Data())
    path = helios.find_last_checkpoint(tmp_path / "pretrained" / "trained")
    assert path is not None
    return path, {name: part.clone() for name, part in state_of(model).items()}


def as_checkpoint(path: Path, weights: dict[str, Tensor], folder: Path) -> Path:
    return path


def as_safetensors(path: Path, weights: dict[str, Tensor], folder: Path) -> Path:
    from safetensors.torch import save_file

    save_file(weights, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def as_pt(path: Path, weights: dict[str, Tensor], folder: Path) -> Path:
    torch.save(weights, folder / "weights.pt")
    return folder / "weights.pt"


def as_pth(path: Path, weights: dict[str, Tensor], folder: Path) -> Path:
    torch.save({f"module.{name}": part for name, part in weights.items()}, folder / "resnet.pth")
    return folder / "resnet.pth"


def as_folder(path: Path, weights: dict[str, Tensor], folder: Path) -> Path:
    as_safetensors(path, weights, folder).rename(folder / "model.safetensors")
    torch.save({}, folder / "training_args.bin")
    return folder


def _shard(weights: dict[str, Tensor], folder: Path, suffix: str, save: Any) -> Path:
    names = [*weights]
    table = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.{suffix}"
        save({name: weights[name] for name in part}, folder / file)
        table |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {}, "weight_map": table})
    (folder / f"model.{suffix}.index.json").write_text(text)
    return folder


def as_sharded_folder(path: Path, weights: dict[str, Tensor], folder: Path) -> Path:
    from safetensors.torch import save_file

    return _shard(weights, folder, "safetensors", save_file)


def as_sharded_bin(path: Path, weights: dict[str, Tensor], folder: Path) -> Path:
    return _shard(weights, folder, "bin", torch.save)


KINDS = (
    *(as_checkpoint, as_safetensors, as_pt, as_pth, as_folder),
    *(as_sharded_folder, as_sharded_bin),
)


@pytest.mark.parametrize("write", KINDS)
def test_all_kinds_of_files_are_loaded_by_name(
    trained: tuple[Path, dict[str, Tensor]], write: Any, tmp_path: Path
) -> None:
    path, weights = trained
    source = write(path, weights, tmp_path)
    model = Net()
    model.setup()
    model.head.weight.requires_grad_(False)
    kept = model.head.weight
    report = helios.load_weights(source, model)
    assert fingerprint(dict(state_of(model))) == fingerprint(dict(weights))
    assert model.head.weight is kept
    assert not kept.requires_grad
    assert sorted(report.loaded) == sorted(weights)
    assert [*report.missing, *report.unexpected, *report.mismatched, *report.skipped] == []
    assert str(report) == f"loaded: {len(weights)}"


def test_a_network_takes_its_part_under_other_names(
    trained: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    path, weights = trained
    source, body = as_sharded_folder(path, weights, tmp_path), Net()
    body.setup()
    network = nn.ModuleDict({"stem": copy.deepcopy(body.body), "top": nn.Linear(4, 3)})
    rename, skip = {"body.*": "stem.*", "head.*": "top.*"}, ("top.*",)
    report = helios.load_weights(source, network, rename=rename, skip=skip)
    assert fingerprint(dict(network["stem"].state_dict())) == fingerprint(
        {name.removeprefix("body."): x for name, x in weights.items() if name.startswith("body")}
    )
    assert sorted(report.skipped) == ["top.bias", "top.weight"]
    assert len(report.loaded) == len(weights) - 2


class Wide(Net):
    width = 3


def test_what_does_not_fit_is_refused_or_listed(
    trained: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    path, weights = trained
    del weights["body.0.bias"]
    weights["tail"] = torch.zeros(2)
    source, model = as_pt(path, weights, tmp_path), Wide()
    model.setup()
    before = fingerprint(dict(state_of(model)))
    with pytest.raises(StateError) as caught:
        helios.load_weights(source, model)
    for text in (
        "missing in the file: body.0.bias; only in the file: tail; of another shape: head.weight: "
        "(1, 4) in the file, (3, 4) here, head.bias: (1,) in the file, (3,) here",
        "strict=False",
    ):
        assert text in str(caught.value)
    assert fingerprint(dict(state_of(model))) == before, "nothing is changed"
    report = helios.load_weights(source, model, strict=False)
    assert (report.missing, report.unexpected) == (["body.0.bias"], ["tail"])
    assert report.mismatched == {
        "head.weight": ((1, 4), (3, 4)),
        "head.bias": ((1,), (3,)),
    }
    assert torch.equal(model.body[0].weight, weights["body.0.weight"])
    assert model.head.weight.shape == (3, 4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"skip": "heads.*"}, StateError, r"no name matches 'heads\.\*'\. The file has body\.0"),
        ({"rename": {"bod.*": "x.*"}}, StateError, r"no name matches 'bod\.\*'"),
        ({"rename": {"body.*": "*.*"}}, ArgumentError, r"no more \* on the right"),
        ({"rename": {"head.*": "same", "body.*": "*"}}, StateError, "both become same"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(
    trained: tuple[Path, dict[str, Tensor]], options: Any, error: Any, message: str
) -> None:
    model = Net()
    model.setup()
    with pytest.raises(error, match=message):
        helios.load_weights(trained[0], model, **options)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_a_file_may_hold_a_tied_tensor_under_one_of_its_names(tmp_path: Path) -> None:
    weights = {"embedding.weight": torch.ones(5, 3)}
    network = Tied()
    report = helios.load_weights(as_safetensors(tmp_path, weights, tmp_path), network)
    assert report.missing == []
    assert torch.equal(network.head.weight, torch.ones(5, 3))


def test_tensors_are_read_one_by_one(
    trained: tuple[Path, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last: list[weakref.ref[Tensor]] = []
    fill = finetune.fill

    def watch(name: str, tensor: Tensor, saved: Tensor) -> None:
        assert all(each() is None for each in last), "the tensor before is still in memory"
        last[:] = [weakref.ref(saved)]
        fill(name, tensor, saved)

    monkeypatch.setattr(finetune, "fill", watch)
    model = Net()
    model.setup()
    helios.load_weights(as_sharded_folder(*trained, tmp_path), model)
    assert last


class Call:
    def __reduce__(self) -> Any:
        return (print, ("called",))


@pytest.mark.parametrize(
    ("name", "write", "error", "message"),
    [
        ("none.pt", lambda path: None, CheckpointError, "There is no file at"),
        ("x.pt", lambda path: torch.save({"a": Call()}, path), IncompatibleCheckpointError, "pri"),
        ("x.pt", lambda path: path.write_bytes(pickle.dumps(Call())), CheckpointError, "ZIP"),
        ("x.safetensors", lambda path: path.write_bytes(b"x" * 99), CheckpointError, "damaged"),
        ("x", lambda path: path.mkdir(), CheckpointError, r"found none\. Pass the path"),
    ],
)
def test_bad_files_are_refused(
    tmp_path: Path, name: str, write: Any, error: Any, message: str, capsys: Any
) -> None:
    write(tmp_path / name)
    with pytest.raises(error, match=message):
        helios.load_weights(tmp_path / name, nn.Linear(1, 1))
    assert capsys.readouterr().out == ""


class Tuned(Net):
    unsaved = ("report", "change", "source", "teacher")

    def __init__(self, source: Path, change: Callable[[Any], None] | None = None) -> None:
        super().__init__("tuned", change)
        self.source = source

    def setup(self, fast_init: bool = False) -> None:
        self.body = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 1)
        self.report = helios.load_weights(self.source, self, skip="head.*")
        self.body.requires_grad_(False)
        if self.change is not None:
            self.change(self)
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=0.01)


@pytest.mark.parametrize("init", ["setup", "keyed"])
def test_a_resume_and_an_evaluation_do_not_need_the_file(
    trained: tuple[Path, dict[str, Tensor]], tmp_path: Path, init: str
) -> None:
    source = as_safetensors(*trained, tmp_path)
    options = {"init": init, "valid_frequency": 1}
    whole = Tuned(source)
    make_trainer(tmp_path / "whole", max_epochs=3, **options).fit(whole, Data())
    assert len(whole.report.loaded) == 7
    first = Tuned(source)
    make_trainer(tmp_path / "cut", max_epochs=1, **options).fit(first, Data())
    source.unlink()
    resumed = Tuned(source)
    trainer = make_trainer(tmp_path / "cut", max_epochs=3, **options)
    trainer.fit(resumed, Data())
    assert resumed.report.is_left_to_checkpoint
    assert fingerprint(dict(state_of(resumed))) == fingerprint(dict(state_of(whole)))
    ledgers = [tmp_path / name / "tuned" / "ledger.jsonl" for name in ("whole", "cut")]
    assert ledgers[0].read_bytes() == ledgers[1].read_bytes()
    tested = Tuned(source)
    scores = make_trainer(tmp_path / "cut").validate(tested, Data())
    assert scores == dict(resumed.metrics)
    # What has ended is set up, too.
    again = Tuned(source)
    make_trainer(tmp_path / "cut", max_epochs=3, resume="auto", **options).test(again, Data())
    with pytest.raises(CheckpointError, match="There is no file at"):
        make_trainer(tmp_path / "new", **options).fit(Tuned(source), Data())


def test_a_run_in_several_processes_is_given_back_without_the_file(
    trained: tuple[Path, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_launcher_start_from_server(monkeypatch)
    model = Tuned(as_safetensors(*trained, tmp_path))
    make_trainer(tmp_path / "runs", nproc=2, max_epochs=1).fit(model, Data())
    assert model.report.is_left_to_checkpoint
    assert torch.equal(model.body[0].weight, trained[1]["body.0.weight"])


def _note_norm(model: Any) -> None:
    model.norms = {"head": model.body[0].weight.norm(dim=1)}


def _note_array(model: Any) -> None:
    model.array = model.body[0].weight.detach().numpy().copy()


def _keep_teacher(model: Any) -> None:
    model.teacher = copy.deepcopy(model.body)


def _omit(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [*state]:
        del state[name]


def _leave_out(model: Any) -> None:
    model.body.register_state_dict_post_hook(_omit)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_note_norm, r"norms\.head"),
        (_note_array, "array"),
        (_keep_teacher, "teacher"),
        (_leave_out, "body, whose class has a state_dict of its own,"),
    ],
)
def test_what_no_checkpoint_would_hold_is_refused_before_training(
    trained: tuple[Path, dict[str, Tensor]], tmp_path: Path, change: Any, named: str
) -> None:
    with pytest.raises(UsageError, match=rf"{named} .*every_start=True"):
        make_trainer(tmp_path / "runs").fit(Tuned(trained[0], change), Data())


def _compute_scale(model: Any) -> None:
    model.scale = float(model.body[0].weight.abs().sum())


def test_a_number_made_of_weights_that_are_not_read_again_is_refused(
    trained: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    make_trainer(root, max_epochs=1).fit(Tuned(trained[0], _compute_scale), Data())
    trainer = make_trainer(root, max_epochs=2)
    for call in (trainer.fit, trainer.test):
        with pytest.raises(RunMismatchError, match=r"model\.scale: .*every_start=True"):
            call(Tuned(trained[0], _compute_scale), Data())


class Distilled(Net):
    unsaved = ("report", "change", "source", "teacher")

    def __init__(self, source: Path) -> None:
        super().__init__("distilled")
        self.source = source

    def setup(self, fast_init: bool = False) -> None:
        super().setup(fast_init)
        self.teacher = nn.Linear(4, 1)
        self.report = helios.load_weights(self.source, self.teacher, every_start=True)
        self.norm = self.teacher.weight.norm()


def test_a_file_is_read_at_every_start_if_asked(
    trained: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    for epochs in (1, 2):
        model = Distilled(trained[0])
        make_trainer(tmp_path / "runs", max_epochs=epochs).fit(model, Data())
        assert torch.equal(model.teacher.weight, trained[1]["head.weight"])
        assert model.norm == trained[1]["head.weight"].norm()


class Still(Net):
    """Does not move, so that it ends with what it has loaded."""

    def __init__(self, source: Path | None) -> None:
        super().__init__("first" if source is None else "second")
        self.source = source

    unsaved = ("report", "change", "source")

    def setup(self, fast_init: bool = False) -> None:
        self.body, self.head = nn.Sequential(nn.Linear(1, 4), nn.ReLU()), nn.Linear(4, 1)
        if self.source is not None:
            helios.load_weights(self.source, self)
        networks = [*self.body.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.SGD(networks, lr=0.0)


@pytest.mark.full
@pytest.mark.parametrize("write", [as_checkpoint, as_safetensors])
@pytest.mark.parametrize("init", ["setup", "keyed"])
def test_sharded_models_load_and_are_loaded(tmp_path: Path, init: str, write: Any) -> None:
    options: dict[str, Any] = {"sharding": "full", "nproc": 2, "max_epochs": 1}
    first = Still(None)
    make_trainer(tmp_path / "runs", random_seed=5, **options).fit(first, Data())
    path = helios.find_last_checkpoint(tmp_path / "runs" / "first")
    assert path is not None
    assert path.suffix == ".ckpt"
    weights = {name: part.clone() for name, part in state_of(first).items()}
    second = Still(write(path, weights, tmp_path))
    make_trainer(tmp_path / "runs", init=init, **options).fit(second, Data())
    assert fingerprint(dict(state_of(second))) == fingerprint(dict(weights))
