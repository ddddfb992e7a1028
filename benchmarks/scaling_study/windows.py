# SPDX-License-Identifier: Apache-2.0
"""What margins and windows cost: overflows where they are small, underflow where they are large."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from nnabla_adaloss import AdaLossConfig
from nnabla_adaloss.core.methods import AmaxHistory
from nnabla_adaloss.core.scale_history import HistoryPolicy

from .experiment import Experiment
from .methods import adaptive
from .table import paragraph, percent, rows
from .training import Run, train

_NETS = ("lenet", "mlp8", "gan", "mlp24", "detector")
_MARGINS = (2.0, 4.0, 8.0, 16.0)
# 8, 16 and 64 measurements.
_WINDOWS = (8, 64, 512)
_METHODS = ("approx_range", "amax_history")
_ITERATIONS = 600
_WEIGHT = 1e-3


class WindowJob(NamedTuple):
    """One training."""

    net: str
    method: str
    margin: float
    window: int
    seed: int


def experiment(only: Optional[Sequence[str]]) -> Experiment:
    """All margins and windows of a network after the other."""
    jobs = [
        WindowJob(net, method, margin, window, 0)
        for net in only or _NETS
        for method in _METHODS
        for margin in _MARGINS
        for window in _WINDOWS
    ]
    return Experiment("windows", jobs, work, markdown)


def work(job: WindowJob) -> Dict[str, Any]:
    """Train in float16 and count."""
    if job.method == "amax_history":
        make = adaptive(config=AdaLossConfig(loss_scale_method=AmaxHistory(job.margin, job.window)))
    else:
        config = AdaLossConfig(loss_scale_method=job.method)
        make = adaptive(global_scale=HistoryPolicy(job.margin, job.window), config=config)
    result = train(Run(job.net, "float16", _WEIGHT, job.method, job.seed, _ITERATIONS), make)
    kept = ("score", "batches", "lost", "repeats", "overflows", "underflow", "seconds", "error")
    return {**job._asdict(), **{name: getattr(result, name) for name in kept}}


def markdown(_picture: str, records: List[Dict[str, Any]]) -> str:
    """A row for each network and margin, the windows beside each other."""
    parts = [
        "# Margins and windows\n",
        paragraph(
            f"Made by `python benchmarks/study.py --windows`: float16, loss weight {_WEIGHT:g}, "
            f"{_ITERATIONS} iterations. Overflows of 1000 batches, and the share of elements of "
            "gradients that became zero. With one measurement in eight iterations, windows of 8, 64 and 512 "
            "iterations hold 8, 16 and 64."
        ),
    ]
    titles = {
        "approx_range": "## The scale at the loss: `global_scale=HistoryPolicy(margin, window)`\n",
        "amax_history": "## The scale of each component: `AmaxHistory(margin, window)`\n",
    }
    for method, title in titles.items():
        known = {(r["net"], r["margin"], r["window"]): r for r in records if r["method"] == method}
        body = []
        for net in dict.fromkeys(net for net, _, _ in known):
            for margin in _MARGINS:
                mine = [known.get((net, margin, window)) for window in _WINDOWS]
                body.append([net, f"{margin:g}", *map(_shown, mine)])
        parts += [title, rows(["", "margin", *(f"window {window}" for window in _WINDOWS)], body)]
    return "\n".join(parts)


def _shown(record: Optional[Dict[str, Any]]) -> str:
    if record is None:
        return ""
    overflows = 1e3 * record["overflows"] / record["batches"]
    return f"{overflows:.1f}, {percent(record['underflow'])}"
