# SPDX-License-Identifier: Apache-2.0
"""What loss scaling does to gradients: a table and a picture of scales, underflow and time."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Optional, Sequence

LOSS_WEIGHTS = (1.0, 1e-4, 1e-6)

DESCRIPTION = """\
Looks closely at five trainings of each of two networks on scikit-learn's handwritten digits:

  fp32         everything in single precision: what the others are measured against
  no scaling   gradients stored in fp16 as they are
  fixed (128)  the loss multiplied by 128 before backward
  dynamic      nnabla's DynamicLossScalingUpdater: one scale, doubled now and then, halved on overflow
  adaptive     AdaptiveLossScalingUpdater as it comes: a scale from what was measured, and one for each layer

All but fp32 run under emulated fp16 storage: nnabla computes in fp32, and what a half-precision GPU
would store in fp16 (activations, gradients, weights at use) is rounded to fp16.
"""

EPILOG = """\
Loss weights. Each training is done three times, with the mean cross entropy multiplied by 1, 1e-4 and 1e-6,
as losses are that are one small term of several. The learning rate is divided by the weight: SGD with
momentum then takes the same steps, and fp32 comes to the same result with each weight (but for rounding).
Whatever differs in the other rows is the work of fp16. The numbers smaller than about 6e-8 that it turns to
zero are what loss scaling has to prevent.

Fairness. The methods start from the same weights and get the same number of batches in the same order;
a batch that is thrown away because its gradients overflowed is gone. Dynamic starts with 8, nnabla's default,
and by default doubles that after every 1/40 of the training, as nnabla's default of 2000 updates is in a
training of 80 000; as it comes it would keep 8 here (samples/demo.py). Adaptive repeats a batch that
overflowed: that takes time, and loses none. The five trainings take turns batch by batch within one process,
so that a busy machine slows them all alike; the time in the table is the median over batches of the ratio to
fp32. (Emulation makes up much of it: it says nothing about a GPU.)

Underflow. At twelve moments (six with --quick) the backward pass is done twice from the same activations,
storing gradients once in fp32 and once as the method does. An element counts as underflowed when it is zero
in the second and not in the first. The table adds up all layers and moments; the picture shows layers.

Files, written into --out:
  compare.png   each layer's loss scale over the training, and each layer's underflow
  results.json  the table, the settings, and everything that is in the picture

Everything but the times is the same in each run with the same --seed on the same machine.

Examples:
  python samples/compare.py --quick
  python samples/compare.py --seed 1 --out /tmp/seed1
"""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the comparison; returns the exit status."""
    options = parse(arguments)
    # nnabla is imported late: --help answers at once, and nnabla's announcement of itself can be silenced.
    from parallel import run_all, silence_nnabla

    silence_nnabla()
    import picture
    import report
    from common.digits import load
    from comparison import COMPARED, compare_methods
    from networks import NETWORKS
    from training import Settings

    settings = Settings(options.iterations, options.seed, options.growth_interval)
    data = load()
    cases = [(network, weight, data, settings) for network in NETWORKS for weight in LOSS_WEIGHTS]
    trainings = len(cases) * len(COMPARED)
    batches = trainings * options.iterations
    found = run_all(compare_methods, cases, options.jobs, batches, f"{trainings} trainings")
    results = [result for of_case in found for result in of_case]
    options.out.mkdir(parents=True, exist_ok=True)
    print(report.table(results))
    report.save(options.out / "results.json", settings, results)
    picture.save(options.out / "compare.png", results)
    print(f"\nPicture: {options.out / 'compare.png'}\nNumbers: {options.out / 'results.json'}")
    return 0


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """The options; exits with a message when one is wrong."""
    from parallel import positive

    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="60 batches instead of 300: to see that it works")
    add("--iterations", type=positive, metavar="N", help="batches per training (default: 300)")
    add(
        "--growth-interval",
        type=positive,
        metavar="N",
        help="updates until dynamic scaling doubles its scale (default: see below)",
    )
    add("--seed", type=int, default=0, help="decides initial weights and batches (default: 0)")
    add(
        "--out",
        type=Path,
        default=Path("build/compare"),
        help="folder for the files (default: build/compare)",
    )
    add("--jobs", type=positive, default=min(2, os.cpu_count() or 1), help="processes to use (default: 2)")
    options = parser.parse_args(arguments)
    if options.iterations is None:
        options.iterations = 60 if options.quick else 300
    if options.growth_interval is None:
        options.growth_interval = max(1, options.iterations // 40)
    return options


if __name__ == "__main__":
    sys.exit(main())
