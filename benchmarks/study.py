# SPDX-License-Identifier: Apache-2.0
"""Trains ten networks with every kind of loss scaling at its defaults, and tells which is as good as fp32."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, Sequence

if TYPE_CHECKING:
    from scaling_study.experiment import Experiment
    from scaling_study.plan import Choice

RESULTS = Path(__file__).parent / "results"

EXPERIMENTS = {
    "weights": "LeNet in float16 with loss weights from 1e-12 to 1e4, and how right its gradients are",
    "windows": "overflows and underflow with margins of 2 to 16 and windows of 8 to 512 iterations",
    "measuring": "gradients measured in one of 1 to 64 iterations: what that saves, and what is missed",
    "apart": "seventeen trainings with gradients far apart: two losses 1 : 1e-10, equations, deep nets, ...",
    "reach": "two losses 1 : 1 to 1 : 1e-20 on one network, and how right the gradients of each layer are",
    "planted": "a loss that jumps by 2^10, for one batch or for good: how soon the scale is right again",
}

DESCRIPTION = """\
Trains ten networks on real data, with the loss multiplied by 1, 1e-3, 1e-6 and 1e-9, under three emulated
storages, with seven ways to scale the loss, each at its defaults as a user meets it:

  none           gradients stored as they are
  fixed_128      the loss multiplied by 128
  dynamic_8      nnabla's DynamicLossScalingUpdater with its defaults: 8, doubled after 2000 good updates
  dynamic_65536  the same, starting with torch's default
  one_scale      one measured scale: AdaLossConfig(loss_scale_method="fixed"), every alpha is 1
  approx_range   layers' own scales by the published method: AdaLossConfig(loss_scale_method="approx_range")
  amax_history   AdaptiveLossScalingUpdater with all its defaults: each part of the network has a scale

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

Files. FILE.jsonl with a line for each training, FILE.md with the table, FILE.png with the picture; each
further experiment (--apart, --reach, --weights, --windows, --measuring, --planted) has its own, such as
benchmarks/results/weights.jsonl.

Examples:
  python benchmarks/study.py --quick                       five minutes: does it work?
  python benchmarks/study.py                               everything
  python benchmarks/study.py --budget 1800                 half an hour of it, then the report
  python benchmarks/study.py --only lenet,mlp8 --storage float16 --methods dynamic_65536,approx_range
  python benchmarks/study.py --report                      the table and the picture of what is there
"""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the study, or another experiment; returns the exit status."""
    options = parse(arguments)
    from scaling_study import experiment, records

    chosen = experiment_of(options)
    results = options.results or RESULTS / f"{chosen.name}.jsonl"
    picture_file = results.with_suffix(".png")
    if not options.report:
        try:
            experiment.run(chosen, results, processes=options.jobs, budget=options.budget)
        except KeyboardInterrupt:
            print(f"Stopped: what is done is in {results}, and the same command goes on from there.")
            return 130
    lines = records.read(results)
    if options.experiment is None:
        from scaling_study.plan import of_this_length

        lines = of_this_length(lines, choice_of(options).shorter)
    table = chosen.table(picture_file.name, lines)
    results.with_suffix(".md").write_text(table, "utf-8")
    print(table)
    if chosen.draw is not None:
        chosen.draw(picture_file, lines)
        print(f"Picture: {picture_file}")
    return 0


def experiment_of(options: argparse.Namespace) -> Experiment:
    """The experiment that the options choose."""
    if options.experiment is not None:
        return further(options.experiment, options.only)
    from scaling_study import picture, table, training
    from scaling_study.experiment import Experiment
    from scaling_study.plan import planned

    name = "study_quick" if options.quick else "study"
    return Experiment(name, planned(choice_of(options)), training.work, table.markdown, picture.draw)


def further(name: str, only: Optional[Sequence[str]]) -> Experiment:
    """One of `EXPERIMENTS`, with these networks; None: all."""
    from importlib import import_module

    made: Experiment = import_module(f"scaling_study.{name}").experiment(only)
    return made


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
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="three networks, short trainings, float16, one seed")
    add("--only", type=_names, metavar="NET,...", help="networks (default: all ten)")
    add("--storage", type=_names, metavar="NAME,...", help="storages (default: float16,fp8_hybrid,e4m3)")
    add("--methods", type=_names, metavar="NAME,...", help="ways to scale (default: all seven)")
    add("--seeds", type=_positive, metavar="N", help="trainings of each cell (default: 3; fp32: 5)")
    add("--budget", type=float, metavar="SECONDS", help="begin no training that would end later")
    add("--jobs", type=_positive, default=2, metavar="N", help="trainings at a time (default: 2)")
    add("--results", type=Path, metavar="FILE", help="the results (default: benchmarks/results/study.jsonl)")
    add(
        "--report", action="store_true", help="train nothing: only the table and the picture of what is there"
    )
    for name, text in EXPERIMENTS.items():
        add(f"--{name}", dest="experiment", action="store_const", const=name, help=f"instead: {text}")
    options = parser.parse_args(arguments)
    logging.getLogger("nnabla").setLevel(logging.WARNING)
    _check_names(parser, options)
    return options


def _check_names(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not (options.only or options.storage or options.methods):
        return
    from scaling_study.methods import METHODS, STORAGES
    from scaling_study.nets import NETS

    nets = list(NETS)
    if options.experiment is not None:
        if options.storage or options.methods:
            parser.error(f"--{options.experiment} has storages and methods of its own")
        nets = list(dict.fromkeys(job.net for job in further(options.experiment, None).jobs))
    for option, known in (("only", nets), ("storage", STORAGES), ("methods", METHODS)):
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
