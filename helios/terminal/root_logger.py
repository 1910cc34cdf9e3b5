"""The loggers of a process: a root logger for terminal and log file, and a TensorBoard writer.

:class:`RootLogger` connects the standard logger named ``helios``, so all messages that modules of
the package log through ``logging.getLogger(__name__)`` are written to the terminal and the file. A
user who has configured logging decides where they go.
The ``*_default_loggers`` functions manage the pair that a run uses.
"""

from __future__ import annotations

import copy
import itertools
import logging
import sys
import threading
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from helios.core.logger_settings import OWN, OWN_HANDLER, WARNINGS, find_listeners
from helios.distributed.collectives import describe_rank, get_global_rank
from helios.errors import UsageError
from helios.storage.tensorboard_writer import TensorboardWriter

_LOGGER = logging.getLogger(__name__)
_FORMAT = "%(asctime)s - %(levelname)s - {place}%(message)s"


RAISED: Mapping[str, bool] = {"is_raised": True}
"""Argument ``extra`` for an error that will be raised: the screen does not show its traceback."""


class Bar(tqdm):  # type: ignore[type-arg]
    """A progress bar, above which the log writes its lines."""

    monitor_interval = 0  # no monitor thread that redraws


# Not tqdm's own lock, which a killed child process may hold for ever.
Bar.set_lock(threading.RLock())


class _ScreenHandler(logging.Handler):
    """Writes to the terminal, above progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_raised", False):
            # The record itself is for the log file, too.
            record = copy.copy(record)
            record.exc_info = record.exc_text = None
        try:
            Bar.write(self.format(record), file=sys.stderr)
            sys.stderr.flush()
        except Exception:
            # Python reports it on stderr, which may be closed: then nobody can be told.
            with suppress(ValueError):
                self.handleError(record)


class _Tuned:
    """A logger whose level and handlers are set for a run; :meth:`restore` undoes it.

    The level that a user has set holds everywhere. Without one, the screen has that of the root
    logger, or INFO if nothing is configured, and the log file has INFO.

    Args:
        name: the name of the logger.
        lowest: the lowest level of this process without a log file; ``None`` for no limit.
        screen: the handler for the screen, which it gets if the user has none.

    Attributes:
        logger: the logger.
    """

    def __init__(self, name: str, lowest: int | None, screen: logging.Handler) -> None:
        self.logger = logging.getLogger(name)
        self._root = logging.getLogger()
        self._lowest = lowest
        self._level, self._propagate = self.logger.level, self.logger.propagate
        self._gated = find_listeners(self.logger)
        self._is_heard = bool(self._gated)
        self._set_level = self._level
        self._screen = screen
        if not self._is_heard:
            # A handler that the root logger gets during the run would print each line again.
            self.logger.propagate = False
            self.logger.addHandler(screen)
            self._gated = [screen]
        self.tune(has_file=False)

    def tune(self, *, has_file: bool) -> None:
        """Set the level for the screen, and the log file if there is one."""
        level = self._level or self._screen_level()
        if self._lowest is not None:
            level = max(level, self._lowest)
        elif not self._level and has_file:
            level = min(level, logging.INFO)
        if level == self.logger.getEffectiveLevel():
            return
        self._set_level = level
        self.logger.setLevel(level)
        for handler in self._gated:
            handler.addFilter(self._is_shown)

    def _screen_level(self) -> int:
        is_default = not self._is_heard and self._root.level == logging.WARNING
        return logging.INFO if is_default else self._root.level

    def _is_shown(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes the level that its logger has without a log file."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None and logger is not self.logger:
            if logger.level:
                return True
            logger = logger.parent
        is_left = logger is not None and not self._level and logger.level == self._set_level
        return not is_left or record.levelno >= self._screen_level()

    def restore(self) -> None:
        """Leave the logger as it was found, with what the user has changed since."""
        for handler in self._gated:
            handler.removeFilter(self._is_shown)
        self.logger.removeHandler(self._screen)
        if self.logger.level == self._set_level:
            self.logger.setLevel(self._level)
        if not self._is_heard:
            self.logger.propagate = self._propagate


class RootLogger:
    """Connects the logger named ``helios`` with the screen and a log file.

    It respects level, handlers and propagation: a handler for the screen is added only if neither
    it nor the standard library's root logger has one. Without a level the screen has INFO, or the
    level of a configured root logger, and the log file has INFO. Ranks other than 0 log errors
    only, and their lines contain the rank, e.g. ``rank 2 of 4``.

    Args:
        capture_warnings: whether to log warnings of the ``warnings`` module, too.
    """

    def __init__(self, capture_warnings: bool) -> None:
        self._is_main = get_global_rank() == 0
        lowest = None if self._is_main else logging.ERROR
        self._file: logging.FileHandler | None = None
        # Lines of rank 0 are the same as for a single process.
        place = "" if self._is_main else f"{describe_rank()} - "
        self._formatter = logging.Formatter(_FORMAT.format(place=place))
        self._screen = _ScreenHandler()
        self._screen.set_name(f"{OWN_HANDLER}screen")
        self._screen.setFormatter(self._formatter)
        names = (OWN, WARNINGS) if capture_warnings else (OWN,)
        self._tuned = [_Tuned(name, lowest, self._screen) for name in names]
        showwarning = warnings.showwarning
        if capture_warnings:
            logging.captureWarnings(True)
        self._is_capturing = warnings.showwarning is not showwarning

    def setup(self, log_file: Path | None = None) -> None:
        """Start to log to a file on rank 0; appends to an existing file.

        Args:
            log_file: the file; a missing folder is created. ``None`` changes nothing.
        """
        if log_file is None or not self._is_main:
            return
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._close_file()
        self._file = logging.FileHandler(log_file, encoding="utf-8")
        self._file.set_name(f"{OWN_HANDLER}file")
        self._file.setFormatter(self._formatter)
        for tuned in self._tuned:
            tuned.logger.addHandler(self._file)
            tuned.tune(has_file=True)

    def _close_file(self) -> None:
        if self._file is None:
            return
        for tuned in self._tuned:
            tuned.logger.removeHandler(self._file)
        self._file.close()
        self._file = None

    @property
    def logger(self) -> logging.Logger:
        """The standard library's logger."""
        return logging.getLogger(OWN)

    @property
    def log_file(self) -> Path | None:
        """The absolute path of the log file; ``None`` without one."""
        return None if self._file is None else Path(self._file.baseFilename)

    def info(self, msg: str, *args: object, **kwargs: Any) -> None:
        """Log at level INFO; takes the arguments of ``logging.Logger.info``."""
        self.logger.info(msg, *args, **kwargs)

    def warning(self, msg: str, *args: object, **kwargs: Any) -> None:
        """Log a warning; takes the arguments of ``logging.Logger.warning``."""
        self.logger.warning(msg, *args, **kwargs)

    def error(self, msg: str, *args: object, **kwargs: Any) -> None:
        """Log an error; takes the arguments of ``logging.Logger.error``."""
        self.logger.error(msg, *args, **kwargs)

    def exception(self, msg: str, *args: object, **kwargs: Any) -> None:
        """Log an error with the exception that is being handled."""
        self.logger.exception(msg, *args, **kwargs)

    def log_to_file(self, logger: logging.Logger, text: str) -> None:
        """Log at level INFO to the log file only; does nothing without one."""
        if self._file is not None and logger.isEnabledFor(logging.INFO):
            place = (logger.name, logging.INFO, "", 0)
            self._file.handle(logger.makeRecord(*place, text, (), None))

    def flush(self) -> None:
        """Flush the screen and the log file."""
        for handler in (self._screen, self._file):
            if handler is not None:
                handler.flush()

    def close(self) -> None:
        """Restore the previous configuration of the logger; a second call does nothing."""
        self._close_file()
        if self._is_capturing:
            logging.captureWarnings(False)
            self._is_capturing = False
        for tuned in self._tuned:
            tuned.restore()
        self._tuned = []
        self._screen.close()


class _Default:
    """Holder of the pair of loggers that a run uses, one pair per process."""

    root: RootLogger | None = None
    tensorboard: TensorboardWriter | None = None


def get_default_log_name(run_name: str) -> str:
    """Return ``<run_name>_<MonthDay_Hour-Minute-Second>``, such as ``run_Nov20_17-21-25``."""
    return f"{run_name}_{datetime.now():%b%d_%H-%M-%S}"


def create_default_loggers(enable_tensorboard: bool = True, capture_warnings: bool = True) -> None:
    """Create the default loggers that do not exist yet, and start to log to the terminal.

    Args:
        enable_tensorboard: whether to create the TensorBoard writer, too.
        capture_warnings: whether to log warnings of the ``warnings`` module, too.
    """
    if _Default.root is None:
        _Default.root = RootLogger(capture_warnings)
    if enable_tensorboard and _Default.tensorboard is None:
        _Default.tensorboard = TensorboardWriter()


def setup_default_loggers(
    run_name: str, log_root: Path | None = None, runs_root: Path | None = None
) -> None:
    """Create the log file and the TensorBoard folder of a new run, named after it and the time.

    If the name is taken, because runs started in the same second, ``_2``, ``_3`` and so on is
    appended.

    Args:
        run_name: name of the run.
        log_root: folder for log files; ``None`` for no log file.
        runs_root: folder for the TensorBoard folders of runs; ``None`` for no events.

    Raises:
        UsageError: before :func:`create_default_loggers` (a ``RuntimeError``).
    """
    root = _require_root("setup_default_loggers")
    if get_global_rank() != 0:
        return
    name = get_default_log_name(run_name)
    if _Default.tensorboard is None:
        runs_root = None
    for count in itertools.count(1):
        stem = name if count == 1 else f"{name}_{count}"
        log_file = None if log_root is None else log_root / f"{stem}.log"
        run_path = None if runs_root is None else runs_root / stem
        try:
            if run_path is not None:
                run_path.mkdir(parents=True)
            if log_file is not None:
                log_file.parent.mkdir(parents=True, exist_ok=True)
                log_file.touch(exist_ok=False)
            break
        except FileExistsError:
            continue
    root.setup(log_file)
    if _Default.tensorboard is not None and run_path is not None:
        _Default.tensorboard.setup(run_path)


def restore_default_loggers(
    log_path: Path | None = None,
    run_path: Path | None = None,
    marks: Mapping[str, int] | None = None,
) -> None:
    """Continue the files of a resumed run.

    Args:
        log_path: its log file, which is appended to; if it is missing, a new one is created with a
            warning.
        run_path: its folder of TensorBoard events.
        marks: the result of :meth:`TensorboardWriter.mark` in the checkpoint:
            :meth:`TensorboardWriter.cut_back` removes later events. ``None`` keeps them.

    Raises:
        UsageError: before :func:`create_default_loggers` (a ``RuntimeError``).
    """
    root = _require_root("restore_default_loggers")
    if log_path is not None:
        is_gone = not log_path.exists()
        root.setup(log_path)
        if is_gone:
            _LOGGER.warning(
                "The log file of the resumed run is missing, so a new one is started: %s. If the "
                "old file was only moved, you can prepend it.",
                log_path,
            )
    if _Default.tensorboard is not None and run_path is not None:
        _Default.tensorboard.restore(run_path, marks)


def flush_default_loggers() -> None:
    """Flush the default loggers."""
    for logger in (_Default.root, _Default.tensorboard):
        if logger is not None:
            logger.flush()


def close_default_loggers() -> None:
    """Close and remove the default loggers; does nothing if there are none."""
    root, tensorboard = _Default.root, _Default.tensorboard
    _Default.root = _Default.tensorboard = None
    # The root logger last, so that messages from closing the event files are still logged.
    for logger in (tensorboard, root):
        if logger is not None:
            logger.close()


def _require_root(caller: str) -> RootLogger:
    if _Default.root is None:
        raise UsageError(
            f"{caller}(...) needs the default loggers, which do not exist yet. Call "
            "create_default_loggers() first."
        )
    return _Default.root


def get_root_logger() -> RootLogger:
    """Return the default root logger.

    Raises:
        KeyError: before :func:`create_default_loggers`.
    """
    if _Default.root is None:
        raise KeyError(
            "The root logger does not exist yet: it is created when training starts. Call "
            "create_default_loggers() to create it yourself."
        )
    return _Default.root


def is_root_logger_active() -> bool:
    """Return whether the default root logger exists."""
    return _Default.root is not None


def log_to_file(logger: logging.Logger, text: str) -> None:
    """Log at level INFO to the log file of the run only; does nothing without one."""
    if _Default.root is not None:
        _Default.root.log_to_file(logger, text)


def muted_tensorboard() -> AbstractContextManager[None]:
    """Return a context manager in which nothing is written to TensorBoard."""
    return nullcontext() if _Default.tensorboard is None else _Default.tensorboard.muted()


def get_tensorboard_writer() -> TensorboardWriter | None:
    """Return the default TensorBoard writer; ``None`` if TensorBoard is disabled."""
    return _Default.tensorboard
