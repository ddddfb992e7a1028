# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path

# Test modules import the samples at their head.
sys.path.append(str(Path(__file__).parents[2] / "samples"))
