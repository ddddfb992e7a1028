# SPDX-License-Identifier: Apache-2.0
"""A state as a JSON file: written atomically, checked when read.

The file holds one JSON object on two lines: a header with the kind of file, the version of the format and the
SHA-256 of the second line; and the state. Floats are written with as many digits as restore them bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from contextlib import suppress
from typing import Any, Dict, Mapping, Union

FORMAT_VERSION = 1
_KIND = "nnabla_adaloss state"


class StateFileError(ValueError):
    """A file that holds no state that can be loaded."""


def write_state(path: Union[str, os.PathLike[str]], state: Mapping[str, Any]) -> None:
    """Write `state` to `path`; a crash at any moment leaves the old file or the new one.

    Args:
        path: the file; its folder must exist.
        state: dicts with string keys, lists, numbers, strings, booleans and None.

    Raises:
        TypeError: `state` holds something else.
        OSError: the file cannot be written; an older one is left as it was.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "states.json")
        >>> write_state(path, {"scale": 8.0})
        >>> read_state(path)
        {'scale': 8.0}
    """
    body = json.dumps(state, sort_keys=True).encode()
    header = {"kind": _KIND, "version": FORMAT_VERSION, "sha256": hashlib.sha256(body).hexdigest()}
    target = os.path.abspath(os.fspath(path))
    folder = os.path.dirname(target)
    # In the same folder, for os.replace; not by tempfile, which would hide the file from other users.
    temporary = f"{target}.{secrets.token_hex(8)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(json.dumps(header).encode() + b"\n" + body + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


def _sync_folder(folder: str) -> None:
    # The new name is on disk only when its folder is.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(path: Union[str, os.PathLike[str]]) -> Dict[str, Any]:
    """Read a state that `write_state` wrote.

    Raises:
        StateFileError: the file is truncated, damaged, of a newer version, or something else altogether.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")
    name = os.fspath(path)
    header = _parse(lines[0], f"{name} is no state file: its first line is not JSON")
    if not isinstance(header, dict) or header.get("kind") != _KIND:
        raise StateFileError(f"{name} is no state file of nnabla_adaloss")
    version = header.get("version")
    if not isinstance(version, int) or version < 1:
        raise StateFileError(
            f"{name} is damaged: its header has version {version!r}; use an earlier checkpoint"
        )
    if version > FORMAT_VERSION:
        raise StateFileError(
            f"{name} has version {version} of the format, this package knows versions up to "
            f"{FORMAT_VERSION}: update nnabla_adaloss"
        )
    if len(lines) != 3 or lines[2]:
        raise StateFileError(f"{name} is truncated, or something was added to it; use an earlier checkpoint")
    if hashlib.sha256(lines[1]).hexdigest() != header.get("sha256"):
        raise StateFileError(f"{name} is damaged: its checksum does not match; use an earlier checkpoint")
    state = _parse(lines[1], f"{name} is damaged")
    if not isinstance(state, dict):
        raise StateFileError(f"{name} is damaged: it holds no state")
    return state


def _parse(line: bytes, complaint: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise StateFileError(f"{complaint} ({error})") from None
