# SPDX-License-Identifier: Apache-2.0
"""Times whole training iterations on a CPU, and the engine's own work per function.

Each network is trained in fp32, with nnabla's dynamic loss scaling under emulated fp16 storage (or that
of `--storage`), and with adaptive loss scaling at its defaults under the same: a measured global scale,
and no batch that runs twice but the first (an error tells if one does). The three take turns iteration by
iteration, in changing order. One in eight adaptive iterations looks at arrays, so a ratio is that of the
means over blocks of 16 iterations, and of all blocks the median (`blocks.py`). A first table tells what
adaptive scaling adds to dynamic (wanted: at most 1.03, 1.08 on the demo's networks of a few milliseconds),
and what the emulation adds to fp32 (wanted: at most 1.40 in float16, 1.60 in fp8_hybrid).

The second table is about a chain of 500 tanh of four elements, where there is next to nothing to compute:
what is left is what the engine does for each function that gets no scale of its own, with a global scale
that is given and with one that is measured (wanted: at most 5 µs).

Wall time is what one waits for, and suffers when other processes want the cores; processor time, summed
over threads, suffers less. On an idle machine the two columns tell the same.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
import numpy as np
from blocks import Action, means, ratio, take_turns
from cpu_networks import CASES, Case

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScaling,
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FormatEmulation,
)


def trainer(case: Case, method: str, storage: str) -> Action:
    """What trains a network of its own on one batch."""
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

    def plain() -> None:
        solver.zero_grad()
        loss.forward(clear_no_need_grad=True)
        loss.backward(clear_buffer=True)
        solver.update()

    return plain


def without_repeats(updater: AdaptiveLossScalingUpdater) -> Action:
    """Its update, which raises when a batch that is timed ran twice: all but the first, which measures."""

    def update() -> None:
        result = updater.update()
        if result.retries and updater.iteration > 1:
            raise RuntimeError(f"iteration {updater.iteration} ran {1 + result.retries} times")

    return update


def print_training(names: Sequence[str], blocks: int, storage: str) -> List[Dict[str, Any]]:
    """Times networks; prints and returns the ratios."""
    found: List[Dict[str, Any]] = []
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
        found.append(
            {
                "network": name,
                "storage": storage,
                "adaptive_over_dynamic": {"wall": adaptive, "cpu": adaptive_cpu},
                "dynamic_over_fp32": {"wall": emulated, "cpu": emulated_cpu},
                "fp32_ms": bare,
            }
        )
    return found


def print_overhead(functions: int, blocks: int) -> None:
    with nn.parameter_scope("", OrderedDict()):
        h = nn.parameter.get_parameter_or_create("x", (4,), np.ones(4))
        for _ in range(functions):
            h = F.tanh(h)
        h = F.sum(h)
        config = AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=1.0)
        # One each: scales that were held with the one are not those of the other.
        given, measured = AdaptiveLossScaling(h, config), AdaptiveLossScaling(h, config)

    def nothing(function: Any) -> None:
        pass

    # As updaters do it: gradients that stay readable would have to be unscaled, each by itself.
    def forward_and(backward: Callable[..., Any], *scale: float, **hooks: Any) -> Action:
        def run() -> None:
            h.forward(clear_no_need_grad=True)
            backward(*scale, clear_buffer=True, **hooks)

        return run

    actions: Dict[str, Action] = {
        "native": forward_and(h.backward, 1.0),
        "empty hooks": forward_and(h.backward, 1.0, function_pre_hook=nothing, function_post_hook=nothing),
        "engine, scale given": forward_and(given.backward, 8.0),
        "engine, scale measured": forward_and(measured.backward),
    }
    taken = take_turns(actions, blocks)
    print(f"\n{'backward of ' + str(functions) + ' tanh':40}{'µs per function above native':>38}")
    print(f"{'':40}{'wall':>30}{'cpu':>8}")
    for name in actions:
        if name == "native":
            continue
        row = f"{name:40}"
        for clock, width in (("wall", 30), ("cpu", 8)):
            pairs = zip(means(taken[name], clock), means(taken["native"], clock))
            above = median(a - b for a, b in pairs)
            row += f"{1e6 * above / functions:{width}.2f}"
        print(row)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", nargs="*", help=f"{', '.join(CASES)} or overhead (default: all)")
    parser.add_argument("--blocks", type=int, default=3, help="blocks of 16 iterations of each (default: 3)")
    parser.add_argument("--json", type=Path, help="write the ratios here, too")
    parser.add_argument(
        "--storage", default="float16", help="what is emulated (default: float16); none: nothing is"
    )
    options = parser.parse_args()
    chosen = options.network or [*CASES, "overhead"]
    unknown = sorted(set(chosen) - {*CASES, "overhead"})
    if unknown or options.blocks < 1:
        parser.error(f"unknown network: {', '.join(unknown)}" if unknown else "--blocks must be 1 or more")
    networks = [name for name in CASES if name in chosen]
    if networks:
        ratios = print_training(networks, options.blocks, options.storage)
        if options.json is not None:
            options.json.write_text(json.dumps(ratios, indent=2) + "\n", encoding="utf-8")
    if "overhead" in chosen:
        print_overhead(500, 8 * options.blocks)


if __name__ == "__main__":
    main()
