# SPDX-License-Identifier: Apache-2.0
"""Cost of adaptive loss scaling relative to dynamic, on small models of published kinds.

    OMP_NUM_THREADS=1 python benchmarks/published_shapes.py
    OMP_NUM_THREADS=1 python benchmarks/published_shapes.py lstm darts --graph static --storage float16
    OMP_NUM_THREADS=1 python benchmarks/published_shapes.py --kinds --graph static

Each model is trained by nnabla's DynamicLossScalingUpdater and by AdaptiveLossScalingUpdater, which take
turns iteration by iteration, on eight batches in rotation. Its graph is static, or rebuilt for each batch;
numbers are stored in emulated fp16, or as nnabla stores them (none), with both updaters alike. A ratio is
adaptive's CPU time over dynamic's: the median over blocks of 16 iterations (`blocks.py`). The ratios include
batches that ran again, whose number stands beside them.

With `--kinds`, it counts the kinds of the last backward of an update: "hookless", "measuring", or the reason
for hooks around single functions; and the batches that ran again, except the first one.

For another checkout of the package, in which kernels are built, start it from elsewhere with its folder:

    cd /tmp && PYTHONPATH=OTHER OMP_NUM_THREADS=1 python CHECKOUT/benchmarks/published_shapes.py
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter, OrderedDict
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn
import nnabla.solvers as S
import numpy as np
from blocks import BLOCK, means, ratio, take_turns
from published_models import MODELS, Model

import nnabla_adaloss
from nnabla_adaloss import (
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FormatEmulation,
    LossScaleWarning,
)

GRAPHS = ("static", "rebuilt")
STORAGES = ("float16", "none")
UPDATES = 200
_BATCHES = 8


class Training:
    """Training of one model in one way; each instance has parameters of its own."""

    def __init__(self, model: Model, method: str, graph: str, storage: str) -> None:
        self._model, self._storage, self._rebuilt = model, storage, graph == "rebuilt"
        self._scope: Any = OrderedDict()
        nn.seed(0)
        nn.random.set_parameter_seed(0)
        random = np.random.default_rng(0)
        batches = [model.batch(random) for _ in range(_BATCHES)]
        self._batches = cycle(batches)
        self._inputs = [nn.Variable(array.shape) for array in batches[0]]
        self.updates = self.fed = 0
        # Update number of each repeat of a batch.
        self.repeats: List[int] = []
        losses = self._losses()
        self.functions = sum(map(count_functions, losses.values()))
        self.updaters: List[Any] = []
        for index, (scope, loss) in enumerate(losses.items()):
            solver = S.Momentum(model.rate)
            with nn.parameter_scope("", self._scope):
                found = nn.get_parameters()
            solver.set_parameters({name: found[name] for name in found if name.startswith(scope)})
            # The first updater feeds; calls of the others are only counted.
            feed = self._count if index else self._feed
            make = AdaptiveLossScalingUpdater if method == "adaptive" else DynamicLossScalingUpdater
            self.updaters.append(make(solver, self._stored(loss), feed))

    def update(self) -> List[Any]:
        """Train one iteration, an update of each player; return the updaters' results."""
        before = self.fed
        results = [updater.update() for updater in self.updaters]
        self.updates += 1
        # The dynamic updater takes another batch; the adaptive one reports retries.
        told = [result.retries for result in results if result is not None]
        again = sum(told) if told else self.fed - before - len(self.updaters)
        self.repeats += [self.updates] * again
        return results

    @property
    def losses(self) -> List[float]:
        """Losses of the last batch."""
        found = [updater.loss for updater in self.updaters]
        return [float((loss if isinstance(loss, nn.Variable) else loss.variable).d) for loss in found]

    def _losses(self) -> Dict[str, nn.Variable]:
        with nn.parameter_scope("", self._scope):
            losses = self._model.build(*self._inputs)
        return {"": losses} if isinstance(losses, nn.Variable) else losses

    def _stored(self, loss: nn.Variable) -> Any:
        return loss if self._storage == "none" else FormatEmulation(loss, self._storage, float_tail=True)

    def _count(self) -> None:
        self.fed += 1

    def _feed(self) -> None:
        self._count()
        for variable, array in zip(self._inputs, next(self._batches)):
            variable.d = array
        if self._rebuilt and self.fed > 1:
            for updater, loss in zip(self.updaters, self._losses().values()):
                updater.loss = self._stored(loss)


def count_functions(loss: nn.Variable) -> int:
    """Count the functions that compute a loss."""
    found: List[Any] = []
    loss.visit(found.append)
    return len(found)


class Row(NamedTuple):
    """Measurements of one model with one graph, by storage."""

    functions: int
    ms: Dict[str, float]
    ratios: Dict[str, float]
    repeats: Dict[str, int]


def measure(model: Model, graph: str, storages: Sequence[str], blocks: int) -> Row:
    """Time both updaters in turns, with each storage."""
    row = Row(0, {}, {}, {})
    for storage in storages:
        trainings = {way: Training(model, way, graph, storage) for way in ("dynamic", "adaptive")}
        taken = take_turns({way: training.update for way, training in trainings.items()}, blocks)
        row = row._replace(functions=trainings["dynamic"].functions)
        row.ms[storage] = 1e3 * median(means(taken["dynamic"], "cpu"))
        row.ratios[storage] = ratio(taken, "adaptive", "dynamic", "cpu")
        for way, training in trainings.items():
            timed = [number for number in training.repeats if number > BLOCK // 2]
            row.repeats[f"{way} {storage}"] = len(timed)
    return row


HEADER = (
    f"{'':36}{'':>9}{'':>11}{'dynamic, ms':>20}{'adaptive / dynamic':>24}\n"
    f"{'model':36}{'graph':>9}{'functions':>11}{'float16':>11}{'none':>9}{'float16':>15}{'none':>9}"
)


def line(model: Model, graph: str, row: Row) -> str:
    """Write a line of the table."""
    ms = [f"{row.ms[storage]:.2f}" if storage in row.ms else "" for storage in STORAGES]
    return f"{model.title:36}{graph:>9}{row.functions:11}{ms[0]:>11}{ms[1]:>9}{_cells(row.ratios)}" + "".join(
        f"  {count} batches of {way} ran again" for way, count in row.repeats.items() if count
    )


def _cells(ratios: Dict[str, float]) -> str:
    cells = [f"{ratios[storage]:.3f}" if storage in ratios else "" for storage in STORAGES]
    return f"{cells[0]:>15}{cells[1]:>9}"


def summary(rows: Dict[Tuple[str, str], Row]) -> str:
    """Write median and worst of each column, by graph."""
    lines = []
    for graph in dict.fromkeys(graph for _, graph in rows):
        found: Dict[str, List[float]] = {}
        for (_, own), row in rows.items():
            for storage, value in row.ratios.items() if own == graph else ():
                found.setdefault(storage, []).append(value)
        for what, choose in (("median", median), ("worst", max)):
            cells = _cells({storage: choose(values) for storage, values in found.items()})
            lines.append(f"{what:36}{graph:>9}{'':31}{cells}")
    return "\n".join(lines)


def kinds(model: Model, graph: str, storage: str, updates: int = UPDATES) -> Tuple[Counter[str], int]:
    """Count the updates by kind of their last backward, and the batches that ran again."""
    training = Training(model, "adaptive", graph, storage)
    found: Counter[str] = Counter()
    for _ in range(updates):
        training.update()
        for updater in training.updaters:
            found[updater.scaling.result.kind] += 1
    return found, sum(number > 1 for number in training.repeats)


def print_kinds(name: str, graph: str, storage: str) -> None:
    """Print the kinds of a model's updates."""
    found, repeats = kinds(MODELS[name], graph, storage)
    again = f"; {repeats} batches ran again" if repeats else ""
    print(f"{name}, {graph}, {storage}{again}")
    for kind, count in found.most_common():
        print(f"  {count:5}  {kind}", flush=True)


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="*", help=f"{', '.join(MODELS)} (default: all)")
    parser.add_argument("--storage", choices=(*STORAGES, "both"), default="both", help="(default: both)")
    parser.add_argument("--graph", choices=(*GRAPHS, "both"), default="both", help="(default: both)")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of 16 iterations of each (default: 6)")
    parser.add_argument("--kinds", action="store_true", help=f"print kinds over {UPDATES} updates, no times")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.model) - {*MODELS})
    if unknown or options.blocks < 1:
        parser.error(f"unknown model: {', '.join(unknown)}" if unknown else "--blocks must be 1 or more")
    names = [name for name in MODELS if name in (options.model or MODELS)]
    graphs = GRAPHS if options.graph == "both" else (options.graph,)
    storages = STORAGES if options.storage == "both" else (options.storage,)

    warnings.simplefilter("ignore", LossScaleWarning)
    print(f"nnabla_adaloss of {Path(nnabla_adaloss.__file__).parent}", flush=True)
    if options.kinds:
        for name in names:
            for graph in graphs:
                for storage in storages:
                    print_kinds(name, graph, storage)
        return
    print(HEADER)
    rows: Dict[Tuple[str, str], Row] = {}
    for graph in graphs:
        for name in names:
            row = rows[name, graph] = measure(MODELS[name], graph, storages, options.blocks)
            print(line(MODELS[name], graph, row), flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
