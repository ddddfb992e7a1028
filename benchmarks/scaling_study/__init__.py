# SPDX-License-Identifier: Apache-2.0
"""Experiments of `benchmarks/study.py`; data and some networks are those of the samples."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "samples"))
