"""A checkpoint with a malicious pickle executes nothing, whoever opens it and however it is packed.

Real ones are put in the place of a run's newest checkpoint, without a sidecar and with a forged one
that is right in every respect. That they are real is shown by opening each of them without care.
"""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import io
import os
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import helios
from helios.checkpoint import file_names, loading
from helios.cli import main
from helios.errors import CheckpointError
from helios.storage.files import digest_file
from tests.checkpoint.helpers import make_payload, make_sidecar
from tests.checkpoint.hostile import Calling
from tests.checkpoint.test_mutations import little_memory
from tests.codebase import PACKAGE
from tests.support.runs import IndexModule, Setting, SmallModel

SETTING = Setting(total_steps=3, chkpt_frequency=1, validates=True)
NEWEST = "small_epoch_1_iter_3.pth"


class Touch:
    """Unpickled without care, this makes a file when its state is set."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, Any]) -> None:
        Path(state["path"]).touch()


class HookedTensor:
    """A tensor that carries something in the place of its hooks."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __reduce__(self) -> Any:
        storage = torch.ones(2)._typed_storage()
        hooks = collections.OrderedDict(hook=self.hook)
        return torch._utils._rebuild_tensor_v2, (storage, 0, (2,), (1,), False, hooks)


EVILS: dict[str, Callable[[str], Any]] = {
    "os.system": lambda mark: Calling(os.system, f"touch '{mark}'"),
    "eval": lambda mark: Calling(builtins.eval, f"__import__('pathlib').Path({mark!r}).touch()"),
    "a class that sets its state": Touch,
    "in a tensor's hooks": lambda mark: HookedTensor(Calling(os.system, f"touch '{mark}'")),
    "a pickle in a pickle": lambda mark: Calling(
        pickle.loads, pickle.dumps(Calling(os.system, f"touch '{mark}'"))
    ),
}


def _zip(path: Path, payload: Any) -> None:
    torch.save(payload, path)


def _legacy(path: Path, payload: Any) -> None:
    torch.save(payload, path, _use_new_zipfile_serialization=False)


def _plain_pickle(path: Path, payload: Any) -> None:
    path.write_bytes(pickle.dumps(payload["model"]["evil"], protocol=2))


def _legacy_tar(path: Path, payload: Any) -> None:
    """The oldest format of torch: a tar of pickles."""
    parts = {
        "sys_info": pickle.dumps({"protocol_version": 1000}, protocol=2),
        "storages": pickle.dumps(0, protocol=2) + pickle.dumps([], protocol=2),
        "tensors": pickle.dumps(0, protocol=2),
        "pickle": pickle.dumps(payload["model"]["evil"], protocol=2),
    }
    with tarfile.open(path, "w") as archive:
        for name, data in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def _script_archive(path: Path, payload: Any) -> None:
    """A zip that torch.load takes for a TorchScript archive, which is code."""
    torch.save(payload, path)
    with zipfile.ZipFile(path, "a") as archive:
        name = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{name}/constants.pkl", pickle.dumps(payload["model"]["evil"], 2))


PACKINGS = {
    "zip": _zip,
    "legacy": _legacy,
    "plain pickle": _plain_pickle,
    "legacy tar": _legacy_tar,
    "script archive": _script_archive,
}
CASES = [("zip", evil) for evil in EVILS]
CASES += [(packing, "os.system") for packing in PACKINGS if packing != "zip"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an honest run of three checkpoints."""
    root = tmp_path_factory.mktemp("honest")
    make_trainer(root, total_steps=3).fit(SmallModel(SETTING), IndexModule(SETTING))
    return root


def make_trainer(root: Path, **options: Any) -> helios.Trainer:
    return helios.Trainer(
        **{"train_unit": "iteration", "total_steps": 5, "chkpt_frequency": 1, **options},
        chkpt_root=root,
        use_cpu=True,
        print_banner=False,
    )


def poison(root: Path, mark: Path, packing: str, evil: str) -> Path:
    """Put a malicious file in the place of the newest checkpoint; without a sidecar."""
    path = root / "small" / NEWEST
    payload = torch.load(path, weights_only=True)
    payload["model"]["evil"] = EVILS[evil](str(mark))
    PACKINGS[packing](path, payload)
    file_names.sidecar_path(path).rename(root / "honest.json")
    return path


def forge_sidecar(path: Path, root: Path) -> None:
    """Give a file a sidecar that is right in every respect."""
    text = (root / "honest.json").read_text()
    honest = loading.Sidecar.from_json(text, name="honest.json")
    forged = dataclasses.replace(honest, digest=digest_file(path))
    file_names.sidecar_path(path).write_text(forged.to_json())


def fit(root: Path, path: Path) -> None:
    make_trainer(root).fit(SmallModel(SETTING), IndexModule(SETTING))


def fit_from_path(root: Path, path: Path) -> None:
    make_trainer(root / "branch", resume=path).fit(SmallModel(SETTING), IndexModule(SETTING))


def evaluate(root: Path, path: Path) -> None:
    make_trainer(root).test(SmallModel(SETTING), IndexModule(SETTING))


def load_checkpoint(root: Path, path: Path) -> None:
    helios.load_checkpoint(path)


def load_model(root: Path, path: Path) -> None:
    helios.load_weights(path, SmallModel(SETTING))


OPENERS = (fit, fit_from_path, evaluate, load_model, load_checkpoint)


def open_carelessly(path: Path, packing: str) -> None:
    """Do what a program does that trusts every file."""
    if packing == "plain pickle":
        pickle.loads(path.read_bytes())
    elif packing == "script archive":
        with zipfile.ZipFile(path) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("constants.pkl")]
            pickle.loads(archive.read(name))
    else:
        torch.load(path, weights_only=False)


@pytest.mark.shows("H26", "S17", "P100")
# Python 3.12 and 3.13 warn of how torch.load extracts a tar file.
@pytest.mark.filterwarnings("ignore:Python 3.14 will, by default, filter:DeprecationWarning")
@pytest.mark.parametrize("is_forged", [False, True], ids=["without sidecar", "forged sidecar"])
@pytest.mark.parametrize(("packing", "evil"), CASES)
def test_a_malicious_checkpoint_executes_nothing_and_is_named(
    run_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    packing: str,
    evil: str,
    is_forged: bool,
) -> None:
    mark = tmp_path / "executed"
    for opener in OPENERS if (packing, evil) == CASES[0] else (fit, load_checkpoint):
        root = tmp_path / opener.__name__
        shutil.copytree(run_folder, root)
        path = poison(root, mark, packing, evil)
        if is_forged:
            forge_sidecar(path, root)
        capsys.readouterr()
        refused = open_it(opener, root, path)
        assert not mark.exists(), opener.__name__
        said = refused or capsys.readouterr().err
        assert NEWEST in said, opener.__name__
        assert "weights_only" not in said, "no advice to switch safety off"
        assert "jit" not in said, "no advice to run it either"
        if not refused:
            # Nothing that Helios wrote: damaged, and the run goes on from an older one.
            assert opener in (fit, evaluate)
            assert "Continuing with the next older checkpoint" in said
            assert not is_forged
    for words in (["inspect"], ["verify"], ["export", "--to", "pt"]):
        main([words[0], str(path), *words[1:]])
        assert not mark.exists(), words
    assert main(["verify", str(path)]) == 1
    open_carelessly(path, packing)
    assert mark.exists(), "it would have done harm"


def open_it(opener: Callable[[Path, Path], None], root: Path, path: Path) -> str:
    """Return the message of what was raised; nothing if the call went on without the file."""
    try:
        opener(root, path)
    except CheckpointError as error:
        return str(error)
    return ""


SIZES = (
    [],
    [("numel", 1 << 36)],
    [("size", 1 << 36)],
    [("offset", 1 << 36)],
    [("numel", 65), ("size", 65)],
)


@pytest.mark.shows("S38")
@pytest.mark.parametrize("changes", SIZES, ids=str)
def test_a_record_that_promises_gigabytes_takes_none(
    tmp_path: Path, changes: list[tuple[str, int]]
) -> None:
    """A small file must neither fill the memory by a number, nor show what is not its own."""
    path = tmp_path / "run_epoch_1_iter_1.pth"
    payload = make_payload(1, 1)
    payload["model"] = {"weight": SizedTensor(dict(changes))}
    torch.save(payload, path)
    forged = dataclasses.replace(make_sidecar(1, 1), digest=digest_file(path))
    file_names.sidecar_path(path).write_text(forged.to_json())
    for maps in (False, True):
        if not changes:
            assert loading.load(path, maps=maps).payload["model"]["weight"].sum() == 64
        else:
            with (
                little_memory(),
                pytest.raises((CheckpointError, MemoryError), match="run_epoch_1_iter_1"),
            ):
                loading.load(path, maps=maps)


class SizedTensor:
    """A tensor of 64 ones that says of itself what it likes."""

    def __init__(self, changes: dict[str, int]) -> None:
        self.changes = changes

    def __reduce__(self) -> Any:
        storage = torch.ones(64)._typed_storage()
        size, stride = self.changes.get("size", 64), self.changes.get("stride", 1)
        if "numel" in self.changes:
            storage.size = lambda: self.changes["numel"]  # type: ignore[method-assign]
            storage._size = lambda: self.changes["numel"]  # type: ignore[method-assign]
        offset = self.changes.get("offset", 0)
        hooks: Any = collections.OrderedDict()
        return torch._utils._rebuild_tensor_v2, (storage, offset, (size,), (stride,), False, hooks)


READERS = {
    *("torch.load", "torch.jit.load", "torch.package.PackageImporter", "pickle.load"),
    *("pickle.loads", "pickle.Unpickler", "shelve.open", "marshal.load", "marshal.loads"),
    *("np.load", "numpy.load", "dill.load", "joblib.load", "cPickle.loads", "copyreg.constructor"),
    *("eval", "exec", "compile"),
}
# Files are read in "storage" and "core"; what else is unpickled comes from the run's own processes.
ALLOWED = {
    "storage/codec.py": {"torch.load"},
    "data/workers.py": {"pickle.loads"},  # what workers of this process send
    "core/utils.py": {"torch.load"},
    "storage/dcp_folder.py": {"torch.load"},
    "distributed/pickling.py": {"pickle.loads", "torch.load"},
    "launch/spawning.py": {"pickle.loads"},
    "replicas/replicas.py": {"pickle.loads"},
}


def find_readers(text: str) -> list[tuple[str, ast.AST]]:
    """Return where a module names something that builds objects or runs code, and what."""
    nodes = list(ast.walk(ast.parse(text)))
    found = [(ast.unparse(n), n) for n in nodes if isinstance(n, ast.Attribute | ast.Name)]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            found += [(f"{node.module}.{alias.name}", node) for alias in node.names]
        if isinstance(node, ast.Import):
            # Under another name its functions would not be seen; NumPy's has a usual one.
            renamed = {alias.name for alias in node.names if alias.asname not in (None, "np")}
            found += [(f"{name}.load", node) for name in renamed]
    return [(name, node) for name, node in found if name in READERS]


@pytest.mark.shows("S17", "U10")
def test_files_are_opened_by_weights_only_and_in_few_places() -> None:
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, _ in find_readers(path.read_text("utf-8")):
            found.setdefault(str(path.relative_to(PACKAGE)), set()).add(name)
    assert found == ALLOWED
    for place in ("storage/codec.py", "storage/dcp_folder.py", "core/utils.py"):
        for call in ast.walk(ast.parse((PACKAGE / place).read_text("utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "torch.load":
                options = {k.arg: ast.unparse(k.value) for k in call.keywords}
                assert options["weights_only"] == "True", f"{place}:{call.lineno}"


def test_safe_torch_load_cannot_be_talked_into_trust(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    torch.save([EVILS["os.system"](str(mark))], tmp_path / "evil.pth")
    with pytest.raises(pickle.UnpicklingError):
        helios.core.safe_torch_load(tmp_path / "evil.pth")
    with pytest.raises(TypeError):
        helios.core.safe_torch_load(tmp_path / "evil.pth", weights_only=False)
    assert not mark.exists()
