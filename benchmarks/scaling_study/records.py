# SPDX-License-Identifier: Apache-2.0
"""A file of results, one JSON object a line, that a study can be stopped and gone on with at any time."""

from __future__ import annotations

import contextlib
import fcntl
import json
from pathlib import Path
from typing import Any, Dict, Iterator, List


def read(path: Path) -> List[Dict[str, Any]]:
    """The objects of all whole lines; a line that was cut off by a kill is as if it were not there."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text("utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(line)
            if isinstance(value, dict):
                found.append(value)
    return found


class Records:
    """A file that lines are added to; made by `appending`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, record: Dict[str, Any]) -> None:
        """Write one line, and have it on its way to the disk before this returns."""
        line = json.dumps(record, allow_nan=False) + "\n"
        with self._path.open("r+b") as file:
            file.seek(0, 2)
            if file.tell():
                file.seek(-1, 2)
                # Behind a line that was cut off, a new one begins.
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode("utf-8"))


@contextlib.contextmanager
def appending(path: Path) -> Iterator[Records]:
    """Open a file to add lines to, for this process alone.

    Raises:
        SystemExit: another process adds to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SystemExit(
                f"{path} is being written by another study: wait, or choose another --results"
            ) from error
        yield Records(path)
