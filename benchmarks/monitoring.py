# SPDX-License-Identifier: Apache-2.0
"""What it costs to watch a training on a CPU.

The networks of `training_speed.py` are trained with adaptive loss scaling under emulated fp16 storage: without
a monitor, with a `Recorder` that looks at every iteration, with one that also writes a file, with one that
looks at every 100th, and with a monitor that wants nothing that happens. All take turns iteration by
iteration, in changing order, and a ratio is the median over the rounds of the ratio within a round. Wanted: at
most 1.03 for each iteration on the conv net.

The cost of every 100th iteration is too small to be seen in a median of iterations, nearly all of which are
not looked at, so it is put together: the median ratio of those that are not, and a hundredth of what looking
costs. Wanted: at most 1.002. Where the machine is noisy, the second table tells more: what one iteration's
share of the bookkeeping costs by itself, in microseconds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import timeit
from collections import OrderedDict
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
import numpy as np
from training_speed import CASES, Case, Times, ratio, take_turns, without_repeats

from nnabla_adaloss import AdaptiveLossScalingUpdater, Monitor, Recorder

Action = Callable[[], Any]
NEVER = 10**9


class Overflows(Monitor):
    """Wants to know of what does not happen here."""

    def on_overflowed(self, event: Any) -> None:
        raise RuntimeError(f"gradients overflowed: {event}")


def updater_of(case: Case, monitors: List[Any]) -> AdaptiveLossScalingUpdater:
    random = np.random.default_rng(0)
    nn.seed(0)
    with nn.parameter_scope("", OrderedDict()):
        x = nn.Variable.from_numpy_array(random.standard_normal(case.shape).astype(np.float32))
        t = nn.Variable.from_numpy_array(random.integers(0, 10, (case.shape[0], 1)))
        loss = F.mean(F.softmax_cross_entropy(case.build(x), t))
        solver = S.Momentum(1e-3)
        solver.set_parameters(nn.get_parameters())
        return AdaptiveLossScalingUpdater(solver, loss, storage="float16", monitors=monitors)


def print_training(case: Case, rounds: int, folder: Path) -> None:
    monitors: Dict[str, List[Any]] = {
        "no monitor": [],
        "no monitor, once more": [],
        "monitor of overflows": [Overflows()],
        "recorder, not this iteration": [Recorder(every=NEVER)],
        "recorder": [Recorder()],
        "recorder to a file": [Recorder(path=folder / "run.jsonl")],
    }
    actions = {name: without_repeats(updater_of(case, chosen)) for name, chosen in monitors.items()}
    taken = take_turns(actions, rounds)
    print(f"{case.title + ', relative to no monitor':56}{'wall':>10}{'cpu':>10}")
    for name in list(actions)[1:]:
        print_ratios(taken, name)
    for clock in ("wall", "cpu"):
        rest = ratio(taken, "recorder, not this iteration", "no monitor", clock)
        looked = ratio(taken, "recorder to a file", "no monitor", clock)
        print(f"  recorder to a file, every=100, {clock}: {0.99 * rest + 0.01 * looked:.4f}")
    milliseconds = 1e3 * median(times.wall for times in taken["no monitor"])
    print(f"  one iteration without a monitor: {milliseconds:.1f} ms\n", flush=True)


def print_ratios(taken: Dict[str, List[Times]], name: str) -> None:
    walls, cpus = (ratio(taken, name, "no monitor", clock) for clock in ("wall", "cpu"))
    print(f"  {name:54}{walls:10.4f}{cpus:10.4f}")


def print_bookkeeping() -> None:
    """What an iteration that nobody looks at pays, apart from any network."""
    scaling = updater_of(CASES["lenet"], [Recorder(every=NEVER)]).scaling
    calls = 200_000
    audience = scaling.audience

    def nobody() -> bool:
        return scaling.audience is not None and False

    def unwanted() -> Any:
        return audience is not None and scaling._watch(1)

    print("bookkeeping of one iteration, in microseconds")
    for name, action, times in (("no monitor", nobody, 4), ("recorder, not this iteration", unwanted, 2)):
        best = min(timeit.repeat(action, number=calls, repeat=5)) / calls
        print(f"  {name:54}{1e6 * best * times:10.2f}")


def print_memory(iterations: int, folder: Path) -> None:
    """How much memory a process takes while a small net is trained for long."""
    import psutil

    process = psutil.Process()
    recorder = Recorder(path=folder / "long.jsonl")
    case = Case("small", (4, 8), lambda x: nn.parametric_functions.affine(x, 10, name="a"))
    small = Case("small", (4, 8), lambda x: nn.parametric_functions.affine(F.tanh(case.build(x)), 10, name="b"))
    updater = updater_of(small, [recorder])
    began = time.perf_counter()
    print(f"{iterations} iterations, each recorded to memory and to a file")
    for number in range(1, iterations + 1):
        updater.update()
        if number % (iterations // 10) == 0:
            size = (folder / "long.jsonl").stat().st_size
            print(
                f"  {number:8} iterations: {process.memory_info().rss / 2**20:7.1f} MiB in memory, "
                f"{len(recorder.recording.rows)} rows, file {size / 2**20:6.1f} MiB, "
                f"{time.perf_counter() - began:5.0f} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", nargs="*", help=f"{', '.join(CASES)} (default: lenet)")
    parser.add_argument("--rounds", type=int, default=60, help="rounds per network, two more for warm-up")
    parser.add_argument("--long", type=int, metavar="ITERATIONS", help="watch memory for so many iterations")
    options = parser.parse_args()
    unknown = sorted(set(options.network) - set(CASES))
    if unknown or options.rounds < 1:
        parser.error(f"unknown network: {', '.join(unknown)}" if unknown else "--rounds must be 1 or more")
    with tempfile.TemporaryDirectory() as folder:
        if options.long:
            print_memory(options.long, Path(folder))
            return
        for name in options.network or ["lenet"]:
            print_training(CASES[name], options.rounds, Path(folder))
        print_bookkeeping()


if __name__ == "__main__":
    main()
