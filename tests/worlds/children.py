# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked: without the seconds that importing everything again takes."""

from __future__ import annotations

import os
import traceback
from typing import Callable


def in_a_child(action: Callable[[], None]) -> int:
    """Run this in a process of its own; return its number."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def end_of(pid: int) -> int:
    """Wait for the end of a process; return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
