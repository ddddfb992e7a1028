# SPDX-License-Identifier: Apache-2.0
"""Reach and limits of a single loss scale: a table and a picture in a minute."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence

if TYPE_CHECKING:
    from common.digits import Data
    from training import Settings
    from verdicts import Score

SHOWN = ("fp32", "dynamic", "dynamic (65536)", "one measured", "adaptive")
LOSS_WEIGHTS = {
    "lenet": (1e4, 1.0, 1e-6, 1e-11),
    "mlp": (1e4, 1.0, 1e-6, 1e-11),
    "two_losses": (1.0, 1e-6, 1e-10, 1e-12),
}

DESCRIPTION = """\
Trains networks on scikit-learn's handwritten digits, each with four loss weights and in five ways:

  fp32             everything in single precision: the reference
  dynamic          nnabla's DynamicLossScalingUpdater: one scale, 8 at first, halved on overflow
  dynamic (65536)  the same from 65536, where torch.amp.GradScaler starts
  one measured     one scale again, derived from the size of gradients
  adaptive         AdaptiveLossScalingUpdater with its defaults: a scale for each part of a network

All but fp32 run under emulated fp16 storage: nnabla computes in fp32, and what a half-precision GPU
would store in fp16 (activations, gradients, weights at use) is rounded to fp16.
"""

EPILOG = """\
One loss, weighted. A loss is often one small term of several, or a mean over many pixels: its gradients are
tiny, and fp16 turns numbers below about 6e-8 into zero. LeNet's loss is multiplied by 1e4 to
1e-11, and the learning rate is divided by the same number. SGD with momentum then takes the same steps: in
fp32 only rounding changes. All changes in the other rows are due to fp16.

Two losses. One network classifies odd and even digits, and the digit; the second loss is multiplied by 1 to
1e-12, and the table shows its accuracy. Adam with a tiny eps takes the same steps for any weight. At 1e-10 a
well-chosen single scale serves both, at 1e-12 none can: a scale that lifts the small gradients makes the
large ones overflow.

Fairness. All start from the same weights and get the same number of batches in the same order. A batch that
a method loses because its gradients overflowed is not repeated. The dynamic ones double their scale after
2000 updates, nnabla's default; no training here lasts that long, so only their starts matter. All compute
scalar functions at the loss in fp32, which by default only adaptive scaling does.

How to read the table. A mark shows whether a training is as good as fp32, by the rule below the table.
One test image is 0.28 points: small differences are chance, and --seed shows how large. The last lines count
marks, and the batches that a method threw away.

Files, written into --out:
  demo.png      the table as a picture

Everything is the same in each run with the same --seed on the same machine. samples/compare.py looks closer
at fewer cases: which gradients are lost, which scales layers get, how long a batch takes.

Examples:
  python samples/demo.py --seed 1
  python samples/demo.py --networks lenet mlp --loss-weights 1 1e-3 1e-6 1e-9
  python samples/demo.py --iterations 60 --networks mlp
"""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the trainings, print the table, draw the picture; return the exit status."""
    options = parse(arguments)
    # Networks this small do not gain from threads, and the processes share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # nnabla is imported late: --help is fast, and nnabla's log message can be silenced.
    from parallel import run_all, silence_nnabla

    silence_nnabla()
    from common.digits import load
    from training import Settings
    from verdicts import Verdicts

    settings, data = Settings(options.iterations, options.seed), load()
    cases = [
        (network, weight, method, data, settings)
        for network in options.networks
        for weight in options.loss_weights or LOSS_WEIGHTS[network]
        for method in SHOWN
    ]
    batches = len(cases) * options.iterations
    scores = run_all(train, cases, options.jobs, batches, f"{len(cases)} trainings")
    verdicts = Verdicts(sorted(scores, key=lambda score: SHOWN.index(score.method)))
    print(verdicts.table(sys.stdout.encoding))
    import verdicts_picture

    options.out.mkdir(parents=True, exist_ok=True)
    verdicts_picture.save(options.out / "demo.png", verdicts)
    print(f"\nPicture: {options.out / 'demo.png'}")
    return 0


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parse the options; exit with a message if one is wrong."""
    from option_values import positive, positive_number

    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--iterations", type=positive, default=200, metavar="N", help="batches per training (default: 200)")
    add(
        "--networks",
        nargs="+",
        choices=tuple(LOSS_WEIGHTS),
        default=["lenet", "two_losses"],
        help="(default: lenet two_losses)",
    )
    add(
        "--loss-weights",
        nargs="+",
        type=positive_number,
        metavar="W",
        help="factors of the loss (default: 1e4 1 1e-6 1e-11; of two losses 1 1e-6 1e-10 1e-12)",
    )
    add("--seed", type=int, default=0, help="decides initial weights and batches (default: 0)")
    add("--out", type=Path, default=Path("build/demo"), help="folder for the picture (default: build/demo)")
    add("--jobs", type=positive, default=min(2, os.cpu_count() or 1), help="processes to use (default: 2)")
    return parser.parse_args(arguments)


def train(
    network: str,
    loss_weight: float,
    method: str,
    data: Data,
    settings: Settings,
    progress: Callable[[int], Any],
) -> Score:
    """Train one network with one method until its batches are used up."""
    from training import Training
    from verdicts import Score

    training = Training(network, loss_weight, method, data, settings)
    while training.feeder.count < settings.iterations:
        progress(training.update())
    accuracy, _ = training.evaluate(data.test)
    return Score(network, loss_weight, method, accuracy, training.thrown_away)


if __name__ == "__main__":
    sys.exit(main())
