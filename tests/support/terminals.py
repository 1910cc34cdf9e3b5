"""A command whose errors go to a terminal."""

from __future__ import annotations

import os
import struct
import subprocess
import threading
from collections.abc import Sequence


def run_on_terminal(words: Sequence[str]) -> tuple[bytes, bytes]:
    """Run a command that must succeed; returns its output, and what its terminal has got."""
    import fcntl
    import pty
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    shown: list[bytes] = []

    def read() -> None:
        # A terminal that nobody reads holds some kilobytes, and then stops who writes to it.
        try:
            while data := os.read(leader, 1 << 16):
                shown.append(data)
        except OSError:
            return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=follower, check=True, timeout=240
        )
    finally:
        os.close(follower)
        reader.join()
        os.close(leader)
    return done.stdout, b"".join(shown)
