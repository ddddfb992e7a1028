# SPDX-License-Identifier: Apache-2.0
"""Cost of recording a training on a CPU.

The networks of `cpu_networks.py` are trained with adaptive loss scaling under emulated fp16 storage. A
recorder with `every=2` records every other iteration, so that recorded and other iterations alternate in one
training, with the same arrays at the same addresses: their ratio is the cost of recording, and effects of
memory layout cancel. It is the median over pairs of neighbours. Wanted for `every=1`: at most 1.03 on the
conv net.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import OrderedDict
from pathlib import Path
from statistics import median
from typing import Any, List, Tuple

import nnabla as nn
import nnabla.solvers as S
from blocks import Times, measure
from cpu_networks import CASES, Case
from training_speed import without_repeats

from nnabla_adaloss import AdaptiveLossScalingUpdater, Recorder


def updater_of(case: Case, monitors: List[Any]) -> AdaptiveLossScalingUpdater:
    nn.seed(0)
    with nn.parameter_scope("", OrderedDict()):
        loss = case.loss()()
        solver = S.Momentum(1e-3)
        solver.set_parameters(nn.get_parameters())
        return AdaptiveLossScalingUpdater(solver, loss, storage="float16", monitors=monitors)


def print_training(case: Case, rounds: int, folder: Path) -> None:
    recorders = {
        "in memory": Recorder(every=2),
        "in memory, with histograms": Recorder(every=2, histograms=True),
        "to a file": Recorder(every=2, path=folder / f"{case.build.__name__}.jsonl"),
    }
    print(f"{case.title + ', Recorder(every=1)':52}{'wall':>10}{'cpu':>10}")
    for name, recorder in recorders.items():
        looked, rest = take_turns(updater_of(case, [recorder]), rounds)
        walls, cpus = (
            median(getattr(a, clock) / getattr(b, clock) for a, b in zip(looked, rest))
            for clock in ("wall", "cpu")
        )
        print(f"  {name:50}{walls:10.4f}{cpus:10.4f}", flush=True)
    iteration = median(times.wall for times in rest)
    print(f"  one iteration without recording: {1e3 * iteration:.1f} ms\n", flush=True)


def take_turns(updater: AdaptiveLossScalingUpdater, rounds: int) -> Tuple[List[Times], List[Times]]:
    """Time iterations that are recorded, and those before them, without the first."""
    update = without_repeats(updater)
    for _ in range(4):
        update()
    rest, looked = [], []
    for _ in range(rounds):
        rest.append(measure(update))
        looked.append(measure(update))
    assert updater.iteration % 2 == 0
    return looked, rest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", nargs="*", help=f"{', '.join(CASES)} (default: lenet)")
    parser.add_argument("--rounds", type=int, default=150, help="pairs of iterations per recorder")
    options = parser.parse_args()
    unknown = sorted(set(options.network) - set(CASES))
    if unknown or options.rounds < 1:
        parser.error(f"unknown network: {', '.join(unknown)}" if unknown else "--rounds must be 1 or more")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.network or ["lenet"]:
            print_training(CASES[name], options.rounds, Path(folder))


if __name__ == "__main__":
    main()
