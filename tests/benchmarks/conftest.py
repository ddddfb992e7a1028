# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path

# Benchmarks are programs, each with its folder at the head of the path.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
