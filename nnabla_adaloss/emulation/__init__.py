# SPDX-License-Identifier: Apache-2.0
"""Emulated low-precision storage on a float context."""

from .format_emulation import FormatEmulation as FormatEmulation
from .format_emulation import GradientRounding as GradientRounding
from .format_emulation import with_storage as with_storage
