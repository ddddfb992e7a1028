# SPDX-License-Identifier: Apache-2.0
"""Saved states: one file each, written atomically."""
