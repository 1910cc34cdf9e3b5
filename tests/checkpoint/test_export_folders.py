"""Exports that are folders: read by the libraries that they are for, and whole or not there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helios.checkpoint.export import Weights, select_weights, write_folder
from helios.checkpoint.status import look_into
from helios.checkpoint.store import RunFolder
from helios.cli import main
from helios.cli.conversions import FORMATS
from helios.errors import ArgumentError
from tests.checkpoint.helpers import make_payload, make_sidecar, names, save_payload
from tests.checkpoint.sharded_helpers import save_network
from tests.support.scripts import call

State = dict[str, torch.Tensor]


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


def export_in_parts(path: Path, out: Path, max_bytes: int) -> None:
    _, tree = look_into(path)
    write_folder(out, select_weights(tree), metadata={"format": "pt"}, max_bytes=max_bytes)


def load(kind: str, path: Path) -> State:
    """Read an export with the library that it is for."""
    if kind == "pt":
        return torch.load(path, weights_only=True)
    paths = [path] if kind == "safetensors" else sorted(path.glob("*.s*s"))
    return {key: part for each in paths for key, part in load_file(each).items()}


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
    assert is_equal(load(kind, path.with_suffix(f".{kind}")), state)


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
    assert is_equal(load(kind, path.with_suffix(f".{kind}")), expected)


def small(value: float = 0.0) -> Weights:
    return Weights({"a": torch.full((2,), value)})


def export_folder(path: Path, weights: Weights) -> None:
    write_folder(path, weights, max_bytes=1 << 30, metadata={})


@pytest.mark.shows("P99")
def test_a_folder_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "out"
    export_folder(path, small(1.0))
    with pytest.raises(ArgumentError, match="exists already"):
        export_folder(path, small(2.0))
    assert load("huggingface", path)["a"].tolist() == [1.0, 1.0]


@pytest.mark.shows("P100")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_folder_is_refused_by_name_and_nothing_is_written(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_network(RunFolder(tmp_path / "run"), make_state())
    part = path / "__1_0.distcp"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 4
    part.write_bytes(data)
    before = names(path.parent)
    assert run(path, kind) == 1
    assert part.name in capsys.readouterr().err
    assert names(path.parent) == before


def load_by_transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    root = Path(sys.argv[1])
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    network = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0))
    tokens, report = torch.arange(16)[None], []
    for form, save in SAVES.items():
        path = save(RunFolder(root / form[1:]), network.state_dict())
        for size in (5 * 10**9, 20_000):
            out = root / form[1:] / str(size)
            export_in_parts(path, out, size)
            network.config.save_pretrained(out)
            loaded, facts = GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
            own, other = network.state_dict(), loaded.state_dict()
            ends = loaded.get_output_embeddings(), loaded.get_input_embeddings()
            logits = [bytes_of(each.eval()(tokens).logits) for each in (network, loaded)]
            found = {
                "files": len(list(out.glob("*.safetensors"))),
                "odd": [str(part) for part in facts.values() if part],
                "bytes": all(bytes_of(own[name]) == bytes_of(other[name]) for name in own),
                "names": list(own) == list(other),
                "tied": ends[0].weight is ends[1].weight,
                "logits": logits[0] == logits[1],
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
    assert len(report) == 4
    for number, found in enumerate(report):
        count = found.pop("files")
        assert (count > 1) == bool(number % 2)
        expected = {"odd": [], "bytes": True, "names": True, "tied": True, "logits": True}
        assert found == expected


def test_adapters_are_refused_with_what_works_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "base_model.model.block.query.lora_A.default.weight"
    state = {"base.weight": torch.ones(2, 2), name: torch.arange(4.0).view(2, 2)}
    path = save_whole(RunFolder(tmp_path), state)
    assert run(path, "huggingface", "--out", tmp_path / "folder") == 2
    said = capsys.readouterr().err
    assert "adapters of PEFT" in said
    assert name in said
    assert not (tmp_path / "folder").exists()
    assert "Use --to safetensors" in said
    assert run(path, "safetensors", "--out", tmp_path / "file") == 0
    assert is_equal(load_file(tmp_path / "file"), state)
