# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from nnabla_adaloss.communicators.failure import Watchdog, exit_code_of, report


def test_watchdog_reports_a_block_that_takes_too_long_and_no_other():
    reports = []
    expired = threading.Event()
    watchdog = Watchdog(0.1, lambda *report: (reports.append(report), expired.set()))
    for _ in range(100):
        with watchdog.watch(lambda: "quick"):
            pass
    time.sleep(0.25)
    assert reports == []
    with watchdog.watch(lambda: "slow"):
        assert expired.wait(10)
    assert reports[0] == ("slow", 0.1)
    with pytest.raises(KeyError), watchdog.watch(lambda: "failed"):
        raise KeyError
    reports.clear()
    time.sleep(0.25)
    assert reports == []


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_watchdog_needs_a_positive_timeout(timeout_s):
    with pytest.raises(ValueError, match="`timeout_s` must be positive"):
        Watchdog(timeout_s, print)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(), 1),
        (KeyboardInterrupt(), 1),
        (SystemExit(), 0),
        (SystemExit(0), 0),
        (SystemExit(3), 3),
        (SystemExit("no data"), 1),
    ],
)
def test_exit_code_is_that_of_python(error, code):
    assert exit_code_of(error) == code


def test_every_line_of_a_report_names_the_rank(capsys):
    report(3, "one\n\ntwo\n")
    assert capsys.readouterr().err == "[rank 3] one\n[rank 3] \n[rank 3] two\n"


def test_uncaught_exceptions_reach_the_function_after_a_hook_that_was_there():
    program = (
        "import sys; from nnabla_adaloss.communicators import failure\n"
        "sys.excepthook = lambda *error: print('first', error[1])\n"
        "failure.on_uncaught_exception(lambda error: print('second', error))\n"
        "raise ValueError('bad data')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "first bad data\nsecond bad data\n"
    assert result.returncode == 1
