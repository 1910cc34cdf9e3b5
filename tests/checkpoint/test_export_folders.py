"""Exports that are folders: read by the libraries that they are for, and whole or not there."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from helios.checkpoint import status
from helios.checkpoint.export import Weights, select_weights
from helios.checkpoint.export_folders import (
    NOTE_NAME,
    DistributedCheckpoint,
    FolderFormat,
    HuggingFace,
    write_folder,
)
from helios.checkpoint.shard_index import INDEX_NAME, RECORD_NAME
from helios.checkpoint.store import RunFolder
from helios.cli import main
from helios.cli.conversions import FORMATS
from helios.core import sharded_tensors
from helios.errors import ArgumentError, CheckpointError, FolderInUseError
from helios.storage import files
from helios.storage.folder_lock import FolderLock
from tests.checkpoint.helpers import make_payload, make_sidecar, names, save_payload
from tests.checkpoint.sharded_helpers import save_network
from tests.support.scripts import call

State = dict[str, torch.Tensor]
LAYOUTS: dict[str, FolderFormat] = {
    "huggingface": HuggingFace(1 << 30),
    "dcp": DistributedCheckpoint(),
}


def make_state() -> State:
    """Tensors of many kinds: types, forms, names, one that has two names."""
    base = torch.randn(12, generator=torch.Generator().manual_seed(0))
    base[:3] = torch.tensor([float("nan"), -0.0, float("inf")])
    return {
        "block.0.weight": base.to(torch.bfloat16),
        "turned": base.view(3, 4).t(),
        "part": base[2:5],
        "wide": base[:1].expand(4),
        "empty": torch.zeros(0, 3),
        "other_empty": torch.zeros(0),
        "scalar": torch.tensor(3),
        "half scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "tied": base,
        "again.tied": base,
        "large": torch.arange(600_000).view(3, 200_000).double(),
    }


def save_whole(
    folder: RunFolder, state: State, averages: State | None = None, **options: Any
) -> Path:
    payload = make_payload(1, 4, objects={"net": state}, flags={"net": {}}, parameters={})
    payload |= {"plugins": {"ema": {"averages": {"net": averages or {}}}}}
    sidecar = make_sidecar(1, 4)
    return save_payload(folder, payload, stem="run_epoch_1_iter_4", sidecar=sidecar)


SAVES: dict[str, Callable[..., Path]] = {".pth": save_whole, ".ckpt": save_network}


def run(path: Path, kind: str, *words: str | Path) -> int:
    return main(["export", str(path), "--to", kind, *map(str, words)])


def load(kind: str, path: Path, like: State) -> State:
    """Read an export with the library that it is for."""
    if kind == "pt":
        return torch.load(path, weights_only=True)
    if kind == "safetensors":
        return load_file(path)
    if kind == "huggingface":
        return {
            key: part
            for each in sorted(path.glob("*.s*s"))
            for key, part in load_file(each).items()
        }
    found = {key: torch.full_like(part, 7).contiguous() for key, part in like.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=path)
    return found


def bytes_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    flat = tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tensor.shape, flat.numpy().tobytes()


def is_equal(found: State, state: State) -> bool:
    return found.keys() == state.keys() and all(
        bytes_of(found[name]) == bytes_of(part) for name, part in state.items()
    )


@pytest.mark.shows("P98")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("form", SAVES)
def test_every_kind_of_tensor_has_its_bytes_in_every_format(
    kind: str, form: str, tmp_path: Path
) -> None:
    state = make_state()
    path = SAVES[form](RunFolder(tmp_path / "run"), state)
    assert path.suffix == form
    assert run(path, kind) == 0
    assert is_equal(load(kind, path.with_suffix(f".{kind}"), state), state)


def test_types_that_no_sharded_checkpoint_holds_have_their_bytes_too(tmp_path: Path) -> None:
    state = {
        "tiny": torch.arange(5.0).to(torch.float8_e4m3fn),
        "unsigned": torch.arange(5).to(torch.uint16),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    }
    for kind, layout in LAYOUTS.items():
        write_folder(tmp_path / kind, Weights(state), layout, metadata={})
        like = {name: torch.zeros(part.shape, dtype=part.dtype) for name, part in state.items()}
        found = load_dcp(tmp_path / kind) if kind == "dcp" else load(kind, tmp_path / kind, like)
        assert is_equal(found, state)


def load_dcp(path: Path) -> State:
    target = path.with_name("converted.pt")
    dcp_to_torch_save(path, target)
    found: State = torch.load(target, weights_only=True)
    return found


@pytest.mark.shows("P98")
@pytest.mark.parametrize("form", SAVES)
def test_torch_converts_the_folder_to_a_plain_state(form: str, tmp_path: Path) -> None:
    state = make_state()
    path = SAVES[form](RunFolder(tmp_path / "run"), state)
    assert run(path, "dcp", "--out", tmp_path / "out") == 0
    assert is_equal(load_dcp(tmp_path / "out"), state)


@pytest.mark.shows("P98")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("form", SAVES)
def test_an_average_is_exported_in_the_types_of_the_weights(
    kind: str, form: str, tmp_path: Path
) -> None:
    state = make_state()
    state["rounded"] = torch.zeros(5, 3, dtype=torch.bfloat16)
    means = {name: state[name].float() + 0.3 for name in ("rounded", "tied", "half scalar")}
    path = SAVES[form](RunFolder(tmp_path / "run"), state, means)
    assert run(path, kind, "--average", "ema") == 0
    expected = state | {name: part.to(state[name].dtype) for name, part in means.items()}
    expected["again.tied"] = expected["tied"]
    assert is_equal(load(kind, path.with_suffix(f".{kind}"), expected), expected)


@pytest.mark.shows("P98")
def test_tensors_are_spread_over_files_that_an_index_names(tmp_path: Path) -> None:
    state = {f"layer.{number}": torch.full((250,), float(number)) for number in range(7)}
    state["large"] = torch.ones(4000)
    state["last"] = torch.zeros(1)
    path = save_network(RunFolder(tmp_path / "run"), state)
    out = tmp_path / "out"
    assert run(path, "huggingface", "--out", out, "--max-shard-size", "3KB") == 0
    parts = [f"model-0000{number}-of-00005.safetensors" for number in range(1, 6)]
    assert names(out) == sorted([NOTE_NAME, "model.safetensors.index.json", *parts])
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(part.nbytes for part in state.values())}
    assert list(index["weight_map"]) == list(state)
    for part in parts:
        with safe_open(out / part, framework="pt") as opened:
            found = set(opened.keys())
            assert opened.metadata()["format"] == "pt"
        assert found == {name for name, file in index["weight_map"].items() if file == part}
        assert found == {"large"} or sum(state[name].nbytes for name in found) <= 3000
    assert is_equal(load("huggingface", out, state), state)


def test_what_fits_is_one_file_without_an_index(tmp_path: Path) -> None:
    state = {"a": torch.zeros(2), "b": torch.zeros(1)}
    write_folder(tmp_path / "x", Weights(state), HuggingFace(12), metadata={})
    assert names(tmp_path / "x") == [NOTE_NAME, "model.safetensors"]


class Memory(bytearray):
    """Memory of a tensor that can be watched."""


KEEPS_ALL = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="PyTorch 2.6 keeps all tensors until the end"
)


@pytest.mark.shows("P98")
@pytest.mark.parametrize(
    ("kind", "limit"), [("huggingface", 4_800), pytest.param("dcp", 2_400, marks=KEEPS_ALL)]
)
def test_memory_is_needed_for_one_file_or_one_tensor(
    kind: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"layer.{number}": torch.full((3, 100), float(number)) for number in range(12)}
    means = {name: part.double() for name, part in state.items()}
    _, tree = status.look_into(save_network(RunFolder(tmp_path / "run"), state, means))
    alive, most = [0], [0]

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        # Whoever keeps a view of it keeps its memory.
        memory = Memory(tensor.nbytes)
        found = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
        alive[0] += found.nbytes
        most[0] = max(most[0], alive[0])
        weakref.finalize(memory, lambda size=found.nbytes: alive.__setitem__(0, alive[0] - size))
        return found.copy_(read(tensor))

    read = sharded_tensors.read_deferred
    monkeypatch.setattr(sharded_tensors, "read_deferred", watch)
    layout = HuggingFace(2_400) if kind == "huggingface" else DistributedCheckpoint()
    write_folder(tmp_path / "plain", select_weights(tree), layout, metadata={})
    assert 1_200 <= most[0] <= limit / 2 + 1_200 * (kind == "dcp")
    most[0] = 0
    weights = select_weights(tree, average="ema")
    assert not most[0], "read before it is written"
    write_folder(tmp_path / "mean", weights, layout, metadata={})
    # The average, and what becomes of it.
    assert 2_400 <= most[0] <= limit + 2_400
    assert is_equal(load(kind, tmp_path / "mean", state), state)


def small(value: float = 0.0) -> Weights:
    return Weights({"a": torch.full((2,), value)})


def value_in(kind: str, path: Path) -> float:
    return float(load(kind, path, {"a": torch.zeros(2)})["a"][0])


@pytest.mark.shows("P99")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_an_export_is_replaced_only_if_asked_for(kind: str, tmp_path: Path) -> None:
    path, layout = tmp_path / "out", LAYOUTS[kind]
    write_folder(path, small(1.0), layout, metadata={})
    with pytest.raises(ArgumentError, match="exists already"):
        write_folder(path, small(2.0), layout, metadata={})
    assert value_in(kind, path) == 1.0
    write_folder(path, small(2.0), layout, metadata={}, replaces=True)
    assert value_in(kind, path) == 2.0
    assert names(tmp_path) == ["out"]


@pytest.mark.shows("P99")
def test_an_export_is_not_replaced_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, layout = tmp_path / "out", LAYOUTS["dcp"]
    write_folder(path, small(1.0), layout, metadata={})
    monkeypatch.chdir(path)
    for place in (Path(), Path("..")):
        with pytest.raises(ArgumentError, match=r"a folder with a name.*got \.+\. Write out"):
            write_folder(place, small(2.0), layout, metadata={}, replaces=True)
    assert value_in("dcp", path) == 1.0
    assert names(tmp_path) == ["out"]


@pytest.mark.shows("P99")
def test_nothing_but_an_export_is_ever_replaced(tmp_path: Path) -> None:
    path, layout = tmp_path / "out", LAYOUTS["huggingface"]
    path.mkdir()
    (path / "thesis.tex").write_text("mine")
    with pytest.raises(ArgumentError, match="not a folder that Helios has exported"):
        write_folder(path, small(), layout, metadata={}, replaces=True)
    (path / "thesis.tex").rename(tmp_path / "file")
    with pytest.raises(ArgumentError, match="not a folder that Helios has exported"):
        write_folder(tmp_path / "file", small(), layout, metadata={}, replaces=True)
    path.rmdir()
    write_folder(path, small(), layout, metadata={})
    (path / "tokenizer.json").write_text("mine")
    with pytest.raises(ArgumentError, match=r"also holds tokenizer\.json"):
        write_folder(path, small(), layout, metadata={}, replaces=True)
    assert names(path) == [NOTE_NAME, "model.safetensors", "tokenizer.json"]
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ArgumentError, match="not a folder that Helios has exported"):
        write_folder(tmp_path / "link", small(), layout, metadata={}, replaces=True)
    assert names(tmp_path) == ["file", "link", "out"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.shows("P99")
@pytest.mark.parametrize("name", ["out.tmp", "out.replaced.tmp"])
def test_what_is_in_the_way_is_removed_only_if_an_export_left_it(name: str, tmp_path: Path) -> None:
    path, layout = tmp_path / "out", LAYOUTS["huggingface"]
    write_folder(path, small(1.0), layout, metadata={})
    other = tmp_path / name
    other.mkdir()
    (other / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="is in the way"):
        write_folder(path, small(2.0), layout, metadata={}, replaces=True)
    assert value_in("huggingface", path) == 1.0
    (other / NOTE_NAME).write_text((path / NOTE_NAME).read_text())
    write_folder(path, small(2.0), layout, metadata={}, replaces=True)
    assert value_in("huggingface", path) == 2.0
    assert names(tmp_path) == ["out"]


@pytest.mark.shows("P99")
def test_two_processes_do_not_export_to_one_folder(tmp_path: Path) -> None:
    refused = pytest.raises(FolderInUseError, match="Another process is exporting")
    with FolderLock(tmp_path, name=".out.lock"), refused:
        write_folder(tmp_path / "out", small(), LAYOUTS["dcp"], metadata={})
    write_folder(tmp_path / "out", small(), LAYOUTS["dcp"], metadata={})
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_an_export_is_not_named_like_a_checkpoint(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="a training would load it"):
        write_folder(tmp_path / "run_epoch_1_iter_2.ckpt", small(), LAYOUTS[kind], metadata={})
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", FORMATS)
def test_no_export_is_put_into_a_checkpoint(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_network(RunFolder(tmp_path / "run"), make_state())
    before = names(path)
    assert run(path, kind, "--out", path / "out") == 2
    assert "must not be in the folder of a checkpoint" in capsys.readouterr().err
    assert names(path) == before


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_a_format_cannot_hold_is_named(kind: str, tmp_path: Path) -> None:
    weights = Weights({"a": torch.zeros(2), "b": torch.zeros(2, 2).to_sparse()})
    with pytest.raises(CheckpointError, match=r"b is torch\.sparse_coo.*Export to pt"):
        write_folder(tmp_path / "x", weights, LAYOUTS[kind], metadata={})
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_full_disk_leaves_the_old_folder_and_no_other(kind: str, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "x"
    write_folder(path, small(1.0), LAYOUTS[kind], metadata={})
    large = Weights({"a": torch.zeros(2), "b": torch.zeros(1 << 20)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises((CheckpointError, OSError), match=r"File too large|os error 27"):
            write_folder(path, large, LAYOUTS[kind], metadata={}, replaces=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert value_in(kind, path) == 1.0
    assert names(tmp_path) == ["x"]


@pytest.mark.shows("P99")
def test_a_rename_that_fails_brings_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, layout = tmp_path / "x", LAYOUTS["huggingface"]
    write_folder(path, small(1.0), layout, metadata={})
    replace = files.replace

    def fail(source: Path, target: Path) -> None:
        if source.name == "x.tmp":
            raise PermissionError("not now")
        replace(source, target)

    monkeypatch.setattr(files, "replace", fail)
    with pytest.raises(PermissionError):
        write_folder(path, small(2.0), layout, metadata={}, replaces=True)
    assert value_in("huggingface", path) == 1.0


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


_RANK = "rank-00001-of-00003.safetensors"


@pytest.mark.shows("P100")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", [RECORD_NAME, INDEX_NAME, _RANK, "foreign.pkl"])
@pytest.mark.parametrize("damage", ["a flipped bit", "truncated", "missing", "a pickle"])
def test_a_damaged_folder_is_refused_by_name_and_nothing_is_written(
    kind: str, name: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_network(RunFolder(tmp_path / "run"), make_state())
    part, mark = path / name, tmp_path / "executed"
    data = bytearray(part.read_bytes() if part.exists() else pickle.dumps(Bomb(mark)))
    if damage == "a flipped bit":
        data[len(data) // 2] ^= 4
    elif damage == "truncated":
        del data[-3:]
    elif damage == "a pickle":
        data = bytearray(pickle.dumps(Bomb(mark)))
    part.write_bytes(data)
    if damage == "missing":
        part.unlink()
    before = names(path.parent)
    is_whole = name == "foreign.pkl" and damage == "missing"
    assert run(path, kind) == (0 if is_whole else 1)
    assert (name in capsys.readouterr().err) != is_whole
    assert (names(path.parent) == before) != is_whole
    assert not mark.exists()


def load_by_transformers() -> None:
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    root = Path(sys.argv[1])
    sizes = {"vocab_size": 64, "num_attention_heads": 2}
    gpt = GPT2Config(**sizes, n_positions=16, n_embd=32, n_layer=2, bos_token_id=0)
    bert = BertConfig(**sizes, hidden_size=32, num_hidden_layers=1, intermediate_size=32)
    tokens, report = torch.arange(16)[None], []
    for network in (GPT2LMHeadModel(gpt), BertForMaskedLM(bert)):
        kind = type(network)
        for form, save in SAVES.items():
            folder = root / kind.__name__ / form[1:]
            path = save(RunFolder(folder), network.state_dict())
            network.config.save_pretrained(folder)
            for size in ("5GB", "20KB"):
                out = folder / size
                words = ("--config", folder / "config.json", "--max-shard-size", size, "--out", out)
                assert run(path, "huggingface", *words) == 0
                loaded, facts = kind.from_pretrained(out, output_loading_info=True)
                own, other = network.state_dict(), loaded.state_dict()
                ends = loaded.get_output_embeddings(), loaded.get_input_embeddings()
                found = {
                    "files": len(list(out.glob("*.safetensors"))),
                    "odd": [str(part) for part in facts.values() if part],
                    "bytes": all(bytes_of(own[name]) == bytes_of(other[name]) for name in own),
                    "names": list(own) == list(other),
                    "tied": ends[0].weight is ends[1].weight,
                    "logits": bytes_of(network.eval()(tokens).logits)
                    == bytes_of(loaded.eval()(tokens).logits),
                }
                report.append(found)
    print(json.dumps(report))


@pytest.mark.shows("P98")
def test_transformers_loads_the_folder_with_every_byte_and_tie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a process of its own, since transformers leaves a thread.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = call(load_by_transformers, tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report) == 8
    for number, found in enumerate(report):
        count = found.pop("files")
        assert (count > 1) == bool(number % 2)
        expected = {"odd": [], "bytes": True, "names": True, "tied": True, "logits": True}
        assert found == expected


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.block.query.lora_A.default.weight",
        "encoder.block.lora_B.default.weight",
        "base_model.model.block.ia3_l.default",
    ],
)
def test_adapters_are_refused_with_what_works_instead(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"base.weight": torch.ones(2, 2), name: torch.arange(4.0).view(2, 2)}
    path = save_whole(RunFolder(tmp_path), state)
    assert run(path, "huggingface", "--out", tmp_path / "folder") == 2
    said = capsys.readouterr().err
    assert "adapters of PEFT" in said
    assert name in said
    assert not (tmp_path / "folder").exists()
    found = re.search(r"--to (\w+), which", said)
    assert found is not None
    assert run(path, found[1], "--out", tmp_path / "file") == 0
    assert is_equal(load_file(tmp_path / "file"), state)
