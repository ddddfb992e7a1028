# SPDX-License-Identifier: Apache-2.0
"""What it takes per function to plan a graph, and to take the plan over when the graph is built again.

    OMP_NUM_THREADS=1 python benchmarks/planning.py

Chains of affine layers and tanh are built anew before each measurement, so that nothing of them is in a cache
that would not be there in training. *plan*: nothing is known of the graph. *read and bind*: the plan of one
that was built alike is known. *of another shape*: that of one for a batch of another size is. *floor*: to ask
nnabla once, and keep it, for what no reading can do without: inputs, outputs and context of each function,
and what computes each input. *in half*: to read a graph in a half context, move its float tail, and read it
again; a float graph is read once. Times are medians of the thread's own time.
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
    """What no reading of a graph can do without."""
    asked: List[Any] = []
    f = loss.parent
    while f is not None:
        inputs = f.inputs
        parents = [v.parent for v in inputs]
        asked.append((f, inputs, parents, f.outputs, f.context.backend))
        f = parents[0]
    return asked


def measure(layers: int, rounds: int) -> Dict[str, float]:
    """Microseconds per function."""
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
        plan = known.of_alike(graph.description(names), _OPTIONS)
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
