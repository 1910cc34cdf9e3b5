"""Published import path of the loggers of a run; see :mod:`helios.terminal.root_logger`."""

from helios.storage.tensorboard_writer import TensorboardWriter
from helios.terminal.root_logger import (
    RootLogger,
    close_default_loggers,
    create_default_loggers,
    flush_default_loggers,
    get_default_log_name,
    get_root_logger,
    get_tensorboard_writer,
    is_root_logger_active,
    restore_default_loggers,
    setup_default_loggers,
)

__all__ = [
    "RootLogger",
    "TensorboardWriter",
    "close_default_loggers",
    "create_default_loggers",
    "flush_default_loggers",
    "get_default_log_name",
    "get_root_logger",
    "get_tensorboard_writer",
    "is_root_logger_active",
    "restore_default_loggers",
    "setup_default_loggers",
]
