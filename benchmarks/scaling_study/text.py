# SPDX-License-Identifier: Apache-2.0
"""Numbers, paragraphs and tables in Markdown."""

from __future__ import annotations

import textwrap
from typing import Iterable, Sequence

import numpy as np


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown, aligned as text."""
    lines = [list(head), *map(list, body)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths)) + " |\n" for line in lines)


def weight_label(weight: float) -> str:
    """Write a loss weight: 1, 1e-9."""
    return f"{weight:g}" if weight >= 1.0 else np.format_float_scientific(weight, trim="-", exp_digits=1)


def percent(share: float) -> str:
    """Write a share in percent; a nonzero one does not look like zero."""
    return "< 0.01 %" if 0.0 < share < 5e-5 else f"{100.0 * share:.2f} %"


def paragraph(text: str) -> str:
    """Wrap a text into lines of 120 characters at most."""
    return textwrap.fill(text, 120) + "\n"
