# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import settings

# A loaded machine is no failure; the time of a test is looked at with --durations.
settings.register_profile("core", deadline=None, max_examples=60)
settings.load_profile("core")
