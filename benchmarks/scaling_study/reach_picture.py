# SPDX-License-Identifier: Apache-2.0
"""How far each way of scaling reaches, as a picture: the ratio of two losses against the error."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Tuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from .reach_ways import FORMATS, WAYS, of_small_loss

# Of Okabe and Ito's colours; dashes and widths tell lines apart in grey, too.
_LINES: Dict[str, Tuple[str, str, float, str]] = {
    "none": ("#999999", ":", 1.5, "no scaling"),
    "fixed_128": ("#e69f00", ":", 1.5, "fixed 128"),
    "dynamic_8": ("#56b4e9", "--", 1.5, "dynamic from 8"),
    "dynamic_65536": ("#0072b2", "--", 1.5, "dynamic from 65536"),
    "one_scale": ("#000000", "-", 1.5, "one measured scale"),
    "approx_range": ("#cc79a7", "-", 1.5, "approx_range"),
    "approx_range_lifted": ("#cc79a7", "-.", 1.5, "approx_range without bounds"),
    "amax_history": ("#d55e00", "-", 3.0, "amax_history"),
}
_TITLES = {"heads": "two heads on one trunk", "towers": "two networks, one input"}


def draw(path: Path, records: List[Dict[str, Any]]) -> None:
    """Draw a panel for each format, and a row for each net."""
    nets = [net for net in _TITLES if any(r["net"] == net for r in records)]
    if not nets:
        return
    figure, panels = plt.subplots(
        len(nets),
        len(FORMATS),
        figsize=(14.0, 3.3 * len(nets) + 0.8),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for row, net in zip(panels, nets):
        for axes, storage in zip(row, FORMATS):
            _panel(axes, [r for r in records if (r["net"], r["storage"]) == (net, storage)])
            axes.set_title(storage, fontsize=11, loc="left")
        row[0].set_ylabel(f"{_TITLES[net]}\nerror of the worst layer\nof the small loss", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("small loss / large loss", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _panel(axes: Any, records: List[Dict[str, Any]]) -> None:
    for method in WAYS:
        mine = sorted((r for r in records if r["method"] == method), key=lambda r: -float(r["ratio"]))
        color, dashes, width, label = _LINES[method]
        ratios, errors = [r["ratio"] for r in mine], [of_small_loss(r) for r in mine]
        # Dashes show what they lie on.
        on_top = 3.0 if dashes == "--" else 2.0
        axes.plot(ratios, errors, color=color, ls=dashes, lw=width, label=label, zorder=on_top)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(3e-4, 3.0)
    axes.set_xlim(1.0, 1e-20)
    axes.set_xticks([1.0, 1e-5, 1e-10, 1e-15, 1e-20], ["1", "1e-5", "1e-10", "1e-15", "1e-20"])
    axes.minorticks_off()
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
