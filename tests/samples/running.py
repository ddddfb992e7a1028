# SPDX-License-Identifier: Apache-2.0
"""Runs a sample as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(sample: str, *arguments: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A process of its own; what is in `path` comes before all that is installed."""
    paths = (str(path), str(ROOT), os.environ.get("PYTHONPATH", ""))
    return subprocess.run(
        [sys.executable, str(ROOT / "samples" / f"{sample}.py"), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
