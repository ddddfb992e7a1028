# SPDX-License-Identifier: Apache-2.0
"""Overhead of adaptive loss scaling per iteration: many small layers, few large ones.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py

Chains of affine layers and tanh are trained by a bare loop (zero_grad, forward, backward, update), by
nnabla's DynamicLossScalingUpdater, and by AdaptiveLossScalingUpdater with both methods, which take turns
iteration by iteration. Graphs are static; rebuilt before each iteration, by all four; or reshaped: rebuilt
for a batch of one of 32 sizes, as for sentences of different lengths. Or they are static, and the loss weight
alternates between 1 and 1e-9, or is drawn from 32 powers of two in each iteration. Times and ratios are
medians over blocks of 16 iterations (`blocks.py`).
"""

from __future__ import annotations

import argparse
import warnings
from collections import OrderedDict
from itertools import cycle
from statistics import median
from typing import Any, Dict, NamedTuple

import nnabla as nn
import nnabla.solvers as S
import numpy as np
from blocks import Action, bare_loop, means, ratio, take_turns
from cpu_networks import chain
from training_speed import without_repeats

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    LossScaleWarning,
)

ADAPTIVE = ("approx_range", "amax_history")
WAYS = ("bare loop", "dynamic", *ADAPTIVE)
_SIZES = 32


class Case(NamedTuple):
    """Chain of layers."""

    layers: int
    width: int
    batch: int
    graph: str  # "static", "rebuilt", "reshaped", or with a loss weight that is "turning" or "drawn"
    blocks: int


CASES = [
    Case(10, 8, 8, "static", 25),
    Case(10, 128, 32, "static", 15),
    Case(10, 1024, 32, "static", 4),
    Case(3, 4096, 32, "static", 3),
    Case(40, 32, 16, "static", 15),
    Case(100, 8, 8, "static", 10),
    Case(100, 128, 32, "static", 6),
    Case(1000, 8, 8, "static", 5),
    Case(10, 128, 32, "rebuilt", 10),
    Case(40, 32, 16, "rebuilt", 6),
    Case(10, 128, 32, "reshaped", 10),
    Case(40, 32, 16, "reshaped", 6),
    Case(40, 32, 16, "turning", 15),
    Case(40, 32, 16, "drawn", 15),
]


def trainer(case: Case, way: str) -> Action:
    """Make a function that trains a chain in one way."""
    scope: Any = OrderedDict()
    rng = np.random.default_rng(0)
    batches = [case.batch]
    if case.graph == "reshaped":
        batches = rng.permutation(np.linspace(1, 2 * case.batch, _SIZES, dtype=int)).tolist()
    data = cycle(
        nn.Variable.from_numpy_array(rng.standard_normal((batch, case.width)).astype(np.float32))
        for batch in batches
    )

    drawn = (2.0 ** -rng.permutation(_SIZES)).tolist()
    weights = cycle({"turning": [1.0, 1e-9], "drawn": drawn}.get(case.graph, []))
    weight = nn.Variable.from_numpy_array(np.ones((), np.float32))

    def build() -> nn.Variable:
        with nn.parameter_scope("", scope):
            loss = chain(next(data), case.layers, case.width)
            return loss * weight if case.graph in ("turning", "drawn") else loss

    loss = build()
    solver = S.Sgd(1e-3)
    with nn.parameter_scope("", scope):
        solver.set_parameters(nn.get_parameters())

    if way == "bare loop":

        def plain() -> None:
            weight.d = next(weights, 1.0)
            bare_loop(solver, build() if case.graph in ("rebuilt", "reshaped") else loss)()

        return plain

    def feed() -> None:
        weight.d = next(weights, 1.0)
        if case.graph in ("rebuilt", "reshaped"):
            updater.loss = build()

    if way == "dynamic":
        # nnabla's default feeder takes an argument that its update() does not pass.
        updater = DynamicLossScalingUpdater(solver, loss, feed)
        return updater.update  # type: ignore[no-any-return]
    updater = AdaptiveLossScalingUpdater(solver, loss, feed, config=AdaLossConfig(loss_scale_method=way))
    return without_repeats(updater)


def measure(case: Case) -> Dict[str, Any]:
    """Time the four ways on one chain, in turns."""
    taken = take_turns({way: trainer(case, way) for way in WAYS}, case.blocks)
    return {
        "ms": {way: 1e3 * median(means(times, "wall")) for way, times in taken.items()},
        "over_dynamic": {way: ratio(taken, way, "dynamic", "wall") for way in WAYS},
    }


HEADER = (
    f"{'layers':>6}{'width':>7}{'batch':>7}{'graph':>9}{'bare loop':>12}{'dynamic':>12}"
    f"{'approx_range':>14}{'amax_history':>14}"
)


def row(case: Case, found: Dict[str, Any]) -> str:
    """Write a line of the table: milliseconds of the bare loop and of dynamic, and ratios to dynamic."""
    ms, ratios = found["ms"], found["over_dynamic"]
    return (
        f"{case.layers:6}{case.width:7}{case.batch:7}{case.graph:>9}{ms['bare loop']:9.2f} ms"
        f"{ms['dynamic']:9.2f} ms{ratios['approx_range']:14.3f}{ratios['amax_history']:14.3f}"
    )


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    warnings.simplefilter("ignore", LossScaleWarning)
    print(HEADER)
    for case in CASES:
        print(row(case, measure(case)), flush=True)


if __name__ == "__main__":
    main()
