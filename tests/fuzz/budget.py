# SPDX-License-Identifier: Apache-2.0
"""How long to fuzz: ADALOSS_FUZZ=20 tries twenty times as many examples."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

FACTOR = float(os.environ.get("ADALOSS_FUZZ", "1"))


def budget(examples: int) -> Any:
    """Return hypothesis's settings for so many examples, times the factor that was asked for."""
    return settings(
        max_examples=max(int(examples * FACTOR), 1),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        # Longer runs are for finding something new; CI repeats itself.
        derandomize=FACTOR == 1.0,
    )
