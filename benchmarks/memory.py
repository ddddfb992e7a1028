# SPDX-License-Identifier: Apache-2.0
"""Peak memory of adaptive loss scaling, besides nnabla.

    OMP_NUM_THREADS=1 python benchmarks/memory.py

Eight layers of 2048 x 2048 are trained for some iterations, each way in a process of its own: by nnabla, by
its DynamicLossScalingUpdater, and by AdaptiveLossScalingUpdater. The table has the largest resident size of
the process, and its difference to the dynamic updater's, in MB and in percent. The difference consists of the
package, the gradients that an iteration measures, and scaled copies of weights, if layers have scales of
their own: in the row "every weight scaled" small weights shrink the gradients from layer to layer, and a
constant scales every weight. Then attention is trained on sentences of 400 lengths, with a graph for each.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import warnings
from typing import Any, Callable, Dict, NamedTuple, Optional

LAYERS, WIDTH, BATCH = 8, 2048, 64
LENGTHS, LONGEST = 400, 512


class Way(NamedTuple):
    """Network, updater and method of a training."""

    kind: Optional[str] = None  # kind of the updater; None: nnabla alone
    method: Optional[str] = None
    storage: Optional[str] = None
    lengths: bool = False  # attention is trained, on sentences of many lengths


WAYS: Dict[str, Way] = {
    "nnabla alone": Way(),
    "dynamic": Way("dynamic"),
    "approx_range": Way("adaptive", "approx_range"),
    "amax_history": Way("adaptive", "amax_history"),
    "every weight scaled": Way("adaptive", "fixed"),
    "dynamic, emulated float16": Way("dynamic", storage="float16"),
    "approx_range, emulated float16": Way("adaptive", "approx_range", "float16"),
    "amax_history, emulated float16": Way("adaptive", "amax_history", "float16"),
    "dynamic, 400 lengths": Way("dynamic", lengths=True),
    "approx_range, 400 lengths": Way("adaptive", "approx_range", lengths=True),
    "amax_history, 400 lengths": Way("adaptive", "amax_history", lengths=True),
}


def train(way: Way, iterations: int) -> None:
    """Train in one way, and print the largest resident size in MB."""
    import nnabla as nn
    import nnabla.functions as F
    import nnabla.initializer as I
    import nnabla.parametric_functions as PF
    import nnabla.solvers as S
    import numpy as np

    rng = np.random.default_rng(0)

    def layers() -> nn.Variable:
        h = nn.Variable.from_numpy_array(rng.standard_normal((BATCH, WIDTH), np.float32))
        # Half the deviation that preserves gradients: each layer can be scaled by 2.
        small = I.NormalInitializer(0.5 * WIDTH**-0.5) if way.method == "fixed" else None
        for index in range(LAYERS):
            h = F.tanh(PF.affine(h, WIDTH, name=f"layer{index}", w_init=small))
        return F.mean(h**2)

    def attention() -> nn.Variable:
        length = int(rng.integers(16, LONGEST))
        x = nn.Variable.from_numpy_array(rng.standard_normal((8, length, 64), np.float32))
        q, k, v = (PF.affine(x, 64, base_axis=2, name=name) for name in "qkv")
        h = F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True)), v)
        return F.mean(PF.affine(h, 64, base_axis=2, name="out") ** 2)

    loss = attention() if way.lengths else layers()
    solver = S.Sgd(1e-3)
    solver.set_parameters(nn.get_parameters())
    action = _updater(way, solver, loss, attention if way.lengths else None)
    for _ in range(LENGTHS if way.lengths else iterations):
        action()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6)


def _updater(way: Way, solver: Any, loss: Any, build: Optional[Callable[[], Any]]) -> Any:
    if way.kind is None:
        from blocks import bare_loop

        return bare_loop(solver, loss)
    from nnabla_adaloss import (
        AdaLossConfig,
        AdaptiveLossScalingUpdater,
        DynamicLossScalingUpdater,
        FormatEmulation,
    )

    def feed() -> None:
        if build is not None:
            updater.loss = build()

    warnings.simplefilter("ignore")
    if way.kind == "dynamic":
        stored = loss if way.storage is None else FormatEmulation(loss, way.storage)
        # nnabla's default feeder takes an argument that its update() does not pass.
        updater = DynamicLossScalingUpdater(solver, stored, feed)
    else:
        # A scale of 1 would not scale any weight.
        config = AdaLossConfig(way.method, fixed_loss_scale=2.0, use_bound=False)
        updater = AdaptiveLossScalingUpdater(solver, loss, feed, config=config, storage=way.storage)
    return updater.update


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=20, help="number of iterations (default: 20)")
    parser.add_argument("--way", choices=WAYS, help="train only this way, in this process")
    options = parser.parse_args()
    if options.way is not None:
        train(WAYS[options.way], options.iterations)
        return
    dynamic = 0.0
    for way in WAYS:
        command = [sys.executable, __file__, "--iterations", str(options.iterations), "--way", way]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = float(done.stdout.splitlines()[-1])
        if way.startswith("dynamic"):
            dynamic = found
        more = ""
        if dynamic and not way.startswith("dynamic"):
            more = f"{found - dynamic:+7.0f} MB{100 * (found / dynamic - 1):+7.1f} %"
        print(f"{way:36}{found:8.0f} MB{more}", flush=True)


if __name__ == "__main__":
    main()
