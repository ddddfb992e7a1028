# SPDX-License-Identifier: Apache-2.0
"""Emulated low-precision storage on a float context."""

from .format_emulation import FormatEmulation, GradientRounding

__all__ = ["FormatEmulation", "GradientRounding"]
