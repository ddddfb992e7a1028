# SPDX-License-Identifier: Apache-2.0
"""Reach of each scaling method: two losses 1 : r on one network, and the error of each gradient."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import nnabla as nn
import nnabla.solvers as S
import numpy as np
from common.digits import load
from numpy.typing import NDArray

from nnabla_adaloss import Precision

from .experiment import Experiment, Line
from .methods import METHOD_TITLES, METHODS, STORAGES, Method, Trainee, train
from .several_losses import PAIRS, Terms, terms
from .text import paragraph, rows, weight_label

FORMATS: Dict[str, Precision] = {
    "float16": STORAGES["float16"],
    "bfloat16": Precision("bfloat16"),
    "fp8_hybrid": STORAGES["fp8_hybrid"],
    "float8_e5m2": Precision("float8_e5m2"),
    "float8_e4m3": Precision("float8_e4m3"),
}
WAYS: Dict[str, Method] = {name: METHODS[name] for name in METHOD_TITLES}
# Colour, marker, dashes and name; colours are those of compare.png.
_LINES: Dict[str, Tuple[str, str, str, str]] = {
    "none": ("#b8442f", "X", "-", "no scaling"),
    "fixed_128": ("#d89a1c", "s", "-", "fixed 128"),
    "dynamic_8": ("#7db0de", "d", "-", "dynamic from 8"),
    "dynamic_65536": ("#2e6fb0", "D", "-", "dynamic from 65536"),
    "one_scale": ("#222222", "^", ":", "one measured scale"),
    "approx_range": ("#8a5aa8", "v", ":", 'method "approx_range"'),
    "amax_history": ("#1a8a5f", "o", "-", "the default: adaptive"),
}
_TITLES = {"heads": "two heads on one trunk", "towers": "two networks, one input"}
_EXPONENTS = range(0, -21, -1)
_UPDATES = 24
_TIMES = 2.0

Gradients = Dict[str, NDArray[np.float64]]


class ReachJob(NamedTuple):
    """Job of one ratio."""

    net: str
    storage: str
    method: str
    ratio: float


def experiment(quick: bool) -> Experiment:
    """Define the jobs: all ratios of a format and method after each other."""
    jobs = [
        ReachJob(net, storage, method, float(f"1e{exponent}"))
        for net in (("heads",) if quick else PAIRS)
        for storage in (("float16",) if quick else FORMATS)
        for method in WAYS
        for exponent in _EXPONENTS
    ]
    return Experiment(jobs, work, table, draw)


def work(job: ReachJob) -> Line:
    """Run batches without updates until scales are stable, and compare the last gradients."""
    nn.seed(0)
    with nn.parameter_scope("", OrderedDict()):
        losses = terms(PAIRS[job.net], load(), 0)
        parameters = nn.get_parameters()
        losses.feed()
        exact = combined(losses, parameters, job.ratio)
        solver = S.Sgd(0.0)
        solver.set_parameters(parameters)
        trainee = Trainee(losses.large + losses.small * job.ratio, solver, lambda: None)
        train(WAYS[job.method], [trainee], FORMATS[job.storage], _UPDATES)
        errors = {name: _error(p.g, exact[name]) for name, p in parameters.items() if name.endswith("W")}
    return {"errors": {name.rsplit("/", 2)[0]: float(f"{error:.3g}") for name, error in errors.items()}}


def combined(losses: Terms, parameters: Dict[str, nn.Variable], ratio: float) -> Gradients:
    """Combine the gradients of both losses in float to those of the weighted sum, in float64."""
    of_terms: List[Gradients] = []
    for loss in (losses.large, losses.small):
        for parameter in parameters.values():
            parameter.grad.zero()
        loss.forward()
        loss.backward()
        of_terms.append({name: p.g.astype(np.float64) for name, p in parameters.items()})
    large, small = of_terms
    return {name: large[name] + ratio * small[name] for name in parameters}


def _error(found: NDArray[np.float32], exact: NDArray[np.float64]) -> float:
    """Relative error; 1, as of a lost gradient, if the gradient is not finite."""
    error = float(np.linalg.norm(found.astype(np.float64) - exact) / np.linalg.norm(exact))
    return error if np.isfinite(error) else 1.0


def of_small_loss(line: Line) -> float:
    """Error of the worst layer that only the small loss trains."""
    return float(max(error for name, error in line["errors"].items() if name.startswith("small")))


def table(lines: List[Line]) -> str:
    """Write the smallest ratio that each method reaches, and errors by layer at some ratios."""
    parts = [
        "# How far one scale reaches\n",
        "Made by `python benchmarks/study.py reach` (`--report` makes it again from what is there).\n",
        paragraph(
            "Two losses, 1 : r, tell of a batch of digits whether they are odd, and which they are. The "
            "parameters stay as they are, 24 times the same batch, so that scales settle. The error of a "
            "layer's weight gradient is the norm of its difference from that of float32, the terms added in "
            "float64, divided by the norm of the latter; the rounding of activations and weights is in it."
        ),
        paragraph(
            "In the tables: the smallest r at which the worst layer of the small loss has an error of at "
            f"most {_TIMES:g} times the least that any method has at r = 1."
        ),
    ]
    for net in PAIRS:
        mine = [line for line in lines if line["net"] == net]
        if mine:
            body = [[method, *(_smallest(mine, storage, method) for storage in FORMATS)] for method in WAYS]
            parts += [f"## {_TITLES[net].capitalize()}\n", rows(["", *FORMATS], body)]
    return "\n".join(parts).rstrip() + "\n"


def _smallest(lines: Sequence[Line], storage: str, method: str) -> str:
    own = [line for line in lines if line["storage"] == storage]
    at_one = [of_small_loss(line) for line in own if line["ratio"] == 1.0]
    reached = ""
    for line in sorted((r for r in own if r["method"] == method), key=lambda r: -float(r["ratio"])):
        if of_small_loss(line) > _TIMES * min(at_one):
            return reached or "none"
        reached = weight_label(line["ratio"])
    return reached


def draw(path: Path, lines: List[Line]) -> None:
    """Draw a panel for each format, and a row for each net: the ratio against the error."""
    from matplotlib.figure import Figure

    nets = [net for net in _TITLES if any(line["net"] == net for line in lines)]
    # Read at the width of a page, and on a phone.
    figure = Figure(figsize=(9.0, 2.4 * len(nets) + 0.6), layout="constrained")
    panels = figure.subplots(len(nets), len(FORMATS), squeeze=False, sharey=True)
    for row, net in zip(panels, nets):
        for axes, storage in zip(row, FORMATS):
            _panel(axes, [r for r in lines if (r["net"], r["storage"]) == (net, storage)])
            axes.set_title(storage, fontsize=10, loc="left")
        row[0].set_ylabel(f"{_TITLES[net]}\nerror of the worst layer\nof the small loss", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("small / large loss", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=10)
    figure.savefig(path, dpi=150)


def _panel(axes: Any, lines: List[Line]) -> None:
    for index, method in enumerate(WAYS):
        mine = sorted((r for r in lines if r["method"] == method), key=lambda r: -float(r["ratio"]))
        color, marker, dashes, label = _LINES[method]
        ratios, errors = [r["ratio"] for r in mine], [of_small_loss(r) for r in mine]
        # Markers alternate, so that coinciding lines are visible.
        turns = {"marker": marker, "markevery": (index, len(WAYS)), "markersize": 5.0, "clip_on": False}
        # The line beneath is visible between dots.
        width, on_top = (1.0, 3.0) if dashes == ":" else (1.8, 2.0)
        axes.plot(ratios, errors, color=color, ls=dashes, lw=width, label=label, zorder=on_top, **turns)
    axes.set(xscale="log", yscale="log", ylim=(3e-4, 3.0), xlim=(1.0, 1e-20))
    axes.set_xticks([1.0, 1e-10, 1e-20], ["1", "1e-10", "1e-20"])
    axes.minorticks_off()
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
