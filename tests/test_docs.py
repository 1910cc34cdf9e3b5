"""The Python of the README and the docs runs, each page from top to bottom."""

from __future__ import annotations

import graphlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import helios
from helios.checkpoint.file_names import SCHEMA
from helios.checkpoint.record import KEYS
from helios.storage.content_hash import fingerprint
from tests.support.kills import KillAt, run_in_child
from tests.support.pages import OF_STATE, SHOWN, check_printed, shown_commands
from tests.support.scripts import call, run_as_python
from tests.support.warned import collect_warnings

_ROOT = Path(__file__).resolve().parent.parent
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
_COMPILED = _ROOT / "docs" / "recipes" / "compile.md"
_REPLAY = _ROOT / "docs" / "recipes" / "reinforcement-learning.md"
_SHOWN = [_ROOT / "docs" / page for page in SHOWN]
_PRINTED = {
    _ROOT / "README.md": ("mse_loss", "100"),
    _ROOT / "docs" / "start.md": ("cross_entropy", "1000"),
    _ROOT / "docs" / "recipes" / "command-line.md": (),
    _ROOT / "docs" / "recipes" / "hydra.md": ("mse_loss", "10"),
}
"""The pages that show commands with what they print; Ctrl-C comes at that call of a function."""
_RECIPES = [
    page
    for page in _PAGES
    if page.parent.name == "recipes"
    and "Trainer(" in page.read_text()
    and page not in (*_SHOWN, *_PRINTED)
]
_BARS = "tqdm.tqdm.monitor_interval"
"""Seconds; 0 starts no thread, which the bars of `datasets` would leave behind."""
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FOR_US = r"For those who (begin to )?work on Helios\. "
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def _name(page: Path) -> str:
    return page.relative_to(_ROOT).as_posix()


def _write_script(page: Path, folder: Path) -> Path:
    """Write the Python of a page into a file; empty where it has none."""
    script = folder / "page.py"
    script.write_text("\n".join(_BLOCK.findall(page.read_text())))
    return script


_with_graphs = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script:DeprecationWarning",
    "ignore:.*typing._eval_type:DeprecationWarning",  # from Python 3.13 on
)
"""torch_geometric uses both."""


@pytest.mark.shows("S43", "P80")
@_with_graphs
@pytest.mark.parametrize(
    "page",
    [
        # What follows of this one is trained with below.
        pytest.param(page, marks=pytest.mark.full if page == _REPLAY else ())
        for page in _PAGES
        if page not in (_COMPILED, *_SHOWN, *_PRINTED)
    ],
    ids=_name,
)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = _write_script(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_BARS, 0)
    monkeypatch.setattr(sys, "argv", [str(script)])
    codes = []
    with collect_warnings() as warnings:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as leaving:
            codes.append(leaving.code)
    assert codes in ([], [0])
    assert [warning for warning in warnings if OF_STATE.search(warning)] == []


_INTERRUPT = """
import runpy, signal, sys
from torch.nn import functional

_, name, last, *sys.argv = sys.argv
compute, calls = getattr(functional, name), iter(range(1, 10**6))

def counted(*args):
    if next(calls) == int(last):
        signal.raise_signal(signal.SIGINT)
    return compute(*args)

setattr(functional, name, counted)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.shows("S43", "P80")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("page", _PRINTED, ids=_name)
def test_a_page_shows_what_its_commands_print(page: Path, tmp_path: Path) -> None:
    """An undisturbed run is compared with. Each command of the README is a process of its own."""
    script = _write_script(page, tmp_path)
    code = script.read_text()

    def run(*words: str) -> tuple[int, str]:
        if page.name != "README.md":
            done = call(run_as_python, *words, folder=tmp_path)
            return done.returncode, done.stderr + done.stdout
        command, variables = [sys.executable, *words], {**os.environ, "PYTHONPATH": str(_ROOT)}
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr + done.stdout

    commands = shown_commands(page)
    assert commands
    for command, shown in commands:
        program, *words = shlex.split(command, comments=True)
        if program == "helios":
            words = ["-m", "helios", *words]
        else:
            script.rename(script := tmp_path / words[0])
        if words[2:3] == ["diff"]:
            undisturbed = tmp_path / "undisturbed.py"
            undisturbed.write_text(code.replace('chkpt_root="runs"', 'chkpt_root="undisturbed"'))
            assert run(undisturbed.name)[0] == 0
        is_interrupted = "^C" in shown
        status, printed = run(
            *(["-c", _INTERRUPT, *_PRINTED[page]] if is_interrupted else []), *words
        )
        assert status == (75 if is_interrupted else 0), printed
        assert OF_STATE.search(printed) is None
        if shown:
            check_printed([line for line in shown if line != "^C"], printed)


class Killed(helios.Plugin):
    """Ends a training in its second epoch."""

    def setup(self) -> None:
        """Nothing to prepare."""

    def on_training_batch_end(self, state: helios.TrainingState, should_log: bool) -> None:
        if state.global_epoch == 2:
            raise InterruptedError


@pytest.mark.full
@_with_graphs
@pytest.mark.parametrize("page", [page for page in _RECIPES if page != _COMPILED], ids=_name)
def test_a_recipe_that_is_killed_ends_with_the_same_ledgers(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = _write_script(page, tmp_path)
    monkeypatch.setattr(_BARS, 0)
    monkeypatch.setattr(sys, "argv", [str(script)])
    construct = helios.Trainer.__init__

    def run(folder: str, *plugins: helios.Plugin) -> dict[str, bytes]:
        def construct_saving(self: helios.Trainer, **options: Any) -> None:
            options = {"chkpt_root": "runs"} | options
            saving = {"chkpt_frequency": 1, "on_incomplete": "raise"}
            plugged = [*options.pop("plugins", ()), *plugins]
            construct(self, **options | saving, plugins=plugged)

        monkeypatch.setattr(helios.Trainer, "__init__", construct_saving)
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        runpy.run_path(str(script), run_name="__main__")
        return {path.as_posix(): path.read_bytes() for path in Path().rglob("ledger.jsonl")}

    whole = run("whole")
    with pytest.raises(InterruptedError):
        run("killed", Killed("killed"))
    assert run("killed") == whole != {}


@pytest.mark.shows("P85")
def test_a_replay_buffer_has_the_same_bytes_after_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe in three epochs, killed in the middle of episodes."""
    script = _write_script(_REPLAY, tmp_path)
    construct = helios.Trainer.__init__

    def train(name: str, *plugins: helios.Plugin) -> int:
        def construct_short(self: helios.Trainer, **options: Any) -> None:
            options |= {"max_epochs": 3, "chkpt_root": tmp_path / name, "plugins": plugins}
            construct(self, **options)

        def run() -> None:
            monkeypatch.setattr(helios.Trainer, "__init__", construct_short)
            definitions = script.read_text().partition("\nagent = train(")[0]
            exec(compile(definitions, "page.py", "exec"), vars_ := {"__name__": "page"})
            vars_["train"]("agent")

        return run_in_child(run, tmp_path / "outcome")

    assert train("whole") == 0
    for iteration in (234, 1234):
        assert train("killed", KillAt("on_training_batch_end", iteration)) == -9
    assert train("killed") == 0
    states = [
        helios.load_checkpoint(tmp_path / name / "agent" / "agent_epoch_3_iter_1500.pth")["model"]
        for name in ("whole", "killed")
    ]
    rows, rows_after_kills = (
        state["objects"]["replay"]["rows"][:1500].numpy().tobytes() for state in states
    )
    assert rows_after_kills == rows != bytes(len(rows))
    assert fingerprint(states[1]) == fingerprint(states[0])


@pytest.mark.shows("P80", "P83")
def test_the_job_files_can_be_read() -> None:
    text = (_ROOT / "docs" / "recipes" / "clusters.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, _BLOCK.flags)
    scripts = [block for kind, block in blocks if kind == "bash"]
    (job,) = (block for kind, block in blocks if kind == "yaml")
    # Those that scripts/slurm_test runs.
    tried = runpy.run_path(str(_ROOT / "scripts" / "slurm_test.py"))
    assert tried["job_files"]() == scripts
    assert len(scripts) == 2
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    document = yaml.safe_load(job)
    volumes = {volume["name"] for volume in document["spec"]["template"]["spec"]["volumes"]}
    (container,) = document["spec"]["template"]["spec"]["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.full
def test_the_code_that_inductor_compiles_runs(tmp_path: Path) -> None:
    # In a process of its own, for inductor leaves threads and variables to the next test.
    command = [sys.executable, str(_write_script(_COMPILED, tmp_path))]
    variables = {**os.environ, "PYTHONPATH": str(_ROOT)}
    assert subprocess.run(command, cwd=tmp_path, env=variables, check=False).returncode == 0


def _assumes(page: Path) -> str:
    """Return what a page says under its title about what is to be read before it."""
    text = page.read_text("utf-8").split("\n\n")[1].replace("\n", " ")
    says = rf"\*({_FOR_US})?(Read first: |Needs no other page\.).*\*"
    assert re.fullmatch(says, text), _name(page)
    return text


@pytest.mark.shows("P151")
def test_each_page_says_what_to_read_first_and_so_all_have_an_order() -> None:
    pages = (_ROOT / "docs").rglob("*.md")
    assumes = {page.resolve(): _assumes(page) for page in pages}
    before = {
        page: [(page.parent / link).resolve() for link in _LINK.findall(text)]
        for page, text in assumes.items()
    }
    assert set(graphlib.TopologicalSorter(before).static_order()) == assumes.keys()
    ours = {page for page, text in assumes.items() if re.match(rf"\*{_FOR_US}", text)}
    assert ours
    assert not [page for page in assumes.keys() - ours if ours & set(before[page])]


@pytest.mark.shows("P151")
def test_the_page_of_the_architecture_is_short_and_names_files_that_exist() -> None:
    page = (_ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert len(page.split()) <= 1500
    named = {name for name in re.findall(r"`([\w/]+)`", page) if "/" in name}
    assert len(named) > 30
    package = {path.relative_to(_ROOT / "helios") for path in (_ROOT / "helios").rglob("*")}
    known = {path.with_suffix("").as_posix() for path in package}
    assert sorted({name.rstrip("/") for name in named} - known - {"scripts/check"}) == []


def test_the_page_of_checkpoints_lists_all_keys_and_names_the_schema() -> None:
    page = (_ROOT / "docs" / "checkpoints.md").read_text("utf-8")
    contents = page.partition("## Contents")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", contents, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == sorted(KEYS)
    assert f"The format is schema {SCHEMA}." in contents


@pytest.mark.parametrize("page", _PAGES, ids=_name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    missing = [
        link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()
    ]
    assert not missing
