# SPDX-License-Identifier: Apache-2.0
"""Time per function of planning a graph, and of reusing the plan for a rebuilt graph.

    OMP_NUM_THREADS=1 python benchmarks/planning.py

Chains of affine layers and tanh are rebuilt before each measurement, so that caches are as in training.
*plan*: no plan is cached. *read and bind*: the plan of an equal graph is cached. *of another shape*: that for
a batch of another size is. *floor*: one query to nnabla of the indispensable: inputs, outputs and context of
each function, and the producer of each input. *in half*: reading a graph in a half context, moving its float
tail, and reading it again; a float graph is read once. Times are medians of the thread's own time.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any, Callable, Dict, List, Tuple

import nnabla as nn
from cpu_networks import chain

from nnabla_adaloss.core.layer_selection import LayerSelection
from nnabla_adaloss.graph.float_tail import TailReader
from nnabla_adaloss.graph.graph import Graph
from nnabla_adaloss.graph.names import registered_names
from nnabla_adaloss.graph.plan import GraphPlan, PlanOptions

_HALF = nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")
_OPTIONS = PlanOptions(LayerSelection(), True, frozenset())


def ask(loss: nn.Variable) -> List[Any]:
    """Query the parts of a graph that every reading needs."""
    asked: List[Any] = []
    f = loss.parent
    while f is not None:
        inputs = f.inputs
        parents = [v.parent for v in inputs]
        asked.append((f, inputs, parents, f.outputs, f.context.backend))
        f = parents[0]
    return asked


def measure(layers: int, rounds: int) -> Dict[str, float]:
    """Measure microseconds per function."""
    nn.clear_parameters()
    chain(nn.Variable((16, 32)), layers, 32)
    names, known = registered_names(), GraphPlan(chain(nn.Variable((16, 32)), layers, 32))
    taken: Dict[str, List[float]] = {}

    def clock(name: str, action: Callable[[nn.Variable], Any], batch: int = 16) -> None:
        loss = chain(nn.Variable((batch, 32)), layers, 32)
        start = time.thread_time()
        kept = action(loss)
        taken.setdefault(name, []).append((time.thread_time() - start) * 1e6 / (2 * layers + 2))
        del kept

    def read_and_bind(loss: nn.Variable) -> Tuple[Graph, GraphPlan]:
        graph = Graph(loss)
        plan = known.of_alike(graph, graph.description(names), _OPTIONS)
        assert plan is not None, "the same network"
        return graph, plan

    for _ in range(rounds):
        clock("plan", lambda loss: GraphPlan(loss, names=names))
        clock("floor", ask)
        clock("read", Graph)
        with nn.context_scope(_HALF):
            clock("in half", lambda loss: TailReader(loss, float_tail=True).read())
        clock("read and bind", read_and_bind)
        clock("of another shape", read_and_bind, batch=17)
    return {name: median(times[1:]) for name, times in taken.items()}


def main() -> None:
    columns = {
        "plan": 10,
        "of another shape": 19,
        "read and bind": 16,
        "read": 10,
        "floor": 10,
        "in half": 10,
    }
    head = "".join(f"{name:>{width}}" for name, width in columns.items())
    print(f"{'layers':>6}{head}   (µs per function)")
    for layers, rounds in ((10, 200), (100, 40), (1000, 8)):
        found = measure(layers, rounds)
        row = "".join(f"{found[name]:{width}.1f}" for name, width in columns.items())
        print(f"{layers:6}{row}", flush=True)


if __name__ == "__main__":
    main()
