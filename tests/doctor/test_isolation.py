# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import sys
import time

from nnabla_adaloss.doctor.isolation import Outcome, call_isolated


def test_value_comes_back() -> None:
    assert call_isolated(os.path.commonprefix, ["abc", "abd"]) == Outcome(value="ab")


def test_what_the_function_prints_does_not_matter() -> None:
    assert call_isolated(print, "not JSON") == Outcome(value=None, said="not JSON\n")


def test_an_exception_is_told_with_its_type() -> None:
    assert call_isolated(os.listdir, "/no/such/folder").error.startswith("FileNotFoundError: ")


def test_an_exit_is_an_error() -> None:
    assert call_isolated(sys.exit, "enough").error == "SystemExit: enough"


def test_a_crash_names_the_signal() -> None:
    assert call_isolated(os.abort).error == "Crash: the process ended by SIGABRT"


def test_a_silent_end_names_the_exit_code() -> None:
    assert call_isolated(os._exit, 7).error == "Exit: the process ended with code 7"


def say_and_sleep(said: str) -> None:
    print(said, flush=True)
    time.sleep(60)


def test_what_was_said_before_the_end_is_kept() -> None:
    assert call_isolated(say_and_sleep, "half", time_limit=5.0).said == "half\n"


def test_time_is_limited() -> None:
    assert call_isolated(time.sleep, 60, time_limit=0.5).error == "TimeoutExpired: no answer within 0.5 s"
