# SPDX-License-Identifier: Apache-2.0
"""Rows in a file of JSON lines, each written at once and readable up to the last one.

A line is one `write` to the operating system, so a killed process leaves whole lines, and perhaps a truncated
one at the end. The next writer removes that one, readers skip it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from typing import Any, Dict, Iterable, List, Type

from .appended_file import AppendedFile, PathLike
from .events import BatchRepeated, BatchThrownAway, Overflowed, ScaleChanged, TrainingBegan, UpdateEnded
from .rows import LayerRow, Row

_KINDS: Dict[str, Type[Any]] = {
    "began": TrainingBegan,
    "layer": LayerRow,
    "overflow": Overflowed,
    "repeat": BatchRepeated,
    "lost": BatchThrownAway,
    "scale": ScaleChanged,
    "update": UpdateEnded,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}

_VERSION = 2
_SIGNATURE = b'{"kind":"nnabla_adaloss recording","version":'
_HEADER = b"%s%d}\n" % (_SIGNATURE, _VERSION)
_LONGEST = 2**20  # bytes of a line


class RowFile(AppendedFile):
    """Appends rows to a file; ValueError if it is not ours alone."""

    def __init__(self, path: PathLike) -> None:
        super().__init__(path)
        try:
            self._lock()
            self.truncate(_end_of_whole_lines(self.name))
            self.append(_HEADER)
        except BaseException:
            self.close()
            raise

    def append_row(self, row: Row) -> None:
        """Write a row: the next reader sees it, even if this process is killed, or writing the next fails."""
        self.append(_line(row))

    def _lock(self) -> None:
        try:
            fcntl.flock(self, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"path={self.name!r} is open in another recorder: give each recorder, and each rank, a file, "
                "or close() the other one"
            ) from None
        except OSError:
            pass  # a file system without locks


def _end_of_whole_lines(name: str) -> int:
    with open(name, "rb") as file:
        first = file.readline(_LONGEST)
        if not _HEADER.startswith(first):  # a crash may have cut off the header
            _check_header(name, first)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LONGEST))
        last = file.read()
        return size - len(last) + last.rfind(b"\n") + 1


def read_rows(path: PathLike) -> List[Row]:
    """The rows of a file; of what was done again after a crash, the second time."""
    name = os.fsdecode(path)
    rows: List[Row] = []
    began_anew = False
    with open(name, "rb") as file:
        _check_header(name, file.readline(_LONGEST))
        for number, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                break
            try:
                content = json.loads(line)
                if "kind" in content:
                    began_anew = True
                    continue
                row = _row(**content)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{name} is damaged in line {number}: {error!r}") from None
            if began_anew:
                began_anew = False
                rows = [earlier for earlier in rows if earlier.iteration < row.iteration]
            rows.append(row)
    return rows


def write_rows(path: PathLike, rows: Iterable[Row]) -> None:
    """Write rows to a new file; one that is there is replaced."""
    with open(path, "wb") as file:
        file.writelines([_HEADER, *map(_line, rows)])


def _line(row: Row) -> bytes:
    """A row as a JSON object: its kind, and its fields without those that are None."""
    fields = {name: value for name, value in row._asdict().items() if value is not None}
    return json.dumps({"event": _NAMES[type(row)], **fields}, separators=(",", ":")).encode() + b"\n"


def _row(event: str, **fields: Any) -> Row:
    if "layers" in fields:
        fields["layers"] = tuple(fields["layers"])
    row: Row = _KINDS[event](**fields)
    return row


def _check_header(name: str, line: bytes) -> None:
    found = re.match(re.escape(_SIGNATURE) + rb"(\d+)", line)
    if found is None:
        raise ValueError(f"{name} is not a recording of nnabla_adaloss: choose another path")
    version = int(found[1])
    if version > _VERSION:
        raise ValueError(
            f"{name} has version {version} of the format, this package knows versions up to {_VERSION}: "
            "update nnabla_adaloss"
        )
