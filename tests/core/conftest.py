# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import HealthCheck, settings

# A loaded machine is no failure; the time of a test is looked at with --durations.
settings.register_profile(
    "core", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("core")
