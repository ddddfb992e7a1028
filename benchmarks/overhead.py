# SPDX-License-Identifier: Apache-2.0
"""What adaptive loss scaling takes per iteration besides nnabla: many small layers, few large ones.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py

Chains of affine layers and tanh are trained by a bare loop (zero_grad, forward, backward, update), by
nnabla's DynamicLossScalingUpdater, and by AdaptiveLossScalingUpdater with both methods, which take turns
iteration by iteration. Graphs are static, rebuilt before each iteration, which all four do, or reshaped:
rebuilt for a batch of one of 32 sizes, as sentences of other lengths are. A time
is the mean over a block of 16 iterations, which are whole cycles of those that measure and those that do not,
and of these the median; a ratio is that of such means, block by block (`blocks.py`). Two more columns tell
iterations of a cycle apart for approx_range: *planned* is the median one, *measuring* the dearest.

The floor is what an adaptive iteration cannot do without: the bare loop, one pass over the scaled weights
and one over the parameters' gradients at the speed of memory, and asking nnabla for the address of each
of these arrays; and where the graph is built anew, once for what tells how (as `planning.py` does).
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import OrderedDict
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import nnabla as nn
import nnabla.solvers as S
import numpy as np
from blocks import Action, means, positions, ratio, take_turns
from cpu_networks import chain
from planning import ask
from training_speed import without_repeats

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    LossScaleWarning,
)
from nnabla_adaloss.host_context import HOST

ADAPTIVE = ("approx_range", "amax_history")
WAYS = ("bare loop", "dynamic", *ADAPTIVE)
_SIZES = 32


class Case(NamedTuple):
    """A chain of layers."""

    layers: int
    width: int
    batch: int
    graph: str  # "static", "rebuilt" for each iteration, or "reshaped" for a batch of another size
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
]


class Trainer(NamedTuple):
    """What trains a chain in one way."""

    action: Action
    build: Callable[[], nn.Variable]
    parameters: int
    numbers: int


def trainer(case: Case, way: str) -> Trainer:
    """What trains a chain in one way."""
    scope: Any = OrderedDict()
    rng = np.random.default_rng(0)
    batches = [case.batch]
    if case.graph == "reshaped":
        batches = rng.permutation(np.linspace(1, 2 * case.batch, _SIZES, dtype=int)).tolist()
    data = cycle(
        nn.Variable.from_numpy_array(rng.standard_normal((batch, case.width)).astype(np.float32))
        for batch in batches
    )

    def build() -> nn.Variable:
        with nn.parameter_scope("", scope):
            return chain(next(data), case.layers, case.width)

    loss = build()
    solver = S.Sgd(1e-3)
    with nn.parameter_scope("", scope):
        parameters = nn.get_parameters()
    solver.set_parameters(parameters)
    action = _updater_of(way, solver, loss, None if case.graph == "static" else build)
    return Trainer(action, build, len(parameters), sum(v.size for v in parameters.values()))


def _updater_of(way: str, solver: Any, loss: nn.Variable, build: Any) -> Action:
    if way == "bare loop":
        graph = [loss]

        def plain() -> None:
            if build is not None:
                graph[0] = build()
            solver.zero_grad()
            graph[0].forward(clear_no_need_grad=True)
            graph[0].backward(clear_buffer=True)
            solver.update()

        return plain

    def feed() -> None:
        if build is not None:
            updater.loss = build()

    if way == "dynamic":
        # nnabla's default feeder takes an argument that its update() does not pass.
        updater = DynamicLossScalingUpdater(solver, loss, feed)
        return updater.update  # type: ignore[no-any-return]
    updater = AdaptiveLossScalingUpdater(solver, loss, feed, config=AdaLossConfig(loss_scale_method=way))
    return without_repeats(updater)


def floor_of(bare: float, one: Trainer, *, rebuilt: bool) -> Tuple[float, float]:
    """Seconds that an adaptive iteration takes at least, from what the bare loop takes, and that nnabla takes
    to tell an address.
    """
    size = max(one.numbers, 1)
    source, target = nn.NdArray((size,)), np.empty(size, np.float32)
    source.fill(1.0)
    address: Callable[[], Any] = lambda: source.data_ptr(np.dtype(np.float32), HOST)  # noqa: E731
    address()
    data = source.data
    copying = median(_time(lambda: np.copyto(target, data)) for _ in range(9))
    asking = median(_time(address) for _ in range(99))
    reading = median(_reading(one) for _ in range(9)) if rebuilt else 0.0
    # Weights are read and written once, and so are gradients.
    return bare + 2.0 * copying + 1.5 * one.parameters * asking + reading, asking


def _reading(one: Trainer) -> float:
    """Seconds that nnabla takes to tell how a graph is built that was built just now."""
    one.action()
    loss = one.build()
    kept: List[Any] = []
    return _time(lambda: kept.append(ask(loss)))


def _time(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(case: Case) -> Dict[str, Any]:
    """Times the four ways on one chain, in turns."""
    made = {way: trainer(case, way) for way in WAYS}
    taken = take_turns({way: one.action for way, one in made.items()}, case.blocks)
    spent = {way: median(means(times, "wall")) for way, times in taken.items()}
    floor, asking = floor_of(spent["bare loop"], made["dynamic"], rebuilt=case.graph != "static")
    ratios = {way: ratio(taken, way, "dynamic", "wall") for way in WAYS}
    at = {way: [one.median for one in positions(times, "wall")] for way, times in taken.items()}
    common = median(at["dynamic"])
    return {
        **case._asdict(),
        "measuring_over_dynamic": {way: max(at[way]) / common for way in ADAPTIVE},
        "planned_over_dynamic": {way: median(at[way]) / common for way in ADAPTIVE},
        "ms": {way: 1e3 * s for way, s in spent.items()},
        "over_dynamic": ratios,
        "floor_ms": 1e3 * floor,
        "address_us": 1e6 * asking,
        "floor_over_dynamic": floor / spent["dynamic"],
    }


HEADER = (
    f"{'layers':>6}{'width':>7}{'batch':>7}{'graph':>9}{'bare loop':>12}{'dynamic':>12}"
    f"{'approx_range':>14}{'amax_history':>14}{'floor':>8}{'planned':>9}{'measuring':>11}"
)


def row(found: Dict[str, Any]) -> str:
    """A line of the table: milliseconds of the bare loop and of dynamic, and ratios over dynamic."""
    ms, ratios = found["ms"], found["over_dynamic"]
    return (
        f"{found['layers']:6}{found['width']:7}{found['batch']:7}{found['graph']:>9}{ms['bare loop']:9.2f} ms"
        f"{ms['dynamic']:9.2f} ms{ratios['approx_range']:14.3f}{ratios['amax_history']:14.3f}"
        f"{found['floor_over_dynamic']:8.3f}{found['planned_over_dynamic']['approx_range']:9.3f}"
        f"{found['measuring_over_dynamic']['approx_range']:11.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, help="write FILE.txt and FILE.json, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore", LossScaleWarning)
    print(HEADER)
    found, lines = [], [HEADER]
    for case in CASES:
        found.append(measure(case))
        lines.append(row(found[-1]))
        print(lines[-1], flush=True)
    if options.results is not None:
        options.results.with_suffix(".txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        text = json.dumps(found, indent=1) + "\n"
        options.results.with_suffix(".json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
