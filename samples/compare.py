# SPDX-License-Identifier: Apache-2.0
"""Effect of loss scaling on gradients: a table and a picture of scales, underflow and time."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Optional, Sequence

LOSS_WEIGHTS = (1.0, 1e-4, 1e-6)

DESCRIPTION = """\
Trains two networks on scikit-learn's handwritten digits in five ways:

  fp32         everything in single precision: the reference
  no scaling   gradients stored in fp16 without a scale
  fixed (128)  the loss multiplied by 128 before backward
  dynamic      nnabla's DynamicLossScalingUpdater: one scale, doubled periodically, halved on overflow
  adaptive     AdaptiveLossScalingUpdater at its defaults: a measured scale for each component

All but fp32 emulate fp16 storage: nnabla computes in fp32, and arrays that a half-precision GPU would store
in fp16 (activations, gradients, weights at use) are rounded to fp16.
"""

EPILOG = """\
Loss weights. Each training runs three times, with the mean cross entropy multiplied by 1, 1e-4 and 1e-6,
like one small term of several. The learning rate is divided by the weight, so SGD with momentum takes the
same steps, and fp32 gives the same result for each weight up to rounding. Differences in the other rows
come from fp16, which flushes numbers below about 6e-8 to zero unless loss scaling prevents it.

Fairness. All methods start from the same weights and get the same number of batches in the same order; a
batch dropped because of overflow is lost. Dynamic starts with 8, nnabla's default, and doubles after every
1/40 of the training, as nnabla's default of 2000 updates does in a training of 80 000; otherwise it would
keep 8 here (samples/demo.py). Adaptive repeats a batch that overflowed, which takes time but loses none.
The trainings take turns batch by batch in one process, so other load on the machine affects all alike; the
time in the table is the mean over all batches, relative to fp32's. (Much of it is emulation: it says nothing
about a GPU.)

Underflow. At twelve moments (six with --quick) backward runs twice on the same activations, storing
gradients in fp32 and as the method does. An element underflows if it is zero only in the second. The table
sums all layers and moments; the picture shows layers.

Files in --out:
  compare.png   each layer's loss scale over the training, and each layer's underflow
  results.json  the table, the settings, and the picture's data

With the same --seed and machine, everything but the times is reproducible.

Examples:
  python samples/compare.py --quick
  python samples/compare.py --seed 1 --out /tmp/seed1
"""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the comparison; return the exit status."""
    options = parse(arguments)
    # nnabla is imported late: --help is fast, and nnabla's log message can be silenced.
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
    """Parse the options; exit with a message if one is wrong."""
    from option_values import positive

    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="60 batches instead of 300, for a quick look")
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
