# SPDX-License-Identifier: Apache-2.0
"""Trains with nnabla on a GPU, in its native half precision: what adaptive scaling costs, and what it saves.

First a network of ResNet-50's shape: dynamic and adaptive loss scaling take turns iteration by iteration,
each waiting for the device at its end, and the ratio of the medians tells what adaptive scaling adds
(wanted: at most 1.03). Then the two networks of samples/demo.py on scikit-learn's digits, each trained
in fp32 and, in half precision, without scaling, with a fixed scale, dynamically and adaptively, at the loss
weights of the demo; the table tells test accuracy and batches thrown away. Dynamic and adaptive are as they
come, with nothing set.

Needs nnabla-ext-cuda and CuPy: pip install nnabla-adaloss[cuda120]. To see that the script works where
there is no GPU: --extension cpu --type float --quick.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections import OrderedDict
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
import numpy as np
from resnet50 import resnet50

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


def time_resnet50(context: nn.Context, rounds: int, batch: int, size: int, width: int) -> None:
    random = np.random.default_rng(0)
    actions: Dict[str, Action] = {}
    for method in ("dynamic", "adaptive"):
        with nn.parameter_scope("", OrderedDict()), nn.context_scope(context):
            x, t = nn.Variable((batch, 3, size, size)), nn.Variable((batch, 1))
            x.d, t.d = random.standard_normal(x.shape), random.integers(0, 1000, t.shape)
            loss = F.mean(F.softmax_cross_entropy(resnet50(x, 1000, width), t))
            solver = S.Momentum(1e-3)
            solver.set_parameters(nn.get_parameters())
            actions[method] = updater(method, solver, loss, lambda: None).update
    taken: Dict[str, List[float]] = {method: [] for method in actions}
    for number in range(rounds + 3):
        for method, action in sorted(actions.items(), reverse=bool(number % 2)):
            start = time.perf_counter()
            action()
            synchronize(context)
            if number >= 3:
                taken[method].append(time.perf_counter() - start)
    dynamic, adaptive = (median(taken[m]) for m in ("dynamic", "adaptive"))
    ratio = median(a / d for a, d in zip(taken["adaptive"], taken["dynamic"]))
    print(
        f"ResNet-50 shape, {size}x{size}, batch {batch}: dynamic {1e3 * dynamic:.2f} ms, "
        f"adaptive {1e3 * adaptive:.2f} ms, adaptive / dynamic {ratio:.4f}"
    )


def synchronize(context: nn.Context) -> None:
    """Wait for the device."""
    if "Cuda" in context.array_class:
        import nnabla_ext.cuda

        nnabla_ext.cuda.device_synchronize(context.device_id)


def print_accuracies(half: nn.Context, single: nn.Context, iterations: int) -> None:
    import digits
    from networks import NETWORKS

    data = digits.load()
    methods = ("fp32", "no scaling", "fixed (128)", "dynamic", "adaptive")
    print(f"\n{'test accuracy (thrown away)':34}" + "".join(f"{m:>16}" for m in methods))
    for name, network in NETWORKS.items():
        for weight in (1.0, 1e-3, 1e-6, 1e-9):
            row = f"{name + ', loss weight ' + format(weight, 'g'):34}"
            for method in methods:
                context = single if method == "fp32" else half
                accuracy, skipped = train(network, data, weight, method, context, iterations)
                row += f"{f'{accuracy:.1%} ({skipped})':>16}"
            print(row, flush=True)


def train(
    network: Any, data: Any, weight: float, method: str, context: nn.Context, iterations: int
) -> tuple[float, int]:
    """Train one network; return its test accuracy and how many batches were thrown away."""
    import digits

    nn.seed(0)
    with nn.parameter_scope("", OrderedDict()), nn.context_scope(context):
        x = nn.Variable((network.batch_size, *data.train.pixels.shape[1:]))
        t = nn.Variable((network.batch_size, 1))
        loss = F.mean(F.softmax_cross_entropy(network.build(x), t)) * weight
        solver = S.Momentum(network.learning_rate / weight, 0.9)
        solver.set_parameters(nn.get_parameters())
        feed = digits.BatchFeeder(data.train, x, t, 0)
        loop = updater(method, solver, loss, feed)
        updates = 0
        while feed.count < iterations:  # batches that are thrown away count
            loop.update()
            updates += not solver.check_inf_or_nan_grad()
        logits = network.build(nn.Variable.from_numpy_array(data.test.pixels))
        logits.forward(clear_buffer=True)
        right = logits.d.argmax(axis=1) == data.test.digits[:, 0]
        return float(right.mean()), feed.count - updates


def make_context(extension: str, type_config: str, device: str) -> nn.Context:
    """An nnabla context, or end the program saying what is missing."""
    from nnabla.ext_utils import get_extension_context

    try:
        return get_extension_context(extension, type_config=type_config, device_id=device)
    except Exception as error:  # whatever the extension raises for a missing library, driver or device
        sys.exit(
            f"{extension}:{type_config} cannot be used here: {error}\n"
            "`python -m nnabla_adaloss doctor --gpu` says what is missing"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--extension", default="cudnn", help="cudnn (default), cuda or cpu")
    parser.add_argument("--type", default="half", help="half (default), mixed_half or float")
    parser.add_argument("--device", default="0")
    parser.add_argument("--rounds", type=int, default=30, help="timed iterations of each method")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="tiny shapes: to see that it works")
    options = parser.parse_args()
    half = make_context(options.extension, options.type, options.device)
    single = make_context(options.extension, "float", options.device)
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    print(f"nnabla {nn.__version__}, {half.backend[0]}, {versions}")
    if options.quick:
        time_resnet50(half, rounds=2, batch=2, size=32, width=4)
        print_accuracies(half, single, iterations=5)
    else:
        time_resnet50(half, options.rounds, options.batch, size=224, width=64)
        print_accuracies(half, single, iterations=300)


if __name__ == "__main__":
    main()
