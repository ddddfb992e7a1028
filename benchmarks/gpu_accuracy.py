# SPDX-License-Identifier: Apache-2.0
"""Accuracy with and without adaptive scaling on a GPU, in its native half precision.

The networks of samples/demo.py on scikit-learn's digits, each trained in fp32 and, in half precision, without
scaling, with a fixed scale, dynamically and adaptively, at the loss weights of the demo; the table has test
accuracy and batches thrown away. Dynamic and adaptive have their defaults.

    python benchmarks/gpu_accuracy.py --json accuracy.json
    python benchmarks/gpu_accuracy.py --context cpu:float --iterations 5    does it work? no GPU needed

Needs nnabla-ext-cuda and CuPy: pip install nnabla-adaloss[cuda120].
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any, Dict, List

import nnabla as nn
import nnabla.solvers as S
from gpu_device import Device
from scaling_study.methods import METHODS, Trainee, train
from scaling_study.task import accuracy, cross_entropy

COLUMNS = {
    "fp32": "fp32",
    "no scaling": "none",
    "fixed (128)": "fixed_128",
    "dynamic": "dynamic_8",
    "adaptive": "amax_history",
}


def print_accuracies(half: nn.Context, single: nn.Context, iterations: int) -> List[Dict[str, Any]]:
    """Print a table; return its cells."""
    from networks import NETWORKS

    cells: List[Dict[str, Any]] = []
    print(f"\n{'test accuracy (thrown away)':34}" + "".join(f"{column:>16}" for column in COLUMNS))
    for name, network in NETWORKS.items():
        for weight in (1.0, 1e-3, 1e-6, 1e-9):
            row = f"{name + ', loss weight ' + format(weight, 'g'):34}"
            for column, method in COLUMNS.items():
                context = single if column == "fp32" else half
                right, lost = accuracy_of(network, weight, method, context, iterations)
                row += f"{f'{right:.1%} ({lost})':>16}"
                cell = {"net": name, "weight": weight, "method": column, "accuracy": right, "skipped": lost}
                cells.append(cell)
            print(row, flush=True)
    return cells


def accuracy_of(
    network: Any, weight: float, method: str, context: nn.Context, iterations: int
) -> tuple[float, int]:
    """Train one network; return its test accuracy and the number of lost batches."""
    from common.digits import BatchFeeder, load

    nn.seed(0)
    with nn.parameter_scope("", OrderedDict()), nn.context_scope(context):
        data = load().train
        x, t = nn.Variable((network.batch_size, *data.x.shape[1:])), nn.Variable((network.batch_size, 1))
        loss = cross_entropy(network.build(x), t) * weight
        solver = S.Momentum(network.learning_rate / weight, 0.9)
        solver.set_parameters(nn.get_parameters())
        trainee = Trainee(loss, solver, BatchFeeder(data, x, t, 0))
        train(METHODS[method], [trainee], None, iterations)
        return accuracy(network.build)(), trainee.lost


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--context", default="cudnn:half", metavar="EXT:TYPE", help="(default: cudnn:half)")
    add("--device", default="0", metavar="N", help="which GPU (default: 0)")
    add("--iterations", type=int, default=300, metavar="N", help="batches for each training (default: 300)")
    add("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options = parser.parse_args()
    device = Device(options.context, options.device)
    head = device.versions()
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    cells = print_accuracies(device.context, device.single(), options.iterations)
    if options.json is not None:
        options.json.write_text(json.dumps({**head, "digits": cells}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
