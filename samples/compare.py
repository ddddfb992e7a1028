# SPDX-License-Identifier: Apache-2.0
"""Trains on handwritten digits with every kind of loss scaling, prints a table and draws a picture."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import queue
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, Sequence

if TYPE_CHECKING:
    from training import Result, Settings

LOSS_WEIGHTS = (1.0, 1e-4, 1e-6)

DESCRIPTION = """\
Trains two networks on scikit-learn's handwritten digits, each in five ways:

  fp32         everything in single precision: what the others are measured against
  no scaling   gradients stored in fp16 as they are
  fixed (128)  the loss multiplied by 128 before backward
  dynamic      nnabla's DynamicLossScalingUpdater: one scale, doubled now and then, halved on overflow
  adaptive     AdaptiveLossScalingUpdater: the same, and on top of it a scale for each layer

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
a batch that is thrown away because its gradients overflowed is gone. Dynamic and adaptive start with the
same scale (8, nnabla's default) and double it equally often. By default that is after every 1/40 of the
training, as nnabla's default of 2000 updates is in a training of 80 000. The five trainings take turns
batch by batch within one process, so that a busy machine slows them all alike; the time in the table is the
median over batches of the ratio to fp32. (Emulation makes up much of it: it says nothing about a GPU.)

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
    silence_nnabla()
    import picture
    import report
    from training import Settings

    settings = Settings(options.iterations, options.growth_interval, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    results = run_all(settings, options.jobs)
    print(report.table(results))
    report.save(options.out / "results.json", settings, results)
    picture.save(options.out / "compare.png", results)
    print(f"\nPicture: {options.out / 'compare.png'}\nNumbers: {options.out / 'results.json'}")
    return 0


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """The options; exits with a message when one is wrong."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="60 batches instead of 300: to see that it works")
    add("--iterations", type=_positive, metavar="N", help="batches per training (default: 300)")
    add(
        "--growth-interval",
        type=_positive,
        metavar="N",
        help="updates until the scale doubles (default: see below)",
    )
    add("--seed", type=int, default=0, help="decides initial weights and batches (default: 0)")
    add(
        "--out",
        type=Path,
        default=Path("build/compare"),
        help="folder for the files (default: build/compare)",
    )
    add("--jobs", type=_positive, default=min(2, os.cpu_count() or 1), help="processes to use (default: 2)")
    options = parser.parse_args(arguments)
    if options.iterations is None:
        options.iterations = 60 if options.quick else 300
    if options.growth_interval is None:
        options.growth_interval = max(1, options.iterations // 40)
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def silence_nnabla() -> None:
    """Keep nnabla from logging that it is being imported, once in every process."""
    logging.getLogger("nnabla").setLevel(logging.WARNING)


def run_all(settings: Settings, jobs: int) -> List[Result]:
    """Train each network with each loss weight, several at a time, behind one progress bar."""
    import digits
    from methods import METHODS
    from networks import NETWORKS
    from tqdm import tqdm
    from training import compare_methods

    data = digits.load()
    cases = [(network, weight) for network in NETWORKS for weight in LOSS_WEIGHTS]
    # Spawned, because a fork of a process that has threads may hang.
    context = multiprocessing.get_context("spawn")
    with (
        context.Manager() as manager,
        ProcessPoolExecutor(jobs, mp_context=context, initializer=silence_nnabla) as pool,
    ):
        turns = manager.Queue()
        futures = [
            pool.submit(compare_methods, network, weight, data, settings, turns.put)
            for network, weight in cases
        ]
        total = len(cases) * len(METHODS) * settings.iterations
        with tqdm(
            total=total, desc=f"{len(cases) * len(METHODS)} trainings", unit=" batches", disable=None
        ) as bar:
            while not all(future.done() for future in futures):
                with suppress(queue.Empty):
                    bar.update(turns.get(timeout=0.2))
            bar.update(total - bar.n)
        return [result for future in futures for result in future.result()]


if __name__ == "__main__":
    sys.exit(main())
