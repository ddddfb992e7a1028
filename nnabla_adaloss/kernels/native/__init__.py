# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels in C: where the library of them lies, and what it is made of.

The build reads this file too, by itself: it imports nothing of the package.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import List

__all__ = ["LIBRARY", "digest", "sources"]

HERE = Path(__file__).parent
LIBRARY = HERE / "libadaloss_cpu.so"


def sources() -> List[Path]:
    """The C files and headers, beside this one in a checkout; a wheel has none."""
    return sorted(path for path in HERE.rglob("*") if path.suffix in {".c", ".h"})


def digest() -> str:
    """Digest that tells these sources from others."""
    told = hashlib.sha256()
    for path in sources():
        told.update(str(path.relative_to(HERE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return told.hexdigest()[:16]
