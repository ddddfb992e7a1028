# SPDX-License-Identifier: Apache-2.0
"""Calling a function in a process of its own.

Native libraries that do not fit together crash the process that loads them, and what was loaded once stays.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any, Callable, List, NamedTuple, Sequence

# Seconds; leaves room for compilers.
_TIME_LIMIT = 120.0

_CHILD = """
import importlib, json, os, sys

answers = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print is not taken for an answer
module, name, *calls = sys.argv[1:]
for arguments in calls:
    try:
        answer = {"value": getattr(importlib.import_module(module), name)(*json.loads(arguments))}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    os.write(answers, json.dumps(answer).encode() + b"\\n")
    if "error" in answer:
        break
"""


class Outcome(NamedTuple):
    """What became of a call: a value, or an error, which is how the process ended if nothing was raised."""

    value: Any = None
    error: str = ""


def call_isolated(
    function: Callable[..., Any], *calls: Sequence[Any], time_limit: float = _TIME_LIMIT
) -> List[Outcome]:
    """Call a module-level function in a new process, once with each of some lists of arguments.

    After a call that fails, the next process goes on: what a GPU's context does after an error says nothing.
    Exceptions, crashes and silence are outcomes. Values are what JSON can represent.
    """
    outcomes: List[Outcome] = []
    while len(outcomes) < len(calls):
        waiting = [json.dumps(arguments) for arguments in calls[len(outcomes) :]]
        command = [sys.executable, "-c", _CHILD, function.__module__, function.__name__, *waiting]
        try:
            process = subprocess.run(command, capture_output=True, timeout=time_limit)
            said, ended = process.stdout, _how_it_ended(process)
        except subprocess.TimeoutExpired as expired:
            said, ended = expired.stdout or b"", f"TimeoutExpired: no answer within {time_limit:g} s"
        answers = [Outcome(**json.loads(line)) for line in said.splitlines()]
        if len(answers) < len(waiting) and not any(answer.error for answer in answers):
            answers.append(Outcome(error=ended))
        outcomes += answers
    return outcomes


def _how_it_ended(process: subprocess.CompletedProcess[bytes]) -> str:
    said, code = process.stderr.decode(errors="replace").strip().rpartition("\n")[2], process.returncode
    how = f"Crash: the process ended by {signal.Signals(-code).name}" if code < 0 else ""
    return f"{how or f'Exit: the process ended with code {code}'} {said}".rstrip()
