# SPDX-License-Identifier: Apache-2.0
"""Compile the CPU kernels beside their sources: `python -m building` in a checkout."""

from __future__ import annotations

from .native import LIBRARY, build_library

build_library(LIBRARY)
print(LIBRARY)
