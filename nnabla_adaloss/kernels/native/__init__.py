# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels in C, and the library that is made of them."""

from __future__ import annotations

from typing import List

__all__: List[str] = []
