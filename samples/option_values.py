# SPDX-License-Identifier: Apache-2.0
"""Values of options, for argparse."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> int:
    """Parse an integer of 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def positive_number(text: str) -> float:
    """Parse a finite number above 0."""
    number = float(text)
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not positive and finite")
    return number
