"""The logger of Helios obeys what the user has configured, and each line is written once."""

from __future__ import annotations

import contextlib
import copy
import logging
import logging.config
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import helios
from helios.terminal.root_logger import RootLogger
from tests.support.quiet import Quiet
from tests.support.ranks import let_launcher_start_from_server
from tests.typed.user_script import Line, Numbers

_NAMES = ("helios", "helios.start.options", "py.warnings")


class Lines(logging.Handler):
    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


@contextlib.contextmanager
def as_it_was() -> Iterator[None]:
    """Put every logger back that a case configures."""
    loggers = [logging.getLogger(), *map(logging.getLogger, _NAMES)]
    found = [(each.level, list(each.handlers), each.propagate, each.disabled) for each in loggers]
    disabled = {name for name, each in _loggers() if each.disabled}
    try:
        yield
    finally:
        for each, (level, handlers, propagate, is_disabled) in zip(loggers, found, strict=True):
            each.setLevel(level)
            each.handlers[:] = handlers
            each.propagate, each.disabled = propagate, is_disabled
        for name, logger in _loggers():
            logger.disabled = name in disabled
        logging.disable(logging.NOTSET)


def _loggers() -> list[tuple[str, logging.Logger]]:
    table = logging.root.manager.loggerDict
    return [(name, each) for name, each in table.items() if isinstance(each, logging.Logger)]


def say(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], list[str]]:
    """Write one line of each level; returns what of it reached the screen, and the file."""
    logger = RootLogger(capture_warnings=False)
    try:
        logger.setup(folder / "run.log")
        module = logging.getLogger("helios.start.options")
        for level in ("DEBUG", "INFO", "WARNING", "ERROR"):
            module.log(getattr(logging, level), "a line")
    finally:
        logger.close()
    texts = capsys.readouterr().err, (folder / "run.log").read_text()
    return tuple([each.split(" - ")[1] for each in text.splitlines()] for text in texts)  # type: ignore[return-value]


_ALL = ["INFO", "WARNING", "ERROR"]


@pytest.mark.shows("P130")
@pytest.mark.parametrize(
    ("configured", "screen", "file"),
    [
        ({}, _ALL, _ALL),
        ({"helios": "WARNING"}, ["WARNING", "ERROR"], ["WARNING", "ERROR"]),
        ({"helios.start.options": "DEBUG"}, ["DEBUG", *_ALL], ["DEBUG", *_ALL]),
    ],
)
def test_levels_hold_on_the_screen_and_the_file_has_info(
    configured: dict[str, str],
    screen: list[str],
    file: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with as_it_was():
        for name, level in configured.items():
            logging.getLogger(name).setLevel(level)
        assert say(tmp_path, capsys) == (screen, file)


@pytest.mark.shows("P130")
@pytest.mark.parametrize("on", ["", "helios"])
@pytest.mark.parametrize(
    ("configured", "heard", "file"),
    [
        ({}, ["WARNING", "ERROR"], _ALL),
        ({"helios": "ERROR"}, ["ERROR"], ["ERROR"]),
    ],
)
def test_a_handler_of_the_user_gets_each_line_once_and_the_screen_none(
    on: str,
    configured: dict[str, str],
    heard: list[str],
    file: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with as_it_was():
        handler = Lines()
        logging.getLogger(on).addHandler(handler)
        for name, level in configured.items():
            logging.getLogger(name).setLevel(level)
        before = copy.copy(logging.getLogger("helios").handlers)
        assert say(tmp_path, capsys) == ([], file)
        assert [level for level, _ in handler.lines] == heard
        assert handler.filters == []
        assert logging.getLogger("helios").handlers == before


class Failing(Quiet):
    def on_training_end(self) -> None:
        logging.getLogger("helios.users").info("rank %d is here", self.global_rank)
        if self.global_rank == 1:
            logging.getLogger("helios.users").error("rank 1 has a word")


def fit(folder: Path, **options: Any) -> None:
    options = {"total_steps": 2, "valid_frequency": 1, **options}
    trainer = helios.Trainer(use_cpu=True, enable_file_logging=True, log_path=folder, **options)
    trainer.fit(Line("line"), Numbers())


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if "Validation" in line or "has ended" in line]


def require_once(text: str) -> None:
    found = Counter(line.partition("INFO")[2].partition(" - ")[2] for line in lines_of(text))
    assert sorted(found.values()) == [1, 1, 1], text


@pytest.mark.shows("P130")
def test_ranks_write_to_the_handlers_of_the_process_that_starts_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers cannot be copied, so the launcher writes the lines of its ranks."""
    let_launcher_start_from_server(monkeypatch)
    with as_it_was():
        handler = Lines()
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.INFO)
        fit(tmp_path, nproc=2, plugins=[Failing("failing")])
    texts = [message for _, message in handler.lines]
    require_once("\n".join(f"INFO - {text}" for text in texts))
    assert texts.count("rank 0 is here") == 1
    assert "rank 1 is here" not in "".join(texts)
    assert handler.lines.count(("ERROR", "rank 1 of 2 - rank 1 has a word")) == 1
    assert "has ended" not in capfd.readouterr().err
    (file,) = tmp_path.iterdir()
    require_once(file.read_text())


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_resume_says_once_that_the_log_file_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_lost: bool
) -> None:
    options: dict[str, Any] = {"chkpt_root": tmp_path / "runs", "chkpt_frequency": 1}
    fit(tmp_path / "logs", **options)
    if is_lost:
        (file,) = (tmp_path / "logs").iterdir()
        file.unlink()
    caplog.clear()
    fit(tmp_path / "logs", **options, total_steps=3)
    assert caplog.text.count("The log file of the resumed run is missing") == is_lost
