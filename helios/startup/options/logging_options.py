"""Options of logs: log files, event files, warnings, the progress bar and the banner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from helios.startup.options.validators import as_folder, check_flags, refusal


@dataclass(frozen=True)
class LoggingOptions:
    """What is logged, and where; see ``Trainer`` for the meaning of each field.

    Attributes:
        log_path: a ``Path`` once checked, like ``run_path``.
    """

    enable_tensorboard: bool
    enable_file_logging: bool
    capture_warnings: bool
    enable_progress_bar: bool
    print_banner: bool
    log_path: Any
    run_path: Any

    def __post_init__(self) -> None:
        check_flags(
            enable_tensorboard=self.enable_tensorboard,
            enable_file_logging=self.enable_file_logging,
            capture_warnings=self.capture_warnings,
            enable_progress_bar=self.enable_progress_bar,
            print_banner=self.print_banner,
        )
        for name in ("log_path", "run_path"):
            object.__setattr__(self, name, as_folder(name, getattr(self, name)))
        pairs = (("enable_tensorboard", "run_path"), ("enable_file_logging", "log_path"))
        for flag, path in pairs:
            if getattr(self, flag) and getattr(self, path) is None:
                raise refusal(path, f"a folder with {flag}=True", None, f"Pass {path}=Path(...).")
