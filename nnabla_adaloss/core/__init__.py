# SPDX-License-Identifier: Apache-2.0
"""Decisions: components, choice, memory, verdict, methods and formats, apart from any framework."""
