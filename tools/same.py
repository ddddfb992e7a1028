# SPDX-License-Identifier: Apache-2.0
"""Check that a checkout of the package trains bit for bit as another one did."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from queue import Queue
from typing import Dict, List, Optional, Sequence

from tqdm import tqdm

from tools.checkouts import Worker, checkout
from tools.same_programs import PARTS, PROGRAMS

DESCRIPTION = f"""\
Trains {len(PROGRAMS)} small networks for some iterations each, with the package of a checkout, and prints
a line for each program: its name, and a hash of each part of its outcome:

  results     of each iteration: updated or not, scale, retries, reason, layers, and the loss
  scales      of each layer in each iteration
  counters    batches and updates
  state       numbers of the saved state, whatever their keys
  parameters  with running statistics and solver states

A name is NETWORK/STORAGE/METHOD/LOOP/EXTRA/SOLVER; each pair of options occurs. A program that raises has the
exception instead. Lines that begin with # are comments.
"""

EPILOG = """\
examples:
  git worktree add ../before main                       the state before a change
  (cd ../before && python -m building)
  python -m tools.same ../before > before.txt           four minutes on two idle cores
  python -m tools.same . --against before.txt           programs that differ, and in which parts
  python -m tools.same . --against before.txt --only '*/float16/*/history/*'

Results depend on the processor, whose BLAS sums in an order of its own: compare on one machine.
"""


def run(folder: Path, names: Sequence[str], jobs: int) -> Dict[str, str]:
    """Hashes of programs, by name in this order; a process of the checkout for each job."""
    with ExitStack() as stack:
        workers: Queue[Worker] = Queue()
        for _ in range(jobs):
            worker = Worker(folder, "same_programs.py")
            stack.callback(worker.close)
            workers.put(worker)

        def hashes(name: str) -> str:
            worker = workers.get()
            try:
                return str(worker.ask({"program": name})["hashes"])
            finally:
                workers.put(worker)

        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        found = tqdm(pool.map(hashes, names), total=len(names), unit=" programs", leave=False, disable=None)
        return dict(zip(names, found))


def listing(path: str) -> Dict[str, str]:
    """Read hashes by name from a printed listing."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))


def differences(found: Dict[str, str], expected: Dict[str, str]) -> List[str]:
    """Line for each program whose hashes differ: its name, and the parts."""
    lines = []
    for name, hashes in found.items():
        before, now = expected.get(name, "").split(), hashes.split()
        if before == now:
            continue
        if len(before) == len(now) == len(PARTS):
            parts = " ".join(part for part, a, b in zip(PARTS, before, now) if a != b)
        else:
            parts = f"{expected.get(name, 'not there')} -> {hashes}"
        lines.append(f"{name}  {parts}")
    return lines


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Train, and print hashes, or differences."""
    parser = argparse.ArgumentParser(
        prog="same",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", type=checkout, help="root of a checkout whose kernels are built")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names of programs, such as 'lstm/*'")
    parser.add_argument("--against", type=listing, metavar="FILE", help="print differences from this listing")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2)")
    options = parser.parse_args(arguments)
    names = [name for name in PROGRAMS if fnmatch(name, options.only)]
    if not names:
        parser.error(f"--only={options.only!r} matches no program, such as {next(iter(PROGRAMS))}")
    try:
        found = run(options.checkout, names, options.jobs)
    except RuntimeError as error:
        sys.exit(f"same: {error}")
    if options.against is None:
        print(*(f"{name} {hashes}" for name, hashes in found.items()), sep="\n")
        return
    lines = differences(found, options.against)
    print(*lines, f"{len(lines)} of {len(found)} programs differ", sep="\n")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
