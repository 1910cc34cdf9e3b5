"""URLs in path arguments: refused wherever a path is taken, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.chkpt_migrator import migrate_checkpoints_to_current_version
from helios.cli.commands import main
from helios.engines.engine import Engine
from helios.errors import ArgumentError
from helios.ledger import diff
from helios.plugins import CSVLogger, Profiler
from helios.storage.files import as_local_path
from tests.typed.user_script import Line, Numbers

URL = "s3://bucket/runs/file.csv"

TAKERS: dict[str, Callable[[Any], Any]] = {
    "chkpt_root": lambda url: helios.Trainer(chkpt_root=url),
    "log_path": lambda url: helios.Trainer(log_path=url, enable_file_logging=True),
    "resume": lambda url: helios.Trainer(chkpt_root="runs", resume=url),
    "test": lambda url: helios.Trainer(use_cpu=True).test(Line("line"), Numbers(), checkpoint=url),
    "load_weights": lambda url: helios.load_weights(url, Line("line")),
    "load_checkpoint": helios.load_checkpoint,
    "find_last_checkpoint": helios.find_last_checkpoint,
    "migrate": migrate_checkpoints_to_current_version,
    "engine save": lambda url: Engine("cpu").save_checkpoint({}, url),
    "CSVLogger": CSVLogger,
    "Profiler": Profiler,
    "diff": lambda url: diff(url, url),
}
COMMANDS = (("ls",), ("compare", URL), ("export", "--to", "pt"))


@pytest.mark.shows("U31")
@pytest.mark.parametrize("name", TAKERS)
def test_a_url_is_refused_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (URL, Path(URL)):
        with pytest.raises(ArgumentError, match=r"must be a path .*URL 's3://?bucket.*Mount it"):
            TAKERS[name](url)
    assert not list(tmp_path.iterdir())


@pytest.mark.shows("U31")
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: str(words[0]))
def test_commands_refuse_urls(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, URL]) == 2
    assert f"the URL '{URL}'" in capsys.readouterr().err


@pytest.mark.shows("U31")
def test_files_and_drives_are_paths(tmp_path: Path) -> None:
    folder = tmp_path / "two words"
    assert as_local_path("folder", folder.as_uri()) == folder
    assert as_local_path("folder", Path(folder.as_uri())) == folder
    assert helios.Trainer(chkpt_root=folder.as_uri())._options.chkpt_root == folder
    for path in ("C:/runs", "runs/s3:/x", "a:b", "./s3://x", "", "~/runs"):
        assert as_local_path("folder", path) == Path(path)
