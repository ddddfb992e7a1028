# SPDX-License-Identifier: Apache-2.0
"""Rows in a file of JSON lines, written one by one and readable after a crash.

A line is one `write` to the operating system, so a killed process leaves whole lines, and perhaps a truncated
one at the end. The next writer removes that one, readers skip it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from contextlib import suppress
from io import FileIO
from typing import Any, Callable, Dict, Iterable, List, Type, Union, get_args, get_origin, get_type_hints

from ..state.whole_file import PathLike, special_kind
from . import events
from .rows import LayerRow

# Names of the kinds of rows in a file; a `LayerScaled` is recorded as a `LayerRow`.
_NAMES: Dict[Type[Any], str] = {
    LayerRow: "layer",
    events.TrainingBegan: "began",
    events.Overflowed: "overflow",
    events.BatchRepeated: "repeat",
    events.BatchThrownAway: "lost",
    events.ScaleChanged: "scale",
    events.UpdateEnded: "update",
}
_KINDS = {name: kind for kind, name in _NAMES.items()}


def _check(name: str, hint: Any) -> Callable[[Any], bool]:
    """Make a check that a JSON value is valid for a field; integers have at most 64 bits."""
    kind, of = get_origin(hint), get_args(hint)
    if kind is Union:  # or None
        one = _check(name, of[0])
        return lambda value: value is None or one(value)
    if kind is tuple:
        one = _check(name, of[0])
        return lambda value: isinstance(value, list) and all(map(one, value))
    if kind is dict:
        one = _check(name, of[1])
        return lambda value: isinstance(value, dict) and all(map(one, value.values()))
    if kind is list:  # an exponent, which may be negative, and counts from there on; or nothing
        return lambda value: isinstance(value, list) and len(value) != 1 and all(map(_is_int64, value))
    if name in ("alpha", "scale", "before", "after"):
        return lambda value: type(value) in (int, float) and 0 < value < 2.0**1023
    if hint is float:
        return lambda value: type(value) is float or _is_int64(value)
    if hint not in (str, bool, int):
        raise TypeError(f"field {name} is a {hint}, which files of rows cannot hold")
    return lambda value: type(value) is hint and (hint is not int or 0 <= value < 2**63)


def _is_int64(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


_HINTS = {kind: get_type_hints(kind) for kind in _NAMES}
_CHECKS = {kind: {name: _check(name, hint) for name, hint in hints.items()} for kind, hints in _HINTS.items()}

_VERSION = 2  # version 1 had no rows of `TrainingBegan`
_SIGNATURE = b'{"kind":"nnabla_adaloss recording","version":'
_HEADER = b"%s%d}\n" % (_SIGNATURE, _VERSION)
_CHUNK = 2**20  # bytes that are read at once


class AppendedFile(FileIO):
    """File that grows by whole pieces, which outlive the process; one that does not fit is removed."""

    name: str

    def __init__(self, path: PathLike) -> None:
        name = os.fsdecode(path)
        kind = special_kind(os.stat(name)) if os.path.exists(name) else None
        if kind:  # opening or reading it could block
            raise ValueError(f"{name} is {kind}: give the path of a file")
        super().__init__(name, "a+")

    def append(self, piece: bytes) -> None:
        """Write the whole piece or raise OSError; ValueError when the file is closed."""
        if self.closed:
            raise ValueError(f"{self.name} is closed: nothing can be recorded to it any more")
        size = os.fstat(self.fileno()).st_size
        try:
            while piece:  # a nearly full disk takes the beginning; writing the rest then raises the cause
                piece = piece[self.write(piece) :]
        except BaseException:
            with suppress(OSError):
                self.truncate(size)
            raise


class RowFile(AppendedFile):
    """Appends rows to a file; ValueError if it is not a recording or is open in another recorder."""

    def __init__(self, path: PathLike) -> None:
        super().__init__(path)
        try:
            try:
                fcntl.flock(self, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"path={self.name!r} is open in another recorder: give each recorder, and each rank, a "
                    "file, or close() the other one"
                ) from None
            except OSError:
                pass  # a file system without locks
            self.truncate(_end_of_whole_lines(self.name))
            self.append(_HEADER)
        except BaseException:
            self.close()
            raise

    def append_row(self, row: events.Event) -> None:
        """Write a row, which the next reader sees."""
        self.append(_line(row))


def _end_of_whole_lines(name: str) -> int:
    """Length of a file up to its last whole line; ValueError if it is not a recording."""
    with open(name, "rb") as file:
        first = file.readline(_CHUNK)
        if not _HEADER.startswith(first):  # a crash may have cut off the header
            _check_header(name, first)
        end = file.seek(0, os.SEEK_END)
        while end:
            start = file.seek(max(0, end - _CHUNK))
            whole = file.read(end - start).rfind(b"\n") + 1
            if whole:
                return start + whole
            end = start
        return 0


def read_rows(path: PathLike) -> List[events.Event]:
    """Read the rows of a file; of iterations that ran again after a crash, the second run's."""
    name = os.fsdecode(path)
    rows: List[events.Event] = []
    resumed = False
    with open(name, "rb") as file:
        _check_header(name, file.readline(_CHUNK))
        for number, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                break
            try:
                content = json.loads(line)
                if "kind" in content:  # the header that a resumed training has written
                    resumed = True
                    continue
                row = _row(**content)
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{name} is damaged in line {number}: {error}") from None
            if resumed:
                resumed = False
                rows = [earlier for earlier in rows if earlier.iteration < row.iteration]
            rows.append(row)
    return rows


def write_rows(path: PathLike, rows: Iterable[events.Event]) -> None:
    """Write rows to a new file, replacing an existing one."""
    with open(path, "wb") as file:
        file.writelines([_HEADER, *map(_line, rows)])


def _line(row: events.Event) -> bytes:
    """Write a row as a JSON object: its kind, and its fields that are not None."""
    fields = {name: value for name, value in row._asdict().items() if value is not None}
    return json.dumps({"event": _NAMES[type(row)], **fields}, separators=(",", ":")).encode() + b"\n"


def _row(event: str, **fields: Any) -> events.Event:
    """Make a row from the fields of a line; ValueError if one has no value that `_line` writes."""
    if event not in _KINDS:
        raise ValueError(f"there is no event {event!r}")
    kind = _KINDS[event]
    for name, value in fields.items():
        if name not in _CHECKS[kind] or not _CHECKS[kind][name](value):
            raise ValueError(f"{name}={value!r} is not a value that a Recorder writes")
        if get_origin(_HINTS[kind][name]) is tuple:
            fields[name] = tuple(value)
    row: events.Event = kind(**fields)
    return row


def _check_header(name: str, line: bytes) -> None:
    """Raise ValueError unless a line is the header of a recording that this version reads."""
    header = re.match(re.escape(_SIGNATURE) + rb"(\d+)", line)
    if header is None:
        raise ValueError(f"{name} is not a recording of nnabla_adaloss: choose another path")
    version = int(header[1])
    if version > _VERSION:
        raise ValueError(
            f"{name} has version {version} of the format, this package knows versions up to {_VERSION}: "
            "update nnabla_adaloss"
        )
