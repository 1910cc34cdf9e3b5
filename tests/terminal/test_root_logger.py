"""The root logger and the default pair of loggers."""

from __future__ import annotations

import logging as standard
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from helios.terminal import root_logger as logging

_MODULE_LOGGER = standard.getLogger("helios.some.module")


# No fixtures: pytest hangs its own handlers on a logger that is open when a test begins or ends.


@contextmanager
def root_logger() -> Iterator[logging.RootLogger]:
    logger = logging.RootLogger(capture_warnings=False)
    try:
        yield logger
    finally:
        logger.close()


@contextmanager
def default_loggers() -> Iterator[None]:
    logging.create_default_loggers(enable_tensorboard=True, capture_warnings=False)
    try:
        yield
    finally:
        logging.close_default_loggers()


@pytest.fixture
def rank_1() -> Iterator[None]:
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.shows("H43")
def test_what_a_module_says_reaches_screen_and_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with root_logger() as root:
        log_file = tmp_path / "logs" / "deep" / "run.log"
        root.setup(log_file)
        _MODULE_LOGGER.info("resumed at %d %%", 50)
        root.warning("100% sure")
        root.flush()
        text = log_file.read_text()
        line = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - "
        assert re.fullmatch(f"{line}INFO - resumed at 50 %\n{line}WARNING - 100% sure\n", text)
        assert capsys.readouterr().err == text
        assert root.log_file == log_file


@pytest.mark.shows("H19", "H45")
@pytest.mark.usefixtures("rank_1")
def test_other_ranks_say_errors_only_and_write_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.create_default_loggers()
    logging.setup_default_loggers("run", tmp_path / "logs", tmp_path / "runs")
    root = logging.get_root_logger()
    root.setup(tmp_path / "run.log")
    root.info("notice")
    root.warning("warning")
    root.error("error")
    logging.close_default_loggers()
    assert re.fullmatch(r".* - ERROR - rank 1 of 2 - error\n", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.shows("H45")
def test_python_warnings_are_logged_on_request_only(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        root = logging.RootLogger(capture_warnings=True)
        warnings.warn("from user code", UserWarning, stacklevel=1)
        root.close()
    assert " - WARNING - " in capsys.readouterr().err


@pytest.mark.shows("H43")
def test_runs_of_one_second_get_files_of_their_own(tmp_path: Path) -> None:
    """Three runs take less than a second, so at least two of them have the same time."""
    with default_loggers():
        log_root, runs_root = tmp_path / "logs", tmp_path / "runs"
        for number in range(3):
            logging.setup_default_loggers("run", log_root, runs_root)
            logging.get_root_logger().info("run %d", number)
        logs = sorted(log_root.iterdir())
        assert [path.suffix for path in logs] == [".log"] * 3
        assert [path.read_text().count("INFO") for path in logs] == [1, 1, 1]
        assert any(path.stem.endswith("_2") for path in logs)
        assert sorted(path.name for path in runs_root.iterdir()) == [path.stem for path in logs]
