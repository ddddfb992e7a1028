# SPDX-License-Identifier: Apache-2.0
"""Trains with nnabla on a GPU, in its native half precision: what adaptive scaling costs, and what it saves.

First a network of ResNet-50's shape: a fixed scale that nobody checks, dynamic and adaptive loss scaling take
turns iteration by iteration, each waiting for the device at its end. The fixed scale is the floor: adaptive /
fixed tells what adaptive scaling costs (wanted: at most 1.03), adaptive / dynamic compares with
nnabla's own loop, which waits for each parameter (wanted: at most 1.0). Then the networks of samples/demo.py
on scikit-learn's digits, each trained in fp32 and, in half precision, without scaling, with a fixed scale,
dynamically and adaptively, at the loss weights of the demo; the table tells test accuracy and batches thrown
away. Dynamic and adaptive are as they come, with nothing set.

Of an adaptive iteration the package's launches and waits are counted besides. --json writes it all to a file.

Needs nnabla-ext-cuda and CuPy: pip install nnabla-adaloss[cuda120]. To see that the script works where
there is no GPU: --extension cpu --type float --quick.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, Iterator, List
from unittest import mock

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss import (
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FixedLossScalingUpdater,
)
from nnabla_adaloss.kernels.cuda_launcher import CupyLauncher

sys.path.insert(0, str(Path(__file__).parents[1] / "samples"))

Action = Callable[[], Any]


def updater(method: str, solver: Any, loss: nn.Variable, feed: Action) -> Any:
    """The training loop for `method` on a network that is half already."""
    if method == "adaptive":
        return AdaptiveLossScalingUpdater(solver, loss, feed)
    if method == "dynamic":
        return DynamicLossScalingUpdater(solver, loss, feed)
    return FixedLossScalingUpdater(solver, loss, feed, scale=128.0 if method == "fixed (128)" else 1.0)


def unchecked(solver: Any, loss: nn.Variable, scale: float) -> Action:
    """An iteration with a fixed scale, in which nobody looks whether gradients are finite."""

    def update() -> None:
        solver.zero_grad()
        loss.forward(clear_no_need_grad=True)
        loss.backward(scale, clear_buffer=True)
        solver.scale_grad(1.0 / scale)
        solver.update()

    return update


@contextmanager
def counted() -> Iterator[Dict[str, int]]:
    """Counts what the package asks of the device: launches, and fetches, which wait for it."""
    counts = {"launch": 0, "fetch": 0}

    def counting(name: str) -> Any:
        method = getattr(CupyLauncher, name)

        def count(*arguments: Any) -> Any:
            counts[name] += 1
            return method(*arguments)

        return mock.patch.object(CupyLauncher, name, count)

    with counting("launch"), counting("fetch"):
        yield counts


def time_resnet50(context: nn.Context, rounds: int, batch: int, size: int, width: int) -> Dict[str, Any]:
    """Prints and returns what an iteration takes with each method."""
    from common.resnet import resnet

    random = np.random.default_rng(0)
    actions: Dict[str, Action] = {}
    for method in ("fixed, unchecked", "dynamic", "adaptive"):
        with nn.parameter_scope("", OrderedDict()), nn.context_scope(context):
            x, t = nn.Variable((batch, 3, size, size)), nn.Variable((batch, 1))
            x.d, t.d = random.standard_normal(x.shape), random.integers(0, 1000, t.shape)
            told = resnet(x, "resnet50", width, 1000, training=True, last_gamma=1.0)
            loss = F.mean(F.softmax_cross_entropy(told, t))
            solver = S.Momentum(1e-3)
            solver.set_parameters(nn.get_parameters())
            if method == "fixed, unchecked":
                actions[method] = unchecked(solver, loss, 128.0)
            else:
                actions[method] = updater(method, solver, loss, lambda: None).update
    taken: Dict[str, List[float]] = {method: [] for method in actions}
    for number in range(rounds + 3):
        for method, action in sorted(actions.items(), reverse=bool(number % 2)):
            start = time.perf_counter()
            action()
            synchronize(context)
            if number >= 3:
                taken[method].append(time.perf_counter() - start)
    with counted() as counts:
        actions["adaptive"]()
    found: Dict[str, Any] = {"size": size, "batch": batch, **counts}
    print(f"ResNet-50 shape, {size}x{size}, batch {batch}")
    for method, times in taken.items():
        found[f"{method}, ms"] = 1e3 * median(times)
        print(f"  {method:28}{found[f'{method}, ms']:10.2f} ms")
    for other in ("fixed, unchecked", "dynamic"):
        ratio = found[f"adaptive / {other}"] = median(a / o for a, o in zip(taken["adaptive"], taken[other]))
        print(f"  {'adaptive / ' + other:28}{ratio:10.4f}")
    print(f"  of an adaptive iteration: {counts['launch']} launches of the package, {counts['fetch']} waits")
    return found


def synchronize(context: nn.Context) -> None:
    """Wait for the device."""
    if "Cuda" in context.array_class:
        import nnabla_ext.cuda

        nnabla_ext.cuda.device_synchronize(context.device_id)


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
    parser.add_argument("--json", type=Path, help="write what was found here, too")
    options = parser.parse_args()
    half = make_context(options.extension, options.type, options.device)
    single = make_context(options.extension, "float", options.device)
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    print(f"nnabla {nn.__version__}, {half.backend[0]}, {versions}")
    if options.quick:
        speed = time_resnet50(half, rounds=2, batch=2, size=32, width=4)
        accuracies = print_accuracies(half, single, iterations=5)
    else:
        speed = time_resnet50(half, options.rounds, options.batch, size=224, width=64)
        accuracies = print_accuracies(half, single, iterations=300)
    if options.json is not None:
        found = {"context": half.backend[0], "versions": versions, "resnet50": speed, "digits": accuracies}
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
