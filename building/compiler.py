# SPDX-License-Identifier: Apache-2.0
"""Choice of the C compiler for the CPU kernels."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import sys
from typing import List, Optional

packaged_compiler = "ziglang>=0.13"
"""Package with the C compiler clang, for machines without a compiler."""


def system_compiler() -> Optional[List[str]]:
    """Find this machine's C compiler: `CC`, else cc, gcc or clang; None if there is none."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return [found] if found else None


def compiler() -> List[str]:
    """Choose the command that compiles C.

    Raises:
        SystemExit: there is no compiler.
    """
    command = system_compiler()
    if command is None and importlib.util.find_spec("ziglang") is not None:
        # By default it compiles only for this processor and C library.
        command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{platform.machine()}-linux-gnu.2.17"]
    if command is None:
        raise SystemExit(
            "nnabla-adaloss compiles its CPU kernels and there is no C compiler: install gcc or clang, "
            "or `pip install ziglang`, then try again"
        )
    return command
