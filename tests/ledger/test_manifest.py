"""Manifests: what they hold, how sections are stored, and what a difference means."""

from __future__ import annotations

import _posixsubprocess
import copy
import functools
import json
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helios.errors import LedgerError
from helios.ledger.environment import (
    describe_environment,
    describe_switches,
    describe_variables,
    driver_version,
    find_distributions,
    find_imported,
)
from helios.ledger.manifest_file import (
    FILE_NAME,
    Effect,
    Manifest,
    Section,
    apply_patch,
    compare_facts,
    make_patch,
    read_manifest,
    write_manifest,
)
from helios.ledger.source_files import describe_git, hash_absent, hash_statements, hash_texts
from tests.support.kills import run_in_child

FACTS: dict[str, Any] = {
    "command": {"script": "train.py", "arguments": ["--lr", "1"]},
    "options": {"clip_norm": 1.0, "total_steps": 10},
    "versions": {"python": "3.11", "python_build": "3.11.7", "torch": "2.6"},
    "libraries": {"numpy": "2.1", "pytest": "8.0"},
    "imported": ["numpy"],
    "system": {"cpu": "A", "kernel": "6.1"},
    "environment": {"OMP_NUM_THREADS": "2"},
    "switches": {"threads": 2},
    "data": {"num_workers": 0, "fingerprint": "a"},
    "code": {"net": {"file": "net.py", "text": "t", "code": "c"}},
}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"a": 1}),
        ({"a": 1}, {}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": 3}),
        ({"a": 3}, {"a": {"b": 1}}),
        ({"a": {"b": {"c": [1, 2]}}}, {"a": {"b": {"c": [1]}}}),
        ({"a": 1}, {"a": True}),
        ({"a": {}}, {"a": {}}),
    ],
)
def test_a_patch_makes_the_second_of_the_first(before: Any, after: Any) -> None:
    kept = copy.deepcopy(before)
    patch = make_patch(before, after)
    found = apply_patch(before, patch)
    assert json.dumps(found) == json.dumps(after)
    assert before == kept


def test_later_sections_hold_only_what_has_changed(tmp_path: Path) -> None:
    changed = {**FACTS, "options": {"clip_norm": 1.0, "total_steps": 20}}
    manifest = Manifest(
        "run", [Section({"iteration": i}, f) for i, f in enumerate((FACTS, changed))]
    )
    write_manifest(tmp_path, manifest)
    stored = json.loads((tmp_path / FILE_NAME).read_text())
    assert stored["sections"][1] == {
        "start": {"iteration": 1},
        "changed": {"options": {"total_steps": 20}},
    }
    assert read_manifest(tmp_path) == manifest


def test_without_a_file_there_is_no_manifest(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3"),
        '{"manifest": 1}',
        '{"manifest": 1, "run": "", "sections": []}',
        '{"manifest": 1, "run": "", "sections": [{"start": "x", "facts": {}}]}',
        '{"manifest": 1, "run": "", "sections": [{"start": {}, "facts": {"versions": 5}}]}',
        '{"manifest": 1, "run": "", "sections": [{"start": {}, "facts": {"imported": 5}}]}',
        '{"manifest": 1, "run": "", "sections": [{"start": {}, "facts": {"code": {"a": {}}}}]}',
    ],
)
def test_a_damaged_manifest_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(LedgerError, match="damaged"):
        read_manifest(tmp_path)


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('{"manifest": 2, "sections": []}')
    with pytest.raises(LedgerError, match="version 2"):
        read_manifest(tmp_path)


@pytest.mark.shows("P24")
@pytest.mark.parametrize(
    ("place", "value", "effect"),
    [
        ("command.arguments", ["--lr", "2"], Effect.TRAJECTORY),
        ("command.script", "/elsewhere/train.py", Effect.NONE),
        ("command.words", ["python", "train.py"], Effect.NONE),
        ("command.launcher", "torchrun", Effect.NONE),
        ("command.optimize", 1, Effect.TRAJECTORY),
        ("options.clip_norm", 2.0, Effect.TRAJECTORY),
        ("options.total_steps", 20, Effect.NONE),
        ("versions.python", "3.12", Effect.TRAJECTORY),
        ("versions.python_build", "3.11.8", Effect.NONE),
        ("versions.torch", "2.7", Effect.TRAJECTORY),
        ("libraries.numpy", "2.2", Effect.TRAJECTORY),
        ("libraries.pytest", "9.0", Effect.NONE),
        ("system.cpu", "B", Effect.ROUNDING),
        ("system.kernel", "6.2", Effect.NONE),
        ("environment.OMP_NUM_THREADS", "4", Effect.NONE),
        ("environment.MKL_CBWR", "AVX", Effect.ROUNDING),
        ("environment.PYTHONHASHSEED", "1", Effect.TRAJECTORY),
        ("switches.threads", 1, Effect.ROUNDING),
        # Another version of PyTorch has other settings.
        ("switches.fp32_precision", "none", Effect.NONE),
        ("gpu.devices", ["H100"], Effect.ROUNDING),
        ("seeds.random_seed", 3, Effect.TRAJECTORY),
        ("data.num_workers", 2, Effect.NONE),
        ("data.fingerprint", "b", Effect.TRAJECTORY),
        ("data.class", "stated only now", Effect.NONE),
        ("a topic of later versions.a", 3, Effect.TRAJECTORY),
    ],
)
def test_a_difference_is_classed(place: str, value: Any, effect: Effect) -> None:
    topic, name = place.split(".")
    after = {**FACTS, topic: {**FACTS.get(topic, {}), name: value}}
    (change,) = compare_facts(FACTS, after)
    assert (change.name, change.effect, change.after) == (place, effect, value)
    assert change.reason
    assert change.topic == topic
    (back,) = compare_facts(after, FACTS)
    assert back.before == value
    assert back.effect is effect or name == "class"


@pytest.mark.shows("P24")
@pytest.mark.parametrize(
    ("code", "effect"),
    [
        ({"net": {"file": "net.py", "text": "u", "code": "c"}}, Effect.NONE),
        ({"net": {"file": "net.py", "text": "u", "code": "d"}}, Effect.TRAJECTORY),
        ({"net": {"file": "net.py", "text": "u"}}, Effect.TRAJECTORY),
        ({}, Effect.TRAJECTORY),
        ({**FACTS["code"], "more": {"file": "more.py", "text": "m", "code": "m"}}, Effect.NONE),
    ],
    ids=["comment", "statement", "unparsed", "gone", "more"],
)
def test_code_is_compared_by_its_syntax_tree(code: Any, effect: Effect) -> None:
    (change,) = compare_facts(FACTS, {**FACTS, "code": code})
    assert change.effect is effect


def test_a_moved_file_with_the_same_text_is_no_difference() -> None:
    code = {"net": {"file": "src/net.py", "text": "t", "code": "c"}}
    assert compare_facts(FACTS, {**FACTS, "code": code, "imported": []}) == []


def test_the_strongest_effect_comes_first() -> None:
    after = {**FACTS, "system": {"cpu": "B", "kernel": "7"}, "options": {}}
    effects = [change.effect for change in compare_facts(FACTS, after)]
    assert effects == sorted(effects, key=lambda effect: -effect.strength)
    assert len(set(effects)) == 3


def _import(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    path.write_text(text)
    # The size tells the texts apart where the clock of the disk is too coarse.
    module = types.ModuleType("a_module_of_the_test")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "a_module_of_the_test", module)
    modules = {"a_module_of_the_test": module}
    return _hash(modules)["a_module_of_the_test"]


def _hash(modules: dict[str, Any], known: Any = None) -> dict[str, dict[str, str]]:
    return hash_statements(modules, hash_texts(modules), known or {}, lambda seconds: None)


def test_comments_and_docstrings_change_the_text_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = "class A:\n    def f(self, x):\n        return x + 1\n"
    path = tmp_path / "net.py"
    first = _import(path, plain, monkeypatch)
    other = '"""Text."""\nclass A:\n    """A."""\n    def f(self, x):\n        "f"\n        # why\n'
    told = _import(path, f"{other}        return (x + 1)\n", monkeypatch)
    assert told["text"] != first["text"]
    assert told["code"] == first["code"]
    changed = _import(path, plain.replace("1", "12"), monkeypatch)
    assert changed["code"] != first["code"]


_BLOCKS = """
if a:
    class A:
        {0}
        def f(): {0}; return 1
else:
    async def f():
        {0}
        return 1
try:
    for x in a:
        def f(): {0}; return 1
    else:
        while a:
            def f(): {0}; return 1
except E:
    with a:
        def f(): {0}; return 1
finally:
    match a:
        case 1:
            def f():
                {0}
                return lambda: "a"
"""


def test_docstrings_in_blocks_of_all_kinds_change_the_text_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _import(tmp_path / "net.py", _BLOCKS.format('"a text"'), monkeypatch)
    other = _import(tmp_path / "net.py", _BLOCKS.format('"another text"'), monkeypatch)
    assert first["text"] != other["text"]
    assert first["code"] == other["code"]
    text = _BLOCKS.format('"a text"').replace('lambda: "a"', 'lambda: "b"')
    assert _import(tmp_path / "net.py", text, monkeypatch)["code"] != first["code"]


def test_a_source_that_cannot_be_parsed_has_the_hash_of_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(_import(tmp_path / "net.py", "class (", monkeypatch)) == {"file", "text"}


def test_a_source_that_is_too_deep_or_too_long_has_the_hash_of_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("deep", "x = " + " + ".join(['"a"'] * 3000)), ("long", "x = 1\n" * 40_000)):
        assert set(_import(tmp_path / f"{name}.py", text, monkeypatch)) == {"file", "text"}


def test_a_module_that_is_not_imported_yet_is_compared_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "late.py"
    before = {"a_module_of_the_test": _import(path, "x = 1\n", monkeypatch)}
    assert hash_absent(before, {}, {}) == hash_absent(before, {}, before) == before
    assert hash_absent(before, before, {}) == {}
    known = {name: {**entry, "code": "known"} for name, entry in before.items()}
    assert hash_absent(before, {}, known) == known
    path.write_text("x = 22\n")
    for earlier in ({}, known):
        found = hash_absent(before, {}, earlier)["a_module_of_the_test"]
        assert found["text"] != before["a_module_of_the_test"]["text"]
        assert found["code"] not in ("known", before["a_module_of_the_test"]["code"])
    path.unlink()
    assert hash_absent(before, {}, known) == {}


def test_modules_that_change_after_a_start_are_seen_by_the_next(tmp_path: Path) -> None:
    modules = dict(sys.modules)
    first = hash_texts(modules)
    for name in ("one.py", "other.py"):
        (tmp_path / name).write_text(f"x = {name!r}\n")
        module = types.ModuleType("a_module_of_the_test")
        module.__file__ = str(tmp_path / name)
        modules["a_module_of_the_test"] = module
        found = hash_texts(modules)
        assert found.keys() - first.keys() == {"a_module_of_the_test"}
        assert found["a_module_of_the_test"]["file"].endswith(name)
    del modules["a_module_of_the_test"]
    assert hash_texts(modules) == first


def _set(name: str, value: str) -> None:
    *path, last = name.split(".")
    setattr(functools.reduce(getattr, path, torch.backends), last, value)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="older PyTorch")
@pytest.mark.parametrize(
    "setting",
    [
        functools.partial(_set, "cuda.matmul.fp32_precision", "tf32"),
        functools.partial(_set, "fp32_precision", "tf32"),
        functools.partial(_set, "cudnn.rnn.fp32_precision", "ieee"),
        functools.partial(_set, "mkldnn.matmul.fp32_precision", "bf16"),
        functools.partial(torch.set_default_device, "meta"),
    ],
    ids=lambda setting: setting.args[0],
)
def test_settings_by_their_new_names_stop_nothing(
    setting: Callable[[], None], tmp_path: Path
) -> None:
    def describe() -> dict[str, Any]:
        setting()
        return describe_switches()

    # A setting of the whole process, which cannot be taken back.
    assert run_in_child(describe, tmp_path / "found") == 0
    found = pickle.loads((tmp_path / "found").read_bytes())
    assert found["default_dtype"] == "torch.float32"


def test_installed_packages_and_the_standard_library_are_no_sources() -> None:
    found = hash_texts(sys.modules.copy())
    assert __name__ in found
    assert not {"torch", "numpy", "json", "helios", "helios.trainer"} & set(found)


def test_installed_distributions_are_found_with_their_versions() -> None:
    from importlib import metadata

    found = find_distributions(tuple(sys.path))
    assert found["torch"] == metadata.version("torch")
    assert found["numpy"] == metadata.version("numpy")
    imported = find_imported(tuple(sys.path), sys.modules.copy())
    assert {"torch", "numpy", "pytest"} <= set(imported) <= set(found)


def test_a_module_of_another_name_belongs_to_its_distribution(tmp_path: Path) -> None:
    for name, file, text in (
        ("Pil.Low-11.0.dist-info", "RECORD", "json/__init__.py,sha256=x,1\nPilLow.libs/a,,\n"),
        ("py_yaml-6.0.dist-info", "top_level.txt", "sys\n"),
        ("absent-1.0.dist-info", "RECORD", "no_such_module.py,,\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    folders = (str(tmp_path), str(tmp_path / "missing"))
    assert find_distributions(folders) == {"absent": "1.0", "pil-low": "11.0", "py-yaml": "6.0"}
    assert find_imported(folders, sys.modules.copy()) == ["pil-low", "py-yaml"]


def test_only_variables_that_may_change_numbers_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MKL_CBWR", "HF_TOKEN", "CUDA_HOME", "TORCH_NCCL_KEY", "PYTHONHASHSEED"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCH_MIRROR", "https://me:horse@example.com")
    found = describe_variables()
    assert found["TORCH_MIRROR"] == "https://***@example.com"
    assert {"MKL_CBWR", "PYTHONHASHSEED"} <= set(found)
    assert not {"HF_TOKEN", "CUDA_HOME", "TORCH_NCCL_KEY", "PATH"} & set(found)


def test_everything_is_a_plain_value_and_nothing_is_none() -> None:
    text = json.dumps(describe_environment(sys.modules.copy()) | {"switches": describe_switches()})
    assert "null" not in text


def _git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=trunk")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    _git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("lr = 1\n")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_clean_repository_has_a_commit_and_no_patch(repository: Path) -> None:
    _git(repository, "remote", "add", "origin", "https://me:secret@example.com/a.git")
    found = describe_git(repository)
    assert len(found.pop("commit")) == 40
    assert found == {
        "is_dirty": False,
        "branch": "trunk",
        "remote": "https://***@example.com/a.git",
    }


@pytest.mark.shows("P23")
def test_what_is_not_committed_is_in_the_patch_without_secrets(repository: Path) -> None:
    (repository / "train.py").write_text("lr = 2\napi_key = 'abcdefgh12345678'\n")
    found = describe_git(repository)
    assert found["is_dirty"]
    assert not found["is_cut"]
    assert "-lr = 1\n+lr = 2\n" in found["patch"]
    assert "abcdefgh" not in found["patch"]
    (repository / "train.py").write_text("lr = 3\n")
    assert describe_git(repository)["patch_hash"] != found["patch_hash"]


def test_a_long_patch_is_cut(repository: Path) -> None:
    (repository / "train.py").write_text("x = 1\n" * 20_000)
    found = describe_git(repository)
    assert found["is_cut"]
    assert len(found["patch"]) == 50_000


def test_programs_that_a_repository_configures_are_not_run(repository: Path) -> None:
    trap = repository / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {repository / 'caught'}\n")
    trap.chmod(0o755)
    (repository / ".gitattributes").write_text("*.py diff=trap filter=trap\n")
    for name in ("core.fsmonitor", "diff.trap.textconv", "diff.external"):
        _git(repository, "config", name, str(trap))
    (repository / "train.py").write_text("lr = 2\n")
    assert "+lr = 2" in describe_git(repository)["patch"]
    assert not (repository / "caught").exists()


def test_without_a_repository_or_a_commit_there_is_less_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe_git(tmp_path) == {}
    _git(tmp_path, "init", "-q")
    assert describe_git(tmp_path) == {"is_dirty": False, "branch": "trunk"}
    monkeypatch.setenv("PATH", "")
    assert describe_git(tmp_path) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="Python starts programs by posix_spawn there")
def test_git_is_started_without_a_pipe_that_a_forked_worker_would_keep_open(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork(*arguments: Any) -> int:
        raise AssertionError("the training would wait for the end of a worker")

    for module in (subprocess, _posixsubprocess):
        names = [name for name in ("_fork_exec", "fork_exec") if name in vars(module)]
        for name in names:
            monkeypatch.setattr(module, name, fork)
    assert describe_git(repository)["is_dirty"] is False


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
            "GCC version:  gcc version 13.3.0 (GCC)\n",
            "580.159.04",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54  Tue\n", "535.54"),
        ("something else\nand more\n", "something else"),
        ("", ""),
    ],
)
def test_the_driver_is_named_by_its_number(text: str, version: str) -> None:
    assert driver_version(text) == version
