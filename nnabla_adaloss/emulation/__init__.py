# SPDX-License-Identifier: Apache-2.0
"""Emulated low-precision storage on a float context."""

from .format_emulation import FormatEmulation, GradientRounding, with_storage

__all__ = ["FormatEmulation", "GradientRounding", "with_storage"]
