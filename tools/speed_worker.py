# SPDX-License-Identifier: Apache-2.0
"""Train networks with one checkout of the package and time blocks of iterations.

`python -m tools.compare_speed` starts one such process per checkout. Requests and their answers:

    {"case": "chain-40x32", "options": {"delay": 0}}   {"title": "40 layers"}
    {"way": "adaptive", "iterations": 16}              {"seconds": 0.021}

It uses only public names of the package, so that it runs older checkouts, too.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Optional

import nnabla as nn
import nnabla.solvers as S
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import cpu_networks

Action = Callable[[], Any]


class Workload(NamedTuple):
    """A network to train."""

    title: str
    build: Callable[[], nn.Variable]
    rebuilt: bool = False
    storage: Optional[str] = None


def _chain(layers: int, width: int, *, rebuilt: bool = False) -> Workload:
    batch = np.random.default_rng(0).standard_normal((16, width)).astype(np.float32)
    x = nn.Variable.from_numpy_array(batch)
    title = f"{layers} layers of {width}{', rebuilt' if rebuilt else ''}"
    return Workload(title, lambda: cpu_networks.chain(x, layers, width), rebuilt)


def _stochastic_depth(storage: Optional[str] = None, *, drawn: bool = True) -> Workload:
    """Network with 10 of 12 blocks in each iteration: different ones each time, or always the same."""
    random = np.random.default_rng(0)
    x = nn.Variable.from_numpy_array(random.standard_normal((16, 16)).astype(np.float32))

    def build() -> nn.Variable:
        kept = np.arange(12) < (10 if nn.get_parameters() else 12)
        return cpu_networks.stochastic_depth(x, random.permutation(kept) if drawn else kept, 32)

    title = f"10 {'of' if drawn else 'first of'} 12 blocks{', ' + storage if storage else ''}"
    return Workload(title, build, rebuilt=True, storage=storage)


def _new_graphs(storage: Optional[str] = None) -> Workload:
    """Network with 10 edges of 3 kinds between 8 nodes, different ones in each iteration."""
    random = np.random.default_rng(0)
    x = nn.Variable.from_numpy_array(random.standard_normal((16, 16)).astype(np.float32))

    def build() -> nn.Variable:
        edges = random.integers(0, [8, 8, 3], (10, 3))
        edges[:3, 2] = range(3)
        return cpu_networks.messages(x, edges.tolist(), 8, 16)

    return Workload(f"new graphs{', ' + storage if storage else ''}", build, rebuilt=True, storage=storage)


def _network(name: str, storage: Optional[str] = None) -> Workload:
    case = cpu_networks.CASES[name]
    title = case.title if storage is None else f"{case.title}, {storage}"
    return Workload(title, case.loss(), storage=storage)


WORKLOADS: Dict[str, Callable[[], Workload]] = {
    "chain-40x32": lambda: _chain(40, 32),
    "chain-10x128": lambda: _chain(10, 128),
    "chain-100x8": lambda: _chain(100, 8),
    "chain-10x8": lambda: _chain(10, 8),
    "rebuilt-10x128": lambda: _chain(10, 128, rebuilt=True),
    "rebuilt-40x32": lambda: _chain(40, 32, rebuilt=True),
    "blocks-alike": lambda: _stochastic_depth(drawn=False),
    "stochastic-depth": lambda: _stochastic_depth(),
    "new-graphs": lambda: _new_graphs(),
    "demo-blocks-alike": lambda: _stochastic_depth("float16", drawn=False),
    "demo-stochastic-depth": lambda: _stochastic_depth("float16"),
    "demo-new-graphs": lambda: _new_graphs("float16"),
    "lenet": lambda: _network("lenet"),
    "mlp": lambda: _network("mlp"),
    "resnet20": lambda: _network("resnet20"),
    "demo-lenet": lambda: _network("demo-lenet", "float16"),
    "demo-mlp": lambda: _network("demo-mlp", "float16"),
}


def actions(work: Workload, options: Dict[str, Any]) -> Dict[str, Action]:
    """Make an iteration of each way, with parameters of its own."""
    return {"dynamic": _update(work, None), "adaptive": _update(work, options)}


def _update(work: Workload, options: Optional[Dict[str, Any]]) -> Action:
    """Make an updater's `update`: nnabla's own, or the adaptive one with these arguments."""
    from nnabla_adaloss import (
        AdaLossConfig,
        AdaptiveLossScalingUpdater,
        DynamicLossScalingUpdater,
        FormatEmulation,
    )

    scope: Any = OrderedDict()

    def build() -> nn.Variable:
        with nn.parameter_scope("", scope):
            return work.build()

    def stored() -> Any:
        """Graph for nnabla's updater; the adaptive one emulates a storage by itself."""
        loss = build()
        return FormatEmulation(loss, work.storage) if work.storage and options is None else loss

    def feed() -> None:
        if work.rebuilt:
            updater.loss = stored()

    nn.seed(0)
    loss = stored()
    solver = S.Sgd(1e-3)
    with nn.parameter_scope("", scope):
        solver.set_parameters(nn.get_parameters())
    if options is None:
        updater = DynamicLossScalingUpdater(solver, loss, feed)
    else:
        of_config = inspect.signature(AdaLossConfig).parameters
        config = AdaLossConfig(**{name: value for name, value in options.items() if name in of_config})
        others = {name: value for name, value in options.items() if name not in of_config}
        others.setdefault("storage", work.storage)
        updater = AdaptiveLossScalingUpdater(solver, loss, feed, config=config, **others)
    return updater.update  # type: ignore[no-any-return]


def train(action: Action, iterations: int) -> float:
    """Measure this thread's CPU time for these iterations, in seconds."""
    start = time.thread_time()
    for _ in range(iterations):
        action()
    return time.thread_time() - start


_built: Dict[str, Action] = {}


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Build a case, or train one that is built."""
    if "case" not in request:
        return {"seconds": train(_built[request["way"]], request["iterations"])}
    _built.clear()
    work = WORKLOADS[request["case"]]()
    _built.update(actions(work, request["options"]))
    return {"title": work.title}


if __name__ == "__main__":
    from checkouts import serve  # beside this script: the checkout may have no such file

    serve(answer)
