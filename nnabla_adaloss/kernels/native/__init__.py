# SPDX-License-Identifier: Apache-2.0
"""CPU kernels in C: path of the library, and its sources.

The build runs this file alone: it must not import the package.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import List

HERE = Path(__file__).parent
LIBRARY = HERE / "libadaloss_cpu.so"


def sources() -> List[Path]:
    """C files and headers, in a checkout only."""
    return sorted(path for path in HERE.rglob("*") if path.suffix in {".c", ".h"})


def digest() -> str:
    """Digest that identifies the sources."""
    checksum = hashlib.sha256()
    for path in sources():
        checksum.update(str(path.relative_to(HERE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return checksum.hexdigest()[:16]
