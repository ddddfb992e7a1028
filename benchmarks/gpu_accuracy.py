# SPDX-License-Identifier: Apache-2.0
"""What adaptive scaling saves on a GPU, in its native half precision.

The networks of samples/demo.py on scikit-learn's digits, each trained in fp32 and, in half precision, without
scaling, with a fixed scale, dynamically and adaptively, at the loss weights of the demo; the table has test
accuracy and batches thrown away. Dynamic and adaptive are as they come, with nothing set.

    python benchmarks/gpu_accuracy.py --json accuracy.json
    python benchmarks/gpu_accuracy.py --context cpu:float --iterations 5    does it work? no GPU needed

Needs nnabla-ext-cuda and CuPy: pip install nnabla-adaloss[cuda120].
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, Callable, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
from gpu_device import Device

from nnabla_adaloss import (
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FixedLossScalingUpdater,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "samples"))

Action = Callable[[], Any]


def updater(method: str, solver: Any, loss: nn.Variable, feed: Action) -> Any:
    """The training loop for `method` on a network that is half already."""
    if method == "adaptive":
        return AdaptiveLossScalingUpdater(solver, loss, feed)
    if method == "dynamic":
        return DynamicLossScalingUpdater(solver, loss, feed)
    return FixedLossScalingUpdater(solver, loss, feed, scale=128.0 if method == "fixed (128)" else 1.0)


def print_accuracies(half: nn.Context, single: nn.Context, iterations: int) -> List[Dict[str, Any]]:
    """Prints a table; returns its cells."""
    from common.digits import load
    from networks import NETWORKS

    data = load()
    cells: List[Dict[str, Any]] = []
    methods = ("fp32", "no scaling", "fixed (128)", "dynamic", "adaptive")
    print(f"\n{'test accuracy (thrown away)':34}" + "".join(f"{m:>16}" for m in methods))
    for name, network in NETWORKS.items():
        for weight in (1.0, 1e-3, 1e-6, 1e-9):
            row = f"{name + ', loss weight ' + format(weight, 'g'):34}"
            for method in methods:
                context = single if method == "fp32" else half
                accuracy, skipped = train(network, data, weight, method, context, iterations)
                row += f"{f'{accuracy:.1%} ({skipped})':>16}"
                cells.append(
                    {
                        "net": name,
                        "weight": weight,
                        "method": method,
                        "accuracy": accuracy,
                        "skipped": skipped,
                    }
                )
            print(row, flush=True)
    return cells


def train(
    network: Any, data: Any, weight: float, method: str, context: nn.Context, iterations: int
) -> tuple[float, int]:
    """Train one network; return its test accuracy and how many batches were thrown away."""
    from common.digits import BatchFeeder

    nn.seed(0)
    with nn.parameter_scope("", OrderedDict()), nn.context_scope(context):
        x = nn.Variable((network.batch_size, *data.train.x.shape[1:]))
        t = nn.Variable((network.batch_size, 1))
        loss = F.mean(F.softmax_cross_entropy(network.build(x), t)) * weight
        solver = S.Momentum(network.learning_rate / weight, 0.9)
        solver.set_parameters(nn.get_parameters())
        feed = BatchFeeder(data.train, x, t, 0)
        loop = updater(method, solver, loss, feed)
        updates = 0
        while feed.count < iterations:  # batches that are thrown away count
            loop.update()
            updates += not solver.check_inf_or_nan_grad()
        logits = network.build(nn.Variable.from_numpy_array(data.test.x))
        logits.forward(clear_buffer=True)
        right = logits.d.argmax(axis=1) == data.test.t[:, 0]
        return float(right.mean()), feed.count - updates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--context", default="cudnn:half", metavar="EXT:TYPE", help="(default: cudnn:half)")
    add("--device", default="0", metavar="N", help="which GPU (default: 0)")
    add("--iterations", type=int, default=300, metavar="N", help="batches for each training (default: 300)")
    add("--json", type=Path, metavar="FILE", help="write what was found here, too")
    options = parser.parse_args()
    device = Device(options.context, options.device)
    head = device.versions()
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    cells = print_accuracies(device.context, device.single(), options.iterations)
    if options.json is not None:
        options.json.write_text(json.dumps({**head, "digits": cells}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
