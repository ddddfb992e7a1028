# SPDX-License-Identifier: Apache-2.0
"""Trains ten networks with every kind of loss scaling at its defaults, and tells which is as good as fp32."""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

if TYPE_CHECKING:
    from scaling_study.plan import Choice
    from scaling_study.training import Run

RESULTS = Path(__file__).parent / "results"

DESCRIPTION = """\
Trains ten networks on real data, with the loss multiplied by 1, 1e-3, 1e-6 and 1e-9, under three emulated
storages, with six ways to scale the loss, each at its defaults as a user meets it:

  none           gradients stored as they are
  fixed_128      the loss multiplied by 128
  dynamic_8      nnabla's DynamicLossScalingUpdater with its defaults: 8, doubled after 2000 good updates
  dynamic_65536  the same, starting with torch's default
  approx_range   AdaptiveLossScalingUpdater with all its defaults
  amax_history   the same with AdaLossConfig(loss_scale_method="amax_history")

The question for each network, storage and loss weight: does it train as well as fp32?
"""

EPILOG = """\
Loss weights. The learning rate is divided by the loss weight. SGD with momentum then takes the same steps
whatever the weight, so that fp32 comes to the same result with each; what differs is the work of the storage.

Stopping and going on. Each training is one line of the results file as soon as it is done. Stop the study as
you like, Ctrl-C and kill included: the same command goes on where it was, and does a training again whose
line was cut off. Seeds are the outermost loop, fast networks and float16 come first, and all methods of a
cell follow each other, so that part of a study can be read as well (--report).

Time. Everything takes about three hours on two idle cores. --quick has its own file of results.

Examples:
  python benchmarks/study.py --quick                       five minutes: does it work?
  python benchmarks/study.py                               everything
  python benchmarks/study.py --budget 1800                 half an hour of it, then the report
  python benchmarks/study.py --only lenet,mlp8 --storage float16 --methods dynamic_65536,approx_range
  python benchmarks/study.py --report                      the table and the picture of what is there
"""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the study; returns the exit status."""
    options = parse(arguments)
    if not options.report:
        run(options)
    return 0


def run(options: argparse.Namespace) -> None:
    """Do the trainings that are not in the file of results yet."""
    from scaling_study import records
    from scaling_study.plan import planned
    from scaling_study.training import runs_of
    from scaling_study.working import do_all

    with records.appending(options.results) as file:
        there = runs_of(records.read(options.results))
        missing = [run for run in planned(choice_of(options)) if run not in there]
        taken: Dict[Any, List[float]] = {}
        for run, result in there.items():
            taken.setdefault((run.net, run.storage), []).append(result.seconds)
            taken.setdefault(run.net, []).append(result.seconds)

        def done(record: Dict[str, Any]) -> None:
            taken.setdefault((record["net"], record["storage"]), []).append(record["seconds"])
            taken.setdefault(record["net"], []).append(record["seconds"])
            file.add(record)

        def expected(run: Run) -> float:
            known = taken.get((run.net, run.storage)) or taken.get(run.net) or [0.0]
            # The first training of a process may have to compile kernels.
            return 1.5 * median(known)

        count = do_all(
            missing,
            work,
            done,
            processes=options.jobs,
            budget=options.budget,
            expected=expected,
            title=options.results.stem,
        )
    left = Counter(run.net for run in missing[count:])
    print(f"{len(there)} trainings were there, {count} were done now, {sum(left.values())} are left.")


def work(run: Run) -> Dict[str, Any]:
    """Do one training and return its line; called in a process of its own."""
    from scaling_study.training import as_record, train

    return as_record(run, train(run))


def choice_of(options: argparse.Namespace) -> Choice:
    """What the options choose."""
    from scaling_study.plan import Choice

    given = {"nets": options.only, "storages": options.storage, "methods": options.methods}
    choice = Choice(**{name: value for name, value in given.items() if value is not None})
    if options.quick:
        choice = choice._replace(
            nets=options.only or ("lenet", "mlp8", "mlp24"),
            storages=options.storage or ("float16",),
            weights=(1.0, 1e-6),
            seeds=1,
            reference_seeds=2,
            shorter=4,
        )
    return choice if options.seeds is None else choice._replace(seeds=options.seeds)


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """The options; exits with a message when one is wrong."""
    from_names = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = from_names.add_argument
    add("--quick", action="store_true", help="three networks, short trainings, float16, one seed")
    add("--only", type=_names, metavar="NET,...", help="networks (default: all ten)")
    add("--storage", type=_names, metavar="NAME,...", help="storages (default: float16,fp8_hybrid,e4m3)")
    add("--methods", type=_names, metavar="NAME,...", help="ways to scale (default: all six)")
    add("--seeds", type=_positive, metavar="N", help="trainings of each cell (default: 3; fp32: 5)")
    add("--budget", type=float, metavar="SECONDS", help="begin no training that would end later")
    add("--jobs", type=_positive, default=2, metavar="N", help="trainings at a time (default: 2)")
    add("--results", type=Path, help="the file of results (default: benchmarks/results/study.jsonl)")
    add(
        "--report", action="store_true", help="train nothing: only the table and the picture of what is there"
    )
    options = from_names.parse_args(arguments)
    logging.getLogger("nnabla").setLevel(logging.WARNING)
    if options.results is None:
        options.results = RESULTS / ("study_quick.jsonl" if options.quick else "study.jsonl")
    _check_names(from_names, options)
    return options


def _check_names(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not (options.only or options.storage or options.methods):
        return
    from scaling_study.methods import METHODS, STORAGES
    from scaling_study.nets import NETS

    for option, known in (("only", NETS), ("storage", STORAGES), ("methods", METHODS)):
        for name in getattr(options, option) or ():
            if name not in known:
                parser.error(f"--{option}: {name!r} is unknown; choose of {','.join(known)}")


def _names(text: str) -> List[str]:
    return [name for name in text.split(",") if name]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
