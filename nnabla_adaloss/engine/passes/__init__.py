# SPDX-License-Identifier: Apache-2.0
"""Backward passes: without hooks if the schedule allows it, else with hooks."""
