# SPDX-License-Identifier: Apache-2.0
"""The study as one picture: a field for each cell, blue where it is as good as single precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

from .methods import METHODS, STORAGES
from .nets import NETS
from .plan import WEIGHTS
from .table import weight_label
from .training import runs_of
from .verdict import Cell, Key, Results, cells, count

# Of Okabe and Ito's colours, told apart by everybody; the cross tells them apart in grey, too.
_PASSES, _FAILS, _UNKNOWN = "#0072b2", "#f3b48b", "#eeeeee"
_CROSS = "#8f3b00"
_HEADS = {
    "none": "no scaling",
    "fixed_128": "fixed\n128",
    "dynamic_8": "dynamic\nnnabla's defaults",
    "dynamic_65536": "dynamic\ntorch's defaults",
    "one_scale": "one measured\nscale",
    "approx_range": "adaptive\napprox_range",
    "amax_history": "adaptive\ndefaults",
}
_STORAGE_NAMES = {
    "float16": "float16",
    "fp8_hybrid": "fp8 hybrid\n(gradients E5M2)",
    "e4m3": "fp8\n(gradients E4M3)",
    "e4m3_stored": "gradients stored\nin E4M3",
    "e5m2_stored": "gradients stored\nin E5M2",
}


def draw(path: Path, records: List[Dict[str, Any]]) -> None:
    """Draw the lines of the study's results."""
    _save(path, runs_of(records))


def _save(path: Path, results: Results) -> None:
    """Draw a row of panels for each storage, a panel for each method; nothing without a cell."""
    found = cells(results)
    storages = [name for name in STORAGES if any(key.storage == name for key in found)]
    if not storages:
        return
    nets = [net for net in NETS if any(key.net == net for key in found)]
    height = 1.35 + len(storages) * (0.62 + 0.21 * len(nets))
    figure, panels = plt.subplots(
        len(storages), len(METHODS), figsize=(11.0, height), squeeze=False, layout="constrained"
    )
    for index, (row, storage) in enumerate(zip(panels, storages)):
        first, last = index == 0, index == len(storages) - 1
        for column, (axes, method) in enumerate(zip(row, METHODS)):
            _panel(axes, found, storage, method, nets)
            if first:
                axes.annotate(
                    _HEADS[method],
                    (0.5, 1.0),
                    xytext=(0, 26),
                    xycoords="axes fraction",
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=11,
                    fontweight="bold" if "adaptive" in _HEADS[method] else "normal",
                )
            axes.set_yticks([n + 0.5 for n in range(len(nets))], nets if column == 0 else [])
            axes.set_xticks(
                [n + 0.5 for n in range(len(WEIGHTS))],
                [weight_label(weight) for weight in WEIGHTS] if last else [],
            )
        row[0].set_ylabel(_STORAGE_NAMES[storage], fontsize=11, fontweight="bold", labelpad=10)
    figure.supxlabel("what the loss is multiplied by", fontsize=10)
    figure.legend(
        handles=[
            Patch(color=_PASSES, label="trains as well as fp32"),
            Patch(color=_FAILS, label="does not (×)"),
            *([Patch(color=_UNKNOWN, label="not run")] if _incomplete(found, storages, nets) else []),
        ],
        loc="outside upper center",
        ncols=3,
        frameon=False,
        fontsize=12,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _incomplete(found: Mapping[Key, Cell], storages: Any, nets: Any) -> bool:
    return len(found) < len(storages) * len(nets) * len(WEIGHTS) * len(METHODS)


def _panel(axes: Any, found: Mapping[Key, Cell], storage: str, method: str, nets: Any) -> None:
    for y, net in enumerate(nets):
        for x, weight in enumerate(WEIGHTS):
            cell = found.get(Key(net, storage, weight, method))
            color = _UNKNOWN if cell is None else _PASSES if cell.passes else _FAILS
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", lw=1.5))
            if cell is not None and not cell.passes:
                axes.text(x + 0.5, y + 0.5, "×", color=_CROSS, ha="center", va="center_baseline", fontsize=9)
    axes.set_xlim(0, len(WEIGHTS))
    axes.set_ylim(len(nets), 0)
    axes.tick_params(length=0, labelsize=8.5)
    axes.spines[:].set_visible(False)
    passed, of = count(found, storage, method)
    axes.set_title(f"{passed} of {of}", fontsize=12, fontweight="bold", color=_PASSES if passed else _CROSS)
