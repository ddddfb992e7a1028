# SPDX-License-Identifier: Apache-2.0
"""Train small networks with every kind of loss scaling, and compare scores and lost gradients."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

RESULTS = Path(__file__).parent / "results"
REACH_PICTURE = Path(__file__).parents[1] / "docs" / "images" / "reach.png"

DESCRIPTION = """\
Trains small networks with the loss scaled in several ways, each at its defaults, and writes a table
of the results. The experiments:

  apart      does it train as well as fp32 where gradients lie far apart: two losses 1 : 1e-10, equations,
             deep nets?
  reach      two losses 1 : 1 to 1 : 1e-20 on one network: how accurate are the gradients of each layer?
  measuring  what is missed if one iteration in 1 to 32 measures?
  advice     do networks train as well as fp32 in the precisions that `diagnose` advises for their layers?
  weights    does it train as well as fp32 where the weights of losses change from batch to batch?
  joined     two versions of the package side by side: does anything train worse, or lose gradients, where
             more of the network has one scale: attention, recurrent nets, shared weights?

The ways to scale:

  none           gradients stored as they are
  fixed_128      the loss multiplied by 128
  dynamic_8      nnabla's DynamicLossScalingUpdater with its defaults: 8, doubled after 2000 good updates
  dynamic_65536  the same, starting with torch's default
  one_scale      one measured scale: AdaLossConfig(loss_scale_method="fixed"), every alpha is 1
  approx_range   layers' own scales by the published method: AdaLossConfig(loss_scale_method="approx_range")
  amax_history   AdaptiveLossScalingUpdater with all its defaults: each part of the network has a scale
  next           of `weights`, as the others below: the same with on_overflow="next"
  grad_scaler    a loop with a GradScaler, which skips the step of a batch that overflows
  dynamic        AdaptiveLossScalingUpdater with global_scale="dynamic"

SGD's learning rate is divided by the loss weight, so that it takes the same steps whatever the weight, and
fp32 has the same result with each.
"""

EPILOG = """\
Each finished job is a line of FILE.jsonl, the table is FILE.md. Stop at any time: the same command
continues. To repeat a job, remove its line from the file.

Time, on two idle cores: apart 30 minutes, reach 10, weights 10, joined 6 for each version, advice 5,
measuring 2; with --quick, which has its own files, less than two.

`joined` compares the package with that of another checkout, whose kernels are built (`python -m building`
there). PYTHONPATH selects the imported one; its lines are labelled `before` if the checkout's directory is
called so, else `now`, or as --label says. All lines go to the same file; fp32 is trained once.

examples:
  python benchmarks/study.py apart --quick
  python benchmarks/study.py apart --only net=vae,sigmoids method=amax_history
  python benchmarks/study.py apart --report            the table of what is there
  PYTHONPATH=../before python benchmarks/study.py joined
  python benchmarks/study.py joined                    the other version; the table has both
  python benchmarks/study.py joined --gradients        the error of every gradient instead of trainings
"""


def experiments() -> Dict[str, Any]:
    """Makers of experiments, quick or whole, by name."""
    from scaling_study import advice, apart, joined, measuring, reach, weights

    modules = (apart, reach, measuring, advice, weights, joined)
    return {module.__name__.rpartition(".")[2]: module.experiment for module in modules}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run an experiment, print its table, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = experiments()
    add = parser.add_argument
    add("experiment", nargs="?", choices=list(known), default="apart", help="(default: apart)")
    add("--quick", action="store_true", help="few networks, short trainings")
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE,...",
        help="only these jobs; net= alone filters trainings in fp32, too",
    )
    add("--jobs", type=int, default=2, metavar="N", help="number of processes (default: 2)")
    add("--results", type=Path, metavar="FILE", help="(default: benchmarks/results/EXPERIMENT.jsonl)")
    add("--report", action="store_true", help="train nothing: only the table of the results so far")
    add(
        "--label", metavar="LABEL", help="of joined: the imported version, before or now (default: see below)"
    )
    add("--gradients", action="store_true", help="of joined: compare gradients instead of training")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs} must be 1 or more")
    logging.getLogger("nnabla").setLevel(logging.WARNING)
    from scaling_study import experiment, joined

    label = options.label or joined.default_label()
    if options.experiment != "joined" and (options.label or options.gradients):
        parser.error("--label and --gradients are of joined alone")
    if label not in joined.LABELS:
        parser.error(f"--label {label!r} is unknown; choose of {', '.join(joined.LABELS)}")
    whole = known[options.experiment](options.quick)
    try:
        jobs = chosen(whole.jobs, options.only)
    except ValueError as error:
        parser.error(str(error))
    if options.experiment == "joined":
        jobs = joined.selected(jobs, label, gradients=options.gradients)
    name = f"{options.experiment}_quick" if options.quick else options.experiment
    results = options.results or RESULTS / f"{name}.jsonl"
    if not options.report:
        try:
            experiment.run(jobs, whole.work, results, options.jobs)
        except KeyboardInterrupt:
            print(f"Stopped: finished jobs are in {results}; the same command continues.")
            return 130
    lines = list(experiment.lines_of(whole.jobs, experiment.read(results)).values())
    table = whole.table(lines)
    results.with_suffix(".md").write_text(table, "utf-8")
    print(table)
    if whole.draw is not None and lines:
        whole.draw(results.with_suffix(".png") if options.results or options.quick else REACH_PICTURE, lines)
    return 0


def chosen(jobs: Sequence[Any], conditions: Sequence[str]) -> List[Any]:
    """Select the jobs that meet conditions such as `net=lenet,mlp8`."""
    for condition in conditions:
        field, _, values = condition.partition("=")
        if field not in jobs[0]._fields:
            raise ValueError(f"--only {condition}: choose of {', '.join(jobs[0]._fields)}")
        known = dict.fromkeys(str(getattr(job, field)) for job in jobs)
        for value in values.split(","):
            if value not in known:
                raise ValueError(f"--only {field}: {value!r} is unknown; choose of {','.join(known)}")
        jobs = [
            job
            for job in jobs
            if str(getattr(job, field)) in values.split(",")
            or (getattr(job, "method", "") == "fp32" and field != "net")
        ]
    return list(jobs)


if __name__ == "__main__":
    sys.exit(main())
