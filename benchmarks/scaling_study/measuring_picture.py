# SPDX-License-Identifier: Apache-2.0
"""What measuring costs, and what is missed where it is left out, as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from .jumps import AT
from .measuring_table import (
    by_key,
    calm,
    held_over_measuring,
    jumped,
    mean_by_distance,
    per_thousand,
    relative_time,
    until,
)

# Of Okabe and Ito's colours; the lines tell storages apart in grey, too.
_COLORS = {"approx_range": "#0072b2", "amax_history": "#d55e00"}
_LINES = {"float16": "-", "e4m3_stored": "--"}
_JUMP = "2^-10, for good"
_TIME_COLORS = ("#009e73", "#cc79a7", "#56b4e9")


def draw(path: Path, records: List[Dict[str, Any]]) -> None:
    """Draw underflow, overflows, time and how soon a scale is right again against the distance."""
    trainings = calm(records)
    distances = sorted({r["every"] for r in trainings})
    if not distances:
        return
    figure, ((lost, over), (cost, jumps)) = plt.subplots(2, 2, figsize=(11.0, 7.6), layout="constrained")
    for storage, line in _LINES.items():
        for method, color in _COLORS.items():
            mine = [r for r in trainings if (r["storage"], r["method"]) == (storage, method)]
            how: Dict[str, Any] = {"color": color, "ls": line, "marker": "o", "label": f"{storage}, {method}"}
            shares = mean_by_distance(mine, distances, lambda r: 100.0 * r["underflow"])
            lost.plot(distances, shares, **how)
            over.plot(distances, mean_by_distance(mine, distances, per_thousand), **how)
    measured = mean_by_distance(trainings, distances, lambda r: float(r["measured"]))
    for color, (net, ratio) in zip(_TIME_COLORS, held_over_measuring(records).items()):
        times = [relative_time(share, ratio) for share in measured]
        cost.plot(distances, times, color=color, marker="o", label=net)
    _jumps(jumps, records, distances)
    lost.set_yscale("log")
    lost.yaxis.set_major_formatter("{x:g}")
    cost.set_ylim(0.0, 1.05)
    titles = {
        lost: "elements of gradients that became zero, %",
        over: "overflows of 1000 batches (each a repeat)",
        cost: "time of an iteration, relative to measuring always",
        jumps: f"batches until the scale is right: {_JUMP}",
    }
    for axes, title in titles.items():
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_xscale("log", base=2)
        axes.set_xticks(distances, [str(every) for every in distances])
        axes.set_xlabel("measured in one of n iterations", fontsize=9)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    # Room for the legend.
    over.set_ylim(0.0, 1.4 * over.get_ylim()[1])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _jumps(axes: Any, records: Sequence[Dict[str, Any]], distances: Sequence[int]) -> None:
    known = by_key(records)
    mine = [r for r in jumped(records) if r["jump"] == _JUMP]
    end = max((r["batches"] for r in mine), default=AT) - AT
    for line, (method, color) in zip(("-", "--"), _COLORS.items()):
        cells = {r["every"]: r for r in mine if r["method"] == method}
        there = [every for every in distances if every in cells]
        batches = [until(cells[every], known) for every in there]
        shown = [end if right is None else right for right in batches]
        axes.plot(there, shown, color=color, ls=line, marker="o", label=method)
    axes.axhline(end, color="grey", lw=1)
    axes.annotate("the training ends", (distances[0], end), xytext=(0, 3), textcoords="offset points")
