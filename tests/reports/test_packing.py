"""Archives of runs: the same bytes each time, verifiable, and without names if asked for."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helios.cli import main
from helios.errors import LedgerError
from helios.ledger import lineage, pack, verify
from helios.ledger.lineage import Lineage
from helios.ledger.manifest_file import Manifest, Section, read_manifest
from helios.reports.checklist import command_text
from helios.reports.packing import Anonymizer, Pack, check_anonymous, make_anonymizer
from tests.support.runs import Setting, train
from tests.support.synthetic_run import write_ledger, write_run

HOST, USER, AUTHOR = "wolke7.lab.example", "adalove", "Ada von Lovelace"
REMOTE = "git.example.org/secret-group/project"


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a run that a person with a name has trained in a repository at home."""
    home = tmp_path_factory.mktemp("homes") / USER
    project = home / "my project"
    project.mkdir(parents=True)
    script = project / "helper_of_pack.py"
    script.write_text(f"# {USER} wrote this on Wolke7\nDATA = '{home}/harvest of 1843/part 1'\n")
    git = ["git", "-c", "init.defaultBranch=paper-of-ada", "-C", str(project)]
    identity = ["-c", f"user.name={AUTHOR}", "-c", "user.email=ada@lovelace.example"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HOME": home, "LOGNAME": USER, "GIT_CONFIG_NOSYSTEM": 1}.items():
            patch.setenv(name, str(value))
        patch.setattr("socket.gethostname", lambda: HOST)
        patch.setattr(sys, "argv", [str(script), "--data", f"{home}/data", f"--name={USER}"])
        patch.chdir(project)
        for words in (
            ["init", "-q"],
            ["remote", "add", "origin", f"https://{REMOTE}"],
            ["config", "user.name", AUTHOR],
            ["add", "."],
            [*identity, "commit", "-qm", "first"],
        ):
            subprocess.run([*git, *words], check=True)
        script.write_text(script.read_text() + f"# by {AUTHOR}\n")
        spec = importlib.util.spec_from_file_location("helper_of_pack", script)
        assert spec is not None
        with pytest.MonkeyPatch.context() as modules:
            # The run is one of the script; modules of tests would be packed, too.
            modules.setitem(sys.modules, "__main__", importlib.util.module_from_spec(spec))
            for name in [name for name in sys.modules if name.startswith("tests.")]:
                if not name.startswith("tests.support"):
                    modules.delitem(sys.modules, name)
            train(home / "runs", Setting(total_steps=4, chkpt_frequency=2))
        text = "0.5 on rank 0 (wolke7, cpu), then 0.25 on rank 1 (rosenhain, cpu)"
        lines = Lineage(home / "runs" / "small")
        lines.add(lineage.MISMATCH, cause=text, hosts=["wolke7", "rosenhain"])
        yield home / "runs" / "small"


def _pack(run: Path, target: Path, *options: str) -> dict[str, bytes]:
    """Pack a run, and return the files of the archive."""
    assert main(["pack", str(run), "--out", str(target), *options]) == 0
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
        return {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}


@pytest.mark.shows("P47")
def test_an_archive_holds_the_evidence_and_its_digests(named: Path, tmp_path: Path) -> None:
    found = _pack(named, tmp_path / "a.zip")
    for name in ("ledger.jsonl", "run.json", "lineage.jsonl", "timing.jsonl"):
        expected = (named / name).read_bytes()
        assert found[name] == expected or json.loads(found[name]) == json.loads(expected)
    assert (
        found["code/helper_of_pack.py"]
        == (named.parents[1] / "my project" / "helper_of_pack.py").read_bytes()
    )
    assert b"+# by Ada von Lovelace" in found["patch.diff"]
    sums = dict(line.split("  ")[::-1] for line in found["SHA256SUMS"].decode().splitlines())
    assert sums == {
        name: hashlib.sha256(data).hexdigest()
        for name, data in found.items()
        if name != "SHA256SUMS"
    }
    readme = found["README.md"].decode()
    assert verify(named).hash in readme
    assert "sha256sum -c SHA256SUMS" in readme
    assert REMOTE in readme
    assert "The weights are those of small_epoch_1_iter_4.pth (sha256:" in readme


def test_the_weights_are_those_of_the_newest_checkpoint(named: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(_pack(named, tmp_path / "a.zip")["weights.pt"])
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    checkpoint = named / "small_epoch_1_iter_4.pth"
    expected = torch.load(checkpoint, weights_only=True)["model"]["objects"]["net"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.shows("P47")
def test_the_function_packs_what_the_command_does(named: Path, tmp_path: Path) -> None:
    expected = _pack(named, tmp_path / "a.zip", "--anonymous")
    weights = tmp_path / "w.pt"
    weights.write_bytes(expected["weights.pt"])
    notes = [line[2:] for line in expected["README.md"].decode().splitlines() if "- The w" in line]
    pack(named, tmp_path / "b.zip", weights=weights, notes=notes, is_anonymous=True)
    assert (tmp_path / "b.zip").read_bytes() == (tmp_path / "a.zip").read_bytes()
    found = pack(named, tmp_path / "c.zip")
    assert found.digests.keys() == {*expected, "patch.diff"} - {"weights.pt", "SHA256SUMS"}


@pytest.mark.shows("P47")
@pytest.mark.parametrize("options", [[], ["--anonymous"]], ids=str)
def test_packing_twice_gives_the_same_bytes(
    options: list[str], named: Path, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        _pack(named, tmp_path / f"{name}.zip", *options)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


@pytest.mark.shows("P48")
def test_an_anonymous_archive_names_nobody_and_can_be_verified(named: Path, tmp_path: Path) -> None:
    found = _pack(named, tmp_path / "a.zip", "--anonymous")
    home = str(named.parents[1])
    secrets = [HOST, "wolke7", USER, AUTHOR, home, REMOTE, "secret-group"]
    secrets += ["paper-of-ada", "lovelace", "my project", "harvest of 1843", "rosenhain"]
    manifest = read_manifest(named)
    assert manifest is not None
    secrets.append(manifest.sections[0].facts["git"]["commit"])
    plain = _pack(named, tmp_path / "b.zip")
    whole = b"\n".join(plain.values()).lower()
    for secret in secrets:
        assert secret.lower().encode() in whole, secret
        for name, data in found.items():
            assert secret.lower().encode() not in data.lower(), (secret, name)
    assert not re.search(rb"[\"' ]/(?!usr|dev|proc|sys|etc|bin)\w+/", b"\n".join(found.values()))
    assert b'"remote"' in plain["run.json"]
    assert b'"remote"' not in found["run.json"], "not even with another owner"
    assert found["ledger.jsonl"] == (named / "ledger.jsonl").read_bytes()
    folder = tmp_path / "unpacked"
    folder.mkdir()
    for name in ("ledger.jsonl", "run.json", "lineage.jsonl"):
        (folder / name).write_bytes(found[name])
    assert verify(folder).hash == verify(named).hash
    assert read_manifest(folder) is not None
    assert main(["diff", str(folder), str(named)]) == 0
    assert "The archive is anonymous" in found["README.md"].decode()


@pytest.mark.shows("P47")
def test_source_files_that_have_changed_are_left_out(
    named: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = named.parents[1] / "my project" / "helper_of_pack.py"
    text = script.read_text()
    try:
        script.write_text(text + "x = 1\n")
        found = _pack(named, tmp_path / "a.zip")
    finally:
        script.write_text(text)
    assert "code/helper_of_pack.py" not in found
    assert "The source file helper_of_pack.py is missing" in capsys.readouterr().out
    assert "The source file helper_of_pack.py is missing" in found["README.md"].decode()


def _write_project(tmp_path: Path, sources: dict[str, str], **command: str) -> Path:
    """Write a run of the script train.py, and the sources of modules beside it."""
    project = tmp_path / "project"
    project.mkdir(parents=True)
    code = {}
    for module, text in sources.items():
        file = command.get("script", "train.py") if module == "__main__" else f"{module}.py"
        (project / file).write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        code[module] = {"file": file, "text": digest}
    facts = {"script": "train.py", "arguments": [], "folder": str(project), **command}
    return write_run(tmp_path / "run", {"command": facts, "code": code}, scores={})


@pytest.mark.parametrize("options", [[], ["--anonymous"]], ids=str)
def test_secrets_in_source_files_are_replaced(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = {"__main__": "API_KEY = 'q7Zp3kVw9Xt2Lm5R'\n", "plain": "x = 1\n"}
    run = _write_project(tmp_path, sources)
    found = _pack(run, tmp_path / "a.zip", *options)
    assert found["code/train.py"] == b"API_KEY = '***'\n"
    assert found["code/plain.py"] == b"x = 1\n"
    note = (
        "code/train.py: what looks like a secret was replaced, so its hash differs from run.json."
    )
    assert note in found["README.md"].decode()
    assert note in capsys.readouterr().out
    assert "code/plain.py: what" not in found["README.md"].decode()


@pytest.mark.parametrize("script", ["train-1.2.py", "my script.py"])
def test_a_script_may_have_any_name(script: str, tmp_path: Path) -> None:
    run = _write_project(tmp_path, {"__main__": "x = 1\n"}, script=script)
    found = _pack(run, tmp_path / "a.zip")
    assert found[f"code/{script}"] == b"x = 1\n"
    assert f"code/{script}" in found["README.md"].decode()


def test_source_files_are_found_after_a_change_of_the_folder(tmp_path: Path) -> None:
    folders = {"folder": str(tmp_path), "script_folder": str(tmp_path / "project")}
    run = _write_project(tmp_path, {"__main__": "x = 1\n"}, **folders)
    assert _pack(run, tmp_path / "a.zip")["code/train.py"] == b"x = 1\n"
    hidden = _pack(run, tmp_path / "b.zip", "--anonymous")["run.json"]
    assert b"folder" not in hidden
    assert b"project" not in hidden


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ({"script": "a b.py", "arguments": ["--x"]}, "python 'a b.py' --x"),
        (
            {"script": "/x/tools/train.py", "module": "tools.train", "arguments": ["--x"]},
            "python -m tools.train --x",
        ),
        ({"script": "-c", "arguments": []}, None),
        ({"script": "", "arguments": []}, None),
        ({"script": "/x/ipykernel_launcher.py", "arguments": ["-f", "k.json"]}, None),
        ({}, None),
    ],
)
def test_the_command_is_one_that_can_be_typed(
    command: dict[str, object], expected: str | None
) -> None:
    assert command_text({"command": command}) == expected


@pytest.mark.shows("P58")
@pytest.mark.parametrize(
    ("command", "number", "expected"),
    [
        ({"optimize": 2}, 1, "python -OO train.py"),
        ({"launcher": "torchrun", "processes_here": 4}, 4, "torchrun --nproc-per-node=4 train.py"),
        (
            {"launcher": "torchrun", "processes_here": 4, "module": "tools.train"},
            8,
            "torchrun --nnodes=2 --nproc-per-node=4 -m tools.train",
        ),
        ({"launcher": "srun", "processes_here": 4}, 8, "srun --ntasks=8 python train.py"),
        ({}, 8, "python train.py"),
    ],
)
def test_the_command_names_what_has_started_the_processes(
    command: dict[str, object], number: int, expected: str
) -> None:
    facts = {"command": {"script": "train.py", **command}, "processes": {"number": number}}
    assert command_text(facts) == expected


def test_an_archive_without_a_command_names_none(tmp_path: Path) -> None:
    run = _write_project(tmp_path, {}, script="-c")
    readme = _pack(run, tmp_path / "a.zip")["README.md"].decode()
    assert "python" not in readme
    assert "None" not in readme


@pytest.mark.parametrize(
    ("module", "file", "expected"),
    [
        ("tools.train", "train.py", "code/tools/train.py"),
        ("tools", "__main__.py", "code/tools/__main__.py"),
        ("tools.__main__", "__main__.py", "code/tools/__main__.py"),
    ],
)
def test_a_module_that_was_run_keeps_its_place(
    module: str, file: str, expected: str, tmp_path: Path
) -> None:
    run = _write_project(tmp_path, {"__main__": "x = 1\n"}, script=file, module=module)
    found = _pack(run, tmp_path / "a.zip")
    assert found[expected] == b"x = 1\n"
    assert f"\nPYTHONPATH=code python -m {module}\n" in found["README.md"].decode()


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ledger(tmp_path / "run", [1.0])
    found = _pack(tmp_path / "run", tmp_path / "a.zip")
    assert set(found) == {"README.md", "SHA256SUMS", "ledger.jsonl"}
    assert "There is no checkpoint, so there are no weights." in found["README.md"].decode()
    assert "There is no manifest" in capsys.readouterr().out


@pytest.mark.shows("P48")
def test_a_name_in_the_ledger_refuses_an_anonymous_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOGNAME", USER)
    write_ledger(tmp_path / "run", [1.0], names=[f"loss_of_{USER}"])
    words = ["pack", str(tmp_path / "run"), "--anonymous", "--out", str(tmp_path / "a.zip")]
    assert main(words) == 2
    assert f"ledger.jsonl holds the name '{USER}'" in capsys.readouterr().err
    assert not (tmp_path / "a.zip").exists()


def test_a_folder_without_evidence_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", str(tmp_path)]) == 2
    assert "Pass the folder of a run." in capsys.readouterr().err


@pytest.mark.shows("P48")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("open('/scratch/lab/x.csv')", "open('<path>/x.csv')"),
        ("open('/scratch/my lab/x.csv')", "open('<path>/x.csv')"),
        ("to /known place/lab/a/b.csv", "to <path>/b.csv"),
        ('"/known place/lab/my lab/b.csv"', '"<path>/b.csv"'),
        ("at /data/lab/, twice", "at <path>/, twice"),
        (r"C:\Users\ada\x.csv", r"<path>/x.csv"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("#!/usr/bin/env python", "#!/usr/bin/env python"),
        ("a/b/c and ../x/y", "a/b/c and ../x/y"),
        ("x = (a + b)/c/d", "x = (a + b)/c/d"),
        ("--- a/code/x.py", "--- a/code/x.py"),
        ("adalove_tools ADALOVE AdaloveNet", "anonymous_tools anonymous anonymousNet"),
        ("eve eve_tools Eve never", "anonymous anonymous_tools anonymous never"),
        ("the root of it", "the root of it"),
        ("at file:///media/lab/x.csv, twice", "at <path>/x.csv, twice"),
        ("s3://lab-bucket/x", "<path>/x"),
        ("gs://lab-bucket", "<path>/"),
        ("hdfs://node:9000/lab/x y", "<path>/x y"),
        ("ssh://git@lab.example/lab/x.git", "<path>/x.git"),
        ("'s3://lab/my lab/x'", "'<path>/x'"),
        ("a:/media/lab/y", "a:<path>/y"),
        ("PATH=/media/lab/x:/media/lab/y", "PATH=<path>/x:<path>/y"),
        ("http://localhost:8080/a/b", "http://localhost:8080/a/b"),
        ("prefix = f's3://{bucket}'", "prefix = f's3://{bucket}'"),
    ],
)
def test_texts_lose_names_and_paths_only(text: str, expected: str) -> None:
    assert Anonymizer([USER, "eve", "root"], ["/", "/known place/lab"]).replace(text) == expected


@pytest.mark.parametrize(
    "remote",
    [
        "https://example.org/smithlab/project.git",
        "git@example.org:smithlab/project.git",
        "ssh://git@example.org/git/smithlab/project/",
    ],
)
def test_the_owner_of_the_repository_is_replaced(remote: str) -> None:
    manifest = Manifest("00", [Section({}, {"git": {"remote": remote}})])
    found = make_anonymizer(manifest, [])
    assert found.replace("smithlab git project") == "anonymous git project"


def test_a_local_repository_has_no_owner() -> None:
    for remote in ("/srv/weights/project", "file:///srv/weights/x", "host:/srv/weights/x"):
        manifest = Manifest("00", [Section({}, {"git": {"remote": remote}})])
        assert make_anonymizer(manifest, []).replace("weights") == "weights"


def test_source_files_lose_names_in_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOGNAME", USER)
    sources = {"__main__": f"import {USER}_utils\n", f"{USER}_utils": "x = 1\n"}
    run = _write_project(tmp_path / "a", sources)
    found = _pack(run, tmp_path / "a.zip", "--anonymous")
    assert found["code/train.py"] == b"import anonymous_utils\n"
    assert found["code/anonymous_utils.py"] == b"x = 1\n"
    assert not any(USER.encode() in data for data in found.values())
    run = _write_project(tmp_path / "b", {**sources, "anonymous_utils": "x = 2\n"})
    target = tmp_path / "b.zip"
    assert main(["pack", str(run), "--anonymous", "--out", str(target)]) == 2
    assert "would both be code/anonymous_utils.py" in capsys.readouterr().err
    assert not target.exists()


def test_the_command_of_an_anonymous_archive_names_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "trainer")
    text = "x = 1\n"
    run = _write_project(tmp_path, {"__main__": text})
    found = _pack(run, tmp_path / "a.zip", "--anonymous")
    assert found["code/train.py"].decode() == text
    assert "\npython code/train.py\n" in found["README.md"].decode()
    monkeypatch.setenv("LOGNAME", "train")
    found = _pack(run, tmp_path / "b.zip", "--anonymous")
    assert "\npython code/anonymous.py\n" in found["README.md"].decode()


def test_names_are_found_in_weights(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(b"\x00\xff" + USER.encode() + b".weight\x00")
    with pytest.raises(LedgerError, match="holds the name"):
        check_anonymous(Pack("x", paths={"weights.pt": path}), Anonymizer([USER], []))
