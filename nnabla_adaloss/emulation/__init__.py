# SPDX-License-Identifier: Apache-2.0
"""Emulated low-precision storage on a float context."""
