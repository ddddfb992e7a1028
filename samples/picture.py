# SPDX-License-Identifier: Apache-2.0
"""Picture of each layer's loss scale over the training, and of each layer's underflow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Dict, Sequence

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from comparison import Result
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MultipleLocator
from networks import NETWORKS
from report import weight_label

_COLORS = {"no scaling": "#b8442f", "fixed (128)": "#d89a1c", "dynamic": "#2e6fb0", "adaptive": "#1a8a5f"}
_MARKERS = {"no scaling": "X", "fixed (128)": "s", "dynamic": "D", "adaptive": "o"}
# Dynamic is dashed, thin and on top: adaptive stays visible where both are equal.
_DASHES = {"dynamic": (4.0, 2.0)}
_SIZES = {"dynamic": 3.5, "adaptive": 7.0}
_STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "grid.color": "#e4e4e4",
    "font.size": 9,
}


def save(path: Path, results: Sequence[Result]) -> None:
    """Draw two rows for each network (scales, underflow), one column for each loss weight."""
    shown = [r for r in results if r.method in _COLORS]
    weights = sorted({r.loss_weight for r in shown}, reverse=True)
    networks = [name for name in NETWORKS if any(r.network == name for r in shown)]
    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(11.5, 12.5), layout="constrained")
        parts = figure.subfigures(len(networks), 1)
        for part, network in zip(parts, networks):
            of_network = [r for r in shown if r.network == network]
            part.suptitle(NETWORKS[network].title, fontsize=13, fontweight="bold", x=0.01, ha="left")
            scales, underflows = part.subplots(2, len(weights), sharey="row")
            for upper, lower, weight in zip(scales, underflows, weights):
                of_weight = [r for r in of_network if r.loss_weight == weight]
                upper.set_title(f"loss weight {weight_label(weight)}", fontweight="bold")
                _draw_scales(upper, of_weight)
                _draw_underflow(lower, of_weight)
            scales[0].set_ylabel("loss scale\n(adaptive: a line per layer)")
            underflows[0].set_ylabel("gradient elements\nthat underflow to zero")
        handles = [Line2D([], [], label=method, **_line(method), **_marker(method)) for method in _COLORS]
        figure.legend(
            handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=11
        )
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _draw_scales(axes: Any, results: Sequence[Result]) -> None:
    for r in results:
        # Only under adaptive scaling do layers have different scales.
        lines = list(r.scales.values()) if r.method == "adaptive" else [r.global_scale]
        for scales in lines:
            exponents = [math.log2(scale) for scale in scales]
            axes.step(
                r.iterations, exponents, where="post", alpha=0.6 if len(lines) > 1 else 1.0, **_line(r.method)
            )
    axes.set_xlabel("training batch")
    axes.yaxis.set_major_locator(MultipleLocator(8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda exponent, _: f"$2^{{{exponent:.0f}}}$"))
    axes.grid(axis="y")


def _draw_underflow(axes: Any, results: Sequence[Result]) -> None:
    for r in results:
        percents = [100.0 * share for share in r.underflow_by_layer.values()]
        axes.plot(list(r.underflow_by_layer), percents, clip_on=False, **_line(r.method), **_marker(r.method))
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0f} %"))
    axes.set_xlabel("layer, from the input to the output")
    axes.grid(axis="y")


def _line(method: str) -> Dict[str, Any]:
    on_top = 3.0 if method in _DASHES else 2.0
    return {
        "color": _COLORS[method],
        "dashes": _DASHES.get(method, (None, None)),
        "lw": 1.5,
        "zorder": on_top,
    }


def _marker(method: str) -> Dict[str, Any]:
    return {"marker": _MARKERS[method], "markersize": _SIZES.get(method, 5.0)}
