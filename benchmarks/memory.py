# SPDX-License-Identifier: Apache-2.0
"""How much memory adaptive loss scaling takes at the peak, besides nnabla.

    OMP_NUM_THREADS=1 python benchmarks/memory.py

Eight layers of 2048 x 2048 are trained for some iterations, each way in a process of its own: by nnabla, by
its DynamicLossScalingUpdater, and by AdaptiveLossScalingUpdater. What is told is the largest resident size
of the process, and how much more that is than with the dynamic updater. Added are the package, and scaled
copies of weights: one at a time where hooks run, all at once in a planned pass, up to `planned_bytes`.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import warnings
from typing import Any, Dict, Optional

LAYERS, WIDTH, BATCH = 8, 2048, 64

# What is trained with: the updater, its method or None, the emulated storage or None, and planned_bytes.
WAYS: Dict[str, Any] = {
    "nnabla alone": (None, None, None, None),
    "dynamic": ("dynamic", None, None, None),
    "approx_range": ("adaptive", "approx_range", None, None),
    "amax_history": ("adaptive", "amax_history", None, None),
    "amax_history, all weights at once": ("adaptive", "amax_history", None, 2**30),
    "dynamic, emulated float16": ("dynamic", None, "float16", None),
    "approx_range, emulated float16": ("adaptive", "approx_range", "float16", None),
    "amax_history, emulated float16": ("adaptive", "amax_history", "float16", None),
}


def train(way: str, iterations: int) -> None:
    """Train in one way, and print the largest resident size in MB."""
    import nnabla as nn
    import nnabla.functions as F
    import nnabla.parametric_functions as PF
    import nnabla.solvers as S
    import numpy as np

    kind, method, storage, planned_bytes = WAYS[way]
    x = nn.Variable.from_numpy_array(np.random.default_rng(0).standard_normal((BATCH, WIDTH), np.float32))
    h = x
    for index in range(LAYERS):
        h = F.tanh(PF.affine(h, WIDTH, name=f"layer{index}"))
    loss = F.mean(h**2)
    solver = S.Sgd(1e-3)
    solver.set_parameters(nn.get_parameters())
    action = _updater(kind, method, storage, planned_bytes, solver, loss)
    for _ in range(iterations):
        action()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6)


def _updater(
    kind: Optional[str],
    method: Optional[str],
    storage: Optional[str],
    planned_bytes: Optional[int],
    solver: Any,
    loss: Any,
) -> Any:
    if kind is None:

        def alone() -> None:
            solver.zero_grad()
            loss.forward(clear_no_need_grad=True)
            loss.backward(clear_buffer=True)
            solver.update()

        return alone
    from nnabla_adaloss import (
        AdaLossConfig,
        AdaptiveLossScalingUpdater,
        DynamicLossScalingUpdater,
        FormatEmulation,
    )

    warnings.simplefilter("ignore")
    if kind == "dynamic":
        stored = loss if storage is None else FormatEmulation(loss, storage)
        # Its default feeder takes an argument that its update() does not pass.
        return DynamicLossScalingUpdater(solver, stored, lambda: None).update
    config = AdaLossConfig(loss_scale_method=method, planned_bytes=planned_bytes)
    return AdaptiveLossScalingUpdater(solver, loss, config=config, storage=storage).update


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=20, help="how many are trained (default: 20)")
    parser.add_argument("--way", choices=WAYS, help="only this one, in this process: its megabytes")
    options = parser.parse_args()
    if options.way is not None:
        train(options.way, options.iterations)
        return
    dynamic = 0.0
    for way in WAYS:
        command = [sys.executable, __file__, "--iterations", str(options.iterations), "--way", way]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = float(done.stdout.splitlines()[-1])
        if way.startswith("dynamic"):
            dynamic = found
        more = f"{100 * (found / dynamic - 1):+7.1f} %" if dynamic and not way.startswith("dynamic") else ""
        print(f"{way:36}{found:8.0f} MB{more}", flush=True)


if __name__ == "__main__":
    main()
