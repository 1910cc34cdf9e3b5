"""Published import path of the loggers of a run; see :mod:`helios.terminal.root_logger`."""

from helios.storage.tensorboard_writer import TensorboardWriter as TensorboardWriter
from helios.terminal.root_logger import RootLogger as RootLogger
from helios.terminal.root_logger import close_default_loggers as close_default_loggers
from helios.terminal.root_logger import create_default_loggers as create_default_loggers
from helios.terminal.root_logger import flush_default_loggers as flush_default_loggers
from helios.terminal.root_logger import get_default_log_name as get_default_log_name
from helios.terminal.root_logger import get_root_logger as get_root_logger
from helios.terminal.root_logger import get_tensorboard_writer as get_tensorboard_writer
from helios.terminal.root_logger import is_root_logger_active as is_root_logger_active
from helios.terminal.root_logger import restore_default_loggers as restore_default_loggers
from helios.terminal.root_logger import setup_default_loggers as setup_default_loggers
