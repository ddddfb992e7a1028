# SPDX-License-Identifier: Apache-2.0
"""Recorded training as one HTML page without scripts or network access."""
