# SPDX-License-Identifier: Apache-2.0
"""Results as a table and as a file."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Sequence

import numpy as np
from comparison import Result
from networks import NETWORKS
from training import Settings

_HEAD = ("", "test accuracy", "final loss", "skipped updates", "underflow", "time per batch")

_CAPTION = """\
test accuracy    of 360 images, with the fp32 weights
final loss       mean cross entropy of the 1437 training images, without the loss weight
skipped updates  batches dropped because a gradient was infinite or NaN
underflow        gradient elements that are zero as stored but not in fp32
time per batch   mean, relative to fp32 in the same process; emulation of fp16 storage included"""


def table(results: Sequence[Result]) -> str:
    """Write the table with its caption, one block for each network and loss weight."""
    lines = []
    for (network, weight), block in groupby(results, key=lambda r: (r.network, r.loss_weight)):
        rows = [_HEAD, *map(_row, block)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
        widths[0] = 11
        lines += ["", f"{NETWORKS[network].title}, loss weight {weight_label(weight)}"]
        for row in rows:
            cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))]
            lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join([*lines, "", _CAPTION])


def _row(r: Result) -> tuple[str, ...]:
    return (
        r.method,
        f"{r.test_accuracy:.1%}",
        f"{r.final_loss:.4f}",
        str(r.skipped_updates),
        percent(r.underflow),
        f"x {r.relative_time:.2f}" if r.method != "fp32" else f"{r.milliseconds:.1f} ms",
    )


def weight_label(weight: float) -> str:
    """Write a loss weight: 1, 1e-4."""
    if 1.0 <= weight < 1000.0:
        return f"{weight:g}"
    return np.format_float_scientific(weight, trim="-", exp_digits=1).replace("e+", "e")


def percent(share: float) -> str:
    """Write a share in percent; a nonzero one does not look like zero."""
    if 0.0 < share < 5e-5:
        return "< 0.01%"
    return f"{share:.2%}"


def save(path: Path, settings: Settings, results: Sequence[Result]) -> None:
    """Write everything to a JSON file."""
    content = {"settings": settings._asdict(), "results": [r._asdict() for r in results]}
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
