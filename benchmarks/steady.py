# SPDX-License-Identifier: Apache-2.0
"""Watches whether trainings stay quiet: what overflows, what is lost, and whether there was a reason."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, List, Optional, Sequence

if TYPE_CHECKING:
    from scaling_study.experiment import Experiment

RESULTS = Path(__file__).parent / "results"

PARTS = ("quiet", "jumps", "turns")
QUICK = {"quiet": 150, "jumps": 60, "turns": 100}
"""Batches of each training, where it is to be quick."""

DESCRIPTION = """\
Trains small networks in float16, and tells which batches overflow. Measured scales leave room for gradients
that grow, so that an overflow should have a reason: a gradient larger than any that is remembered.

  quiet   six networks whose gradients change slowly, 1,500 batches each: a classifier that knows all its
          images, a focal loss, a graph network, a VAE, a GAN, a language model; three of them in nnabla's own
          half precision, too. After the first batches nothing should overflow. Where something does, the same
          training runs once more beside a twin in fp32, which tells how large the gradients really were.
  jumps   MLPs of 4 to 64 layers, the graph network and the language model, whose loss is multiplied by 2^10
          or 2^20 after 100 batches, or by 1e6 and 1e-6 in turn. What that costs should depend on the jump,
          and not on the depth.
  turns   two tasks on one trunk, of which each batch trains one, with losses of 1 : 1e-6 to 1 : 1e-12. Both
          should be learned as in fp32.

The ways to scale:

  default     AdaptiveLossScalingUpdater with its defaults: a batch that overflows runs again
  next        the same with on_overflow="next": it is thrown away
  skip        and with max_retries=0: the iteration ends with it
  GradScaler  a loop of one's own; a step that overflows is skipped
  dynamic     nnabla's DynamicLossScalingUpdater, starting with torch's default, 65536
  halving     the same, starting with a scale so large that it is halved until it fits
"""

EPILOG = """\
Each training is a line of FOLDER/steady_PART.jsonl as soon as it is done, the table is FOLDER/steady_PART.md.
The same command goes on where it was stopped; --fresh begins again. The package is the one that Python finds
first: to watch another checkout, name it in PYTHONPATH, and a folder of its own.

Time. All of it takes about half an hour on two cores that have other work, too.

Examples:
  python benchmarks/steady.py --quick                           two minutes: does it work?
  python benchmarks/steady.py                                   everything
  python benchmarks/steady.py --parts quiet --nets gcn,transformer --ways default,GradScaler
  PYTHONPATH=../other python benchmarks/steady.py --results /tmp/other
  python benchmarks/steady.py --report                          the tables of what is there
"""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Train what the options choose, and print the tables; returns the exit status."""
    options = parse(arguments)
    from scaling_study import experiment, records

    import nnabla_adaloss

    if not options.report:
        print(f"Watching {Path(nnabla_adaloss.__file__).parent}")
    for part in options.parts:
        whole = part_of(part, quick=options.quick)
        chosen = whole._replace(jobs=[job for job in whole.jobs if _is_chosen(job, options)])
        results = options.results / f"{whole.name}.jsonl"
        if not options.report:
            if options.fresh:
                results.unlink(missing_ok=True)
            try:
                experiment.run(chosen, results, processes=options.jobs, budget=None)
            except KeyboardInterrupt:
                print(f"Stopped: what is done is in {results}, and the same command goes on from there.")
                return 130
        there = {tuple(line.get(f) for f in whole.jobs[0]._fields): line for line in records.read(results)}
        # Trainings beside each other do not end in the order of the table.
        table = whole.table("", [there[job] for job in map(tuple, whole.jobs) if job in there])
        results.with_suffix(".md").write_text(table, "utf-8")
        print(table)
    return 0


def part_of(name: str, *, quick: bool) -> Experiment:
    """One of `PARTS`, with short trainings if it is to be quick."""
    from importlib import import_module

    module = import_module(f"steadiness.{name}")
    made: Experiment = module.experiment(QUICK[name] if quick else None)
    return made._replace(name=f"{made.name}_quick") if quick else made


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """The options; exits with a message when one is wrong."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="short trainings, emulated only; files of their own")
    add("--parts", type=_names, default=list(PARTS), metavar="PART,...", help="(default: quiet,jumps,turns)")
    add("--nets", type=_names, metavar="NET,...", help="first column of the table (default: all)")
    add("--ways", type=_names, metavar="WAY,...", help="ways to scale, beside fp32 (default: all)")
    add("--half", choices=("emulated", "native"), help="of quiet: only this half precision (default: both)")
    add("--jobs", type=int, default=2, metavar="N", help="trainings at a time (default: 2)")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help="(default: benchmarks/results)")
    add("--fresh", action="store_true", help="forget what is there of these parts")
    add("--report", action="store_true", help="train nothing: only the tables of what is there")
    options = parser.parse_args(arguments)
    logging.getLogger("nnabla").setLevel(logging.WARNING)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs} must be 1 or more")
    _check_names(parser, "--parts", options.parts, PARTS)
    every = [job for part in options.parts for job in part_of(part, quick=options.quick).jobs]
    _check_names(parser, "--nets", options.nets, dict.fromkeys(job.net for job in every))
    _check_names(parser, "--ways", options.ways, dict.fromkeys(job.way for job in every))
    return options


def _check_names(
    parser: argparse.ArgumentParser, option: str, names: Optional[List[str]], known: Iterable[str]
) -> None:
    unknown = [name for name in names or () if name not in known]
    if unknown:
        parser.error(f"{option}: {unknown[0]!r} is unknown; choose of {','.join(known)}")


def _is_chosen(job: Any, options: argparse.Namespace) -> bool:
    half = getattr(job, "half", "emulated")
    return (
        (not options.nets or job.net in options.nets)
        and (not options.ways or job.way in (*options.ways, "fp32"))
        and half in ([options.half] if options.half else ["emulated"] if options.quick else [half])
    )


def _names(text: str) -> List[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
