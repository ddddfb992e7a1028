# SPDX-License-Identifier: Apache-2.0
"""A state as a JSON file: written atomically, checked when read.

The file holds one JSON object on two lines: a header with the kind of file, the version of the format and the
SHA-256 of the second line; and the state. Floats are written with as many digits as restore them bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Dict, Mapping

from .whole_file import PathLike, replace_file, special_kind

FORMAT_VERSION = 1
_KIND = "nnabla_adaloss state"
_LARGEST = 2**28  # bytes: hundreds of thousands of layers


class StateFileError(ValueError):
    """The file does not hold a state that can be loaded."""


def write_state(path: PathLike, state: Mapping[str, Any]) -> None:
    """Write as `replace_file` does; TypeError if JSON cannot hold `state`, ValueError if it is too large."""
    body = json.dumps(state, sort_keys=True).encode()
    header = {"kind": _KIND, "version": FORMAT_VERSION, "sha256": hashlib.sha256(body).hexdigest()}
    content = json.dumps(header).encode() + b"\n" + body + b"\n"
    if len(content) > _LARGEST:
        raise ValueError(
            f"state takes {len(content)} bytes, more than {_LARGEST}: save arrays in a file of their own"
        )
    replace_file(path, content)


def read_state(path: PathLike) -> Dict[str, Any]:
    """Read a file of `write_state`; StateFileError if it is damaged, of a newer version or not a state."""
    name = os.fsdecode(path)
    kind = special_kind(os.stat(name))
    if kind:
        raise StateFileError(f"{name} is {kind}, not a state file of nnabla_adaloss: give the path of a file")
    damaged, instead = f"{name} is damaged", "use an earlier checkpoint"
    with open(name, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = _parse(file.readline(4096), f"{name} is not a state file: its first line is not JSON")
        if not isinstance(header, dict) or header.get("kind") != _KIND:
            raise StateFileError(f"{name} is not a state file of nnabla_adaloss")
        if header.get("version") != FORMAT_VERSION:
            versions = f"format version {header.get('version')!r}, not {FORMAT_VERSION}"
            raise StateFileError(f"{name} has {versions}: update nnabla_adaloss, or {instead}")
        if size > _LARGEST:
            raise StateFileError(f"{damaged}: it has {size} bytes, a state at most {_LARGEST}; {instead}")
        body = file.read(size)
    if not body.endswith(b"\n") or hashlib.sha256(body[:-1]).hexdigest() != header.get("sha256"):
        raise StateFileError(f"{damaged}: its checksum does not match; {instead}")
    state = _parse(body, damaged)
    if not isinstance(state, dict):
        raise StateFileError(f"{damaged}: it does not hold a state")
    return state


def _parse(line: bytes, complaint: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # the latter: brackets in brackets in brackets
        raise StateFileError(f"{complaint} ({error})") from None
