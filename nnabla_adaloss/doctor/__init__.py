# SPDX-License-Identifier: Apache-2.0
"""Examination of an installation: working parts, missing parts, and how to add them."""
