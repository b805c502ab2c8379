"""The command as a process in a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import pyte

ROOT = Path(__file__).parent.parent.parent
EAGLE3 = (sys.executable, "-m", "eagle3_jax")


def environment(**more: str) -> dict[str, str]:
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "COLUMNS", "LINES")
    }

    compiled = str(Path(tempfile.gettempdir()) / "eagle3-jax-tests-compiled")
    variables |= {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": compiled,
    }
    return variables | {"TERM": "xterm-256color"} | more


class InTerminal:
    """A process in a terminal; its bytes and its screen.

    Its standard error is the terminal, and its output, unless that is piped.
    """

    def __init__(self, *arguments: str, columns: int = 100, pipe: bool = False, **variables: str):
        self.screen = pyte.HistoryScreen(columns, 60)
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))

        self.process = subprocess.Popen(
            [*EAGLE3, *arguments],
            stdin=slave,
            stdout=subprocess.PIPE if pipe else slave,
            stderr=slave,
            env=environment(**variables),
            start_new_session=True,
        )

        os.close(slave)
        self.master = master
        self.seen = b""

    def read(self, until: bytes | None = None) -> None:
        """Reads the output until it ends or contains these bytes."""
        stream = pyte.ByteStream(self.screen)
        deadline = time.monotonic() + 120
        while until is None or until not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    new = os.read(self.master, 65536)
                except OSError:  # the other end is closed
                    break
                self.seen += new
                stream.feed(new)

    def finish(self) -> list[str]:
        """Returns the lines of the screen when the process has ended."""
        self.read()
        self.code = self.process.wait(timeout=30)
        self.output = "" if self.process.stdout is None else self.process.stdout.read().decode()
        os.close(self.master)
        return [line.rstrip() for line in self.screen.display]
