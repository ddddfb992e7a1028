# SPDX-License-Identifier: Apache-2.0
"""Compare the training speed of two checkouts of the package, or of one with two sets of arguments."""

from __future__ import annotations

import argparse
import ast
import sys
from contextlib import closing
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from tools.checkouts import Worker, checkout
from tools.speed_worker import WORKLOADS

BLOCK = 16  # iterations: whole cycles of measuring and other ones

DESCRIPTION = """\
Trains the same networks with two checkouts, each in a process of its own with one thread, which take turns
in blocks of iterations: dynamic (nnabla's own DynamicLossScalingUpdater) and adaptive of the old one,
adaptive and dynamic of the new one, and so on. A block is 16 iterations, two whole cycles of
measurement, so that the expensive one in eight counts. Blocks are timed in CPU time of the thread, which
other processes change less than wall time.

  adaptive / dynamic  of the old and of the new checkout: the median over the blocks, and its quartiles
  new / old           time of adaptive in the new checkout over that in the old one
  control             the same for dynamic, nnabla's code in both: its distance from 1.00 is chance
"""

EPILOG = f"""\
cases: {", ".join(WORKLOADS)}
  chain-40x32 is 40 affine layers of 32 with tanh, batch 16; rebuilt: its graph is built for each iteration.
  stochastic-depth keeps 10 of 12 blocks in each iteration, different ones; blocks-alike the same ones.
  new-graphs has different edges in each iteration.
  lenet, mlp and resnet20 are trained in fp32, the demo's networks in emulated float16.

examples:
  git worktree add ../before main                   a checkout to compare with; build its kernels there, too:
  (cd ../before && python -m building)
  python -m tools.compare_speed ../before .         all cases: seven minutes, resnet20 three of them
  python -m tools.compare_speed ../before . chain-40x32 rebuilt-40x32
  python -m tools.compare_speed . . --old delay=0 --new delay=1 chain-40x32
                                                    one checkout with two settings: arguments of AdaLossConfig
                                                    or AdaptiveLossScalingUpdater
"""


class Trainer(Worker):
    """Process that trains with one checkout, until it is closed."""

    def __init__(self, checkout: Path, options: Dict[str, Any]) -> None:
        super().__init__(checkout, "speed_worker.py")
        self._options = options

    def build(self, case: str) -> str:
        """Build a case and return its title."""
        return str(self.ask({"case": case, "options": self._options})["title"])

    def seconds(self, way: str) -> float:
        """Seconds that a block of iterations takes."""
        return float(self.ask({"way": way, "iterations": BLOCK})["seconds"])


class Spread(NamedTuple):
    """Quartiles of numbers."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:6.3f} ({self.low:.3f}-{self.high:.3f})"


def spread(numbers: Sequence[float]) -> Spread:
    """Compute quartiles; those of one number are the number."""
    if len(numbers) == 1:
        return Spread(numbers[0], numbers[0], numbers[0])
    low, _, high = quantiles(numbers, n=4, method="inclusive")
    return Spread(low, median(numbers), high)


Blocks = Dict[Tuple[str, str], List[float]]


def take_turns(workers: Dict[str, Trainer], seconds: float, title: str) -> Blocks:
    """Measure blocks by worker and way, for about this many seconds and at least three times each.

    The order changes from round to round, so that no worker is always first.
    """
    from tqdm import tqdm

    # Neighbours in time are compared: both ways of a checkout, and the same way of both.
    old, new = workers
    turns = [(old, "dynamic"), (old, "adaptive"), (new, "adaptive"), (new, "dynamic")]
    warm = sum(workers[name].seconds(way) for name, way in turns)
    taken: Blocks = {turn: [] for turn in turns}
    rounds = max(3, int(seconds / warm))
    for number in tqdm(range(rounds), desc=title, unit=" rounds", leave=False, disable=None):
        shift = number % len(turns)
        for name, way in turns[shift:] + turns[:shift]:
            taken[name, way].append(workers[name].seconds(way))
    return taken


def compared(taken: Blocks) -> Dict[str, Spread]:
    """Compute the columns of the table."""

    def over(a: Tuple[str, str], b: Tuple[str, str]) -> Spread:
        return spread([x / y for x, y in zip(taken[a], taken[b])])

    return {
        "old": over(("old", "adaptive"), ("old", "dynamic")),
        "new": over(("new", "adaptive"), ("new", "dynamic")),
        "new over old": over(("new", "adaptive"), ("old", "adaptive")),
        "control": over(("new", "dynamic"), ("old", "dynamic")),
    }


HEADER = (
    f"{'':44}{'adaptive / dynamic':>33}\n"
    f"{'':44}{'old':>21}{'new':>21}{'new / old':>21}{'control':>9}{'dynamic':>12}"
)


def row(title: str, columns: Dict[str, Spread], dynamic: float) -> str:
    """A line of the table; `dynamic` is its seconds per iteration."""
    old, new, ratio = (str(columns[name]) for name in ("old", "new", "new over old"))
    return f"{title:44}{old:>21}{new:>21}{ratio:>21}{columns['control'].middle:9.3f}{1e3 * dynamic:9.2f} ms"


def argument(text: str) -> Tuple[str, Any]:
    """Parse NAME=VALUE: `delay=1` as a number, `on_overflow=next` as a word."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE, such as delay=1")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Compare, and print a table."""
    parser = argparse.ArgumentParser(
        prog="compare_speed",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old_dir", type=checkout, help="root of a checkout")
    parser.add_argument("new_dir", type=checkout, help="root of another, or the same")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="networks to train (default: all)")
    for side in ("old", "new"):
        parser.add_argument(
            f"--{side}",
            type=argument,
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"an argument of the {side} checkout's updater or AdaLossConfig; may be repeated",
        )
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU time per case (default: 20)")
    # Options may stand between the folders and the cases.
    options = parser.parse_intermixed_args(arguments)
    unknown = sorted(set(options.cases) - set(WORKLOADS))
    if unknown:
        parser.error(f"unknown case: {', '.join(unknown)}; choose from {', '.join(WORKLOADS)}")
    print(HEADER)
    try:
        first = Trainer(options.old_dir, dict(options.old))
        second = Trainer(options.new_dir, dict(options.new))
        with closing(first) as old, closing(second) as new:
            for case in options.cases or WORKLOADS:
                title, _ = old.build(case), new.build(case)
                taken = take_turns({"old": old, "new": new}, options.seconds, title)
                dynamic = median(taken["new", "dynamic"]) / BLOCK
                print(row(title, compared(taken), dynamic), flush=True)
    except RuntimeError as error:
        sys.exit(f"compare_speed: {error}")


if __name__ == "__main__":
    main()
