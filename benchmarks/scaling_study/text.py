# SPDX-License-Identifier: Apache-2.0
"""Numbers, paragraphs and tables in Markdown."""

from __future__ import annotations

import textwrap
from typing import Iterable, Sequence

import numpy as np


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, aligned to be read as text as well."""
    lines = [list(head), *map(list, body)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths)) + " |\n" for line in lines)


def weight_label(weight: float) -> str:
    """A loss weight as one writes it: 1, 1e-9."""
    return f"{weight:g}" if weight >= 1.0 else np.format_float_scientific(weight, trim="-", exp_digits=1)


def percent(share: float) -> str:
    """A share in percent; what is not zero does not look like zero."""
    return "< 0.01 %" if 0.0 < share < 5e-5 else f"{100.0 * share:.2f} %"


def paragraph(text: str) -> str:
    """A text in lines of 120 characters at most."""
    return textwrap.fill(text, 120) + "\n"
