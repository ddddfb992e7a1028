# SPDX-License-Identifier: Apache-2.0
"""Examination of an installation: what is there, what is missing, and what to do about it."""

from __future__ import annotations

from .checks import examine
from .findings import Area, Finding, Status, area_works, as_json, as_text

__all__ = ["Area", "Finding", "Status", "area_works", "as_json", "as_text", "examine"]
