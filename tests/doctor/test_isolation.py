# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nnabla_adaloss.doctor.isolation import Outcome, call_isolated


def behave(what: str) -> str:
    if what == "crash":
        os.abort()
    if what == "hang":
        time.sleep(60)
    if what == "raise":
        raise KeyError(what)
    return str(os.getpid())


def test_values_come_back_whatever_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    assert call_isolated(os.path.commonprefix, [["abc", "abd"]], [[]]) == [Outcome("ab"), Outcome("")]
    assert call_isolated(print, ["not JSON"]) == [Outcome(None)]
    assert call_isolated(os.system, ["echo not JSON"]) == [Outcome(0)]
    assert call_isolated(print) == []


@pytest.mark.parametrize(
    ("function", "argument", "error"),
    [
        (os.listdir, "/no/such/folder", "FileNotFoundError: "),
        (sys.exit, "enough", "SystemExit: enough"),
        (behave, "crash", "Crash: the process ended by SIGABRT"),
        (os._exit, 7, "Exit: the process ended with code 7"),
        (os._exit, 0, "Exit: the process ended with code 0"),
        (Path, "no JSON", "Exit: the process ended with code 1 TypeError: "),
    ],
)
def test_errors_and_silence_are_outcomes(function: Any, argument: Any, error: str) -> None:
    (outcome,) = call_isolated(function, [argument])
    assert outcome.error.startswith(error)


def test_another_process_goes_on_behind_a_call_that_fails() -> None:
    calls = ["tell", "tell", "raise", "tell", "crash", "tell", "hang", "tell"]
    found = call_isolated(behave, *([call] for call in calls), time_limit=5.0)
    assert found[2].error == "KeyError: 'raise'"
    assert found[4].error.startswith("Crash: the process ended by SIGABRT")
    assert found[6].error == "TimeoutExpired: no answer within 5 s"
    first, *processes = [found[i].value for i in (0, 1, 3, 5, 7)]
    assert processes[0] == first
    assert len({*processes}) == 4
