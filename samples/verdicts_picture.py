# SPDX-License-Identifier: Apache-2.0
"""Picture of the verdicts: a tile for each training, and the number of good ones in each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch
from problems import PROBLEMS
from verdicts import POINTS, REFERENCE, Verdicts, case_label

# Blue and orange differ for any colour vision, also in lightness.
_GOOD, _BAD, _NEUTRAL = "#1f6fb4", "#f2a65a", "#e6e6e6"
_LABELS = {
    "fp32": "fp32, for comparison",
    "dynamic": "nnabla's dynamic, from 8",
    "dynamic (65536)": "the same, from 65536",
    "one measured": "one scale, measured",
    "adaptive": "nnabla_adaloss",
}
# Gap between the columns of two networks, in tiles.
_GAP = 0.25


def save(path: Path, verdicts: Verdicts) -> None:
    """Draw a row for each method and a column for each network and loss weight."""
    networks = list(dict.fromkeys(network for network, _ in verdicts.cases))
    lefts = [index + _GAP * networks.index(case[0]) for index, case in enumerate(verdicts.cases)]
    right, bottom = lefts[-1] + 1.0, float(len(verdicts.methods))
    figure = plt.figure(figsize=(13.0, 6.4))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(-3.35, right + 1.45)
    axes.set_ylim(bottom + 0.8, -2.05)
    axes.axis("off")
    axes.text(
        -3.25,
        -1.6,
        "Does it train in fp16 as well as in fp32, without a loss scale to set?",
        fontsize=24,
        weight="bold",
        va="center",
    )
    for row, method in enumerate(verdicts.methods):
        ours = method == "adaptive"
        axes.text(
            -3.25, row + 0.5, _LABELS[method], fontsize=17, va="center", weight="bold" if ours else "normal"
        )
        for left, case in zip(lefts, verdicts.cases):
            _tile(axes, left, row, verdicts, method, case)
        if method != REFERENCE:
            good = verdicts.count(method)
            axes.text(
                right + 0.2,
                row + 0.5,
                f"{good} of {len(verdicts.compared)}",
                fontsize=22,
                weight="bold",
                va="center",
                color=_GOOD if good == len(verdicts.compared) else "#444444",
            )
    for network in networks:
        own = [left for left, case in zip(lefts, verdicts.cases) if case[0] == network]
        axes.text(
            (own[0] + own[-1] + 1.0) / 2,
            -0.82,
            PROBLEMS[network].title,
            fontsize=17,
            ha="center",
            va="center",
        )
    axes.text(-3.25, -0.27, "weight of the loss", fontsize=14, va="center", color="#444444")
    for left, case in zip(lefts, verdicts.cases):
        axes.text(left + 0.5, -0.27, case_label(case), fontsize=14, ha="center", va="center", color="#444444")
    axes.text(
        -3.25,
        bottom + 0.4,
        f"✓ test accuracy at most {POINTS} points below fp32's, ✗ further below; "
        "emulated fp16, handwritten digits, the same batches for all",
        fontsize=13,
        va="center",
        color="#444444",
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _tile(axes: Any, left: float, row: int, verdicts: Verdicts, method: str, case: Any) -> None:
    mark = verdicts.mark(method, case)
    color = {"✓": _GOOD, "✗": _BAD, "": _NEUTRAL}[mark]
    axes.add_patch(
        FancyBboxPatch(
            (left + 0.07, row + 0.09),
            0.86,
            0.82,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=color,
            edgecolor="none",
        )
    )
    axes.text(
        left + 0.5,
        row + 0.5,
        f"{mark} {100 * verdicts.accuracy(method, case):.0f}%".strip(),
        fontsize=15,
        ha="center",
        va="center",
        color="white" if color == _GOOD else "#222222",
        weight="bold" if mark else "normal",
    )
