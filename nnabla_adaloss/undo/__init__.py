# SPDX-License-Identifier: Apache-2.0
"""Snapshots for undoing a batch."""
