# SPDX-License-Identifier: Apache-2.0
"""Time whole training iterations on a CPU.

Each network is trained in fp32, with nnabla's dynamic loss scaling under emulated fp16 storage (or that of
`--storage`), and with adaptive loss scaling at its defaults under the same: a measured global scale, and no
repeated batch except the first (another one is an error). The three take turns iteration by iteration, in
changing order. One in eight adaptive iterations measures, so a ratio is that of the means over blocks of 16
iterations, and of all blocks the median (`blocks.py`). The table has the cost of adaptive scaling relative to
dynamic (wanted: at most 1.03, 1.08 on the demo's networks of a few milliseconds), and of the emulation
relative to fp32 (wanted: at most 1.40 in float16, 1.60 in fp8_hybrid).

Other processes affect wall time more than CPU time, which is summed over threads. On an idle machine the two
columns agree.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from statistics import median
from typing import Sequence

import nnabla as nn
import nnabla.solvers as S
from blocks import Action, bare_loop, means, ratio, take_turns
from cpu_networks import CASES, Case

from nnabla_adaloss import AdaptiveLossScalingUpdater, DynamicLossScalingUpdater, FormatEmulation


def trainer(case: Case, method: str, storage: str) -> Action:
    """Make a function that trains a network of its own on one batch."""
    nn.seed(0)
    with nn.parameter_scope("", OrderedDict()):
        loss = case.loss()()
        solver = S.Momentum(1e-3)
        solver.set_parameters(nn.get_parameters())
        stored = loss if storage == "none" else FormatEmulation(loss, storage)
        if method == "adaptive":
            return without_repeats(AdaptiveLossScalingUpdater(solver, stored))
        if method == "dynamic":
            # nnabla's default feeder takes an argument that its update() does not pass.
            return DynamicLossScalingUpdater(solver, stored, lambda: None).update  # type: ignore[no-any-return]
    return bare_loop(solver, loss)


def without_repeats(updater: AdaptiveLossScalingUpdater) -> Action:
    """Wrap its update: raise if a timed batch ran twice, except the first, which measures."""

    def update() -> None:
        result = updater.update()
        if result.retries and updater.iteration > 1:
            raise RuntimeError(f"iteration {updater.iteration} ran {1 + result.retries} times")

    return update


def print_training(names: Sequence[str], blocks: int, storage: str) -> None:
    """Time networks, and print the ratios."""
    print(f"storage: {storage}")
    print(f"{'':40}{'adaptive / dynamic':>20}{'emulated / fp32':>18}{'fp32':>13}")
    print(f"{'':40}{'wall':>12}{'cpu':>8}{'wall':>10}{'cpu':>8}{'wall':>13}")
    for name in names:
        case = CASES[name]
        ways = ("fp32", "dynamic", "adaptive")
        taken = take_turns({way: trainer(case, way, storage) for way in ways}, blocks * case.times)
        compared = [("adaptive", "dynamic"), ("dynamic", "fp32")]
        ratios = [ratio(taken, a, b, clock) for a, b in compared for clock in ("wall", "cpu")]
        bare = 1e3 * median(means(taken["fp32"], "wall"))
        adaptive, adaptive_cpu, emulated, emulated_cpu = ratios
        print(
            f"{case.title:40}{adaptive:12.3f}{adaptive_cpu:8.3f}{emulated:10.3f}{emulated_cpu:8.3f}"
            f"{bare:10.1f} ms",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", nargs="*", help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--blocks", type=int, default=3, help="blocks of 16 iterations of each (default: 3)")
    parser.add_argument("--storage", default="float16", help="emulated format (default: float16), or none")
    options = parser.parse_args()
    unknown = sorted(set(options.network) - {*CASES})
    if unknown or options.blocks < 1:
        parser.error(f"unknown network: {', '.join(unknown)}" if unknown else "--blocks must be 1 or more")
    names = [name for name in CASES if name in (options.network or CASES)]
    print_training(names, options.blocks, options.storage)


if __name__ == "__main__":
    main()
