# SPDX-License-Identifier: Apache-2.0
"""Calling a function in a process of its own.

Native libraries that do not fit together crash the process that loads them, and what was loaded once stays.
An examination of them therefore happens elsewhere.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any, Callable, NamedTuple, Union

_CHILD = """
import importlib, json, sys

module, name, arguments = sys.argv[1:]
try:
    outcome = {"value": getattr(importlib.import_module(module), name)(*json.loads(arguments))}
except BaseException as error:
    outcome = {"error": f"{type(error).__name__}: {error}"}
print("\\n" + json.dumps(outcome))
"""


class Outcome(NamedTuple):
    """What became of a call.

    Attributes:
        value: what the function returned, None if it failed.
        error: type and message of the exception, or how the process ended; empty if the call succeeded.
        said: what the function printed, up to where it ended.
    """

    value: Any = None
    error: str = ""
    said: str = ""


def call_isolated(function: Callable[..., Any], *arguments: Any, time_limit: float = 120.0) -> Outcome:
    """Call a module-level function in a new Python process.

    Args:
        function: takes and returns what JSON can represent.
        arguments: its positional arguments.
        time_limit: seconds after which the process is ended. The default leaves room for compilers.

    Returns:
        The outcome. Exceptions, crashes and silence are outcomes too: this function does not raise them.

    Example:
        >>> from os.path import basename
        >>> call_isolated(basename, "a/b")
        Outcome(value='b', error='', said='')
    """
    command = [sys.executable, "-c", _CHILD, function.__module__, function.__name__, json.dumps(arguments)]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=time_limit
        )
    except subprocess.TimeoutExpired as expired:
        return Outcome(None, f"TimeoutExpired: no answer within {time_limit:g} s", _text(expired.stdout))
    said, _, last_line = process.stdout.strip().rpartition("\n")
    try:
        return Outcome(**json.loads(last_line), said=said)
    except (ValueError, TypeError):
        return Outcome(None, _how_it_ended(process), process.stdout)


def _text(output: Union[str, bytes, None]) -> str:
    # Python does not decode what a process printed before its time was over.
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _how_it_ended(process: subprocess.CompletedProcess[str]) -> str:
    said = process.stderr.strip().rpartition("\n")[2]
    if process.returncode < 0:
        return f"Crash: the process ended by {signal.Signals(-process.returncode).name} {said}".rstrip()
    return f"Exit: the process ended with code {process.returncode} {said}".rstrip()
