# SPDX-License-Identifier: Apache-2.0
"""Size of an installation: disk space, import time and memory."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from typing import List

DESCRIPTION = """\
Prints the size of the installed packages, the CPU time of imports in a fresh process and the memory after
them, and the same for the first update. Run it in an environment that contains nothing else: pip install . in
an empty one.
"""

IMPORTS = (
    "import nnabla_adaloss",
    "import numpy",
    "import nnabla",
    "from nnabla_adaloss.kernels import CpuKernels; CpuKernels()",
    "from nnabla_adaloss import AdaptiveLossScalingUpdater",
)

# Resident memory after the statement, that of libraries included.
TIMED = """
import time
start = time.process_time()
{}
taken = time.process_time() - start
held = open("/proc/self/statm").read().split()[1]
print(taken, int(held) * 4096 / 1e6)
"""

FIRST_UPDATE = """
import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
import nnabla.solvers as S
from nnabla_adaloss import AdaptiveLossScalingUpdater
x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
loss = F.mean(PF.affine(F.tanh(PF.affine(x, 5, name="a")), 2, name="b") ** 2)
solver = S.Sgd(0.1)
solver.set_parameters(nn.get_parameters())
updater = AdaptiveLossScalingUpdater(solver, loss, storage="float16")
import time
start = time.process_time()
updater.update()
taken = time.process_time() - start
held = open("/proc/self/statm").read().split()[1]
print(taken, int(held) * 4096 / 1e6)
"""


def size(package: Distribution) -> int:
    """Size on disk of all files of an installed package, in bytes."""
    paths = (package.locate_file(file) for file in package.files or ())
    return sum(os.path.getsize(str(path)) for path in paths if os.path.isfile(str(path)))


def least(program: str, rounds: int) -> List[float]:
    """Run a program in new processes; return the minimum of each of the two numbers that it prints last."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    # Another folder, so that a checkout in this one is not imported instead of the installation.
    runs = (
        subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout
        for _ in range(rounds)
    )
    return [min(numbers) for numbers in zip(*([float(x) for x in run.split()[-2:]] for run in runs))]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("--rounds", type=int, default=5, help="number of runs of each (default: 5)")
    rounds = parser.parse_args().rounds
    sizes = {package.metadata["Name"]: size(package) / 1e6 for package in distributions()}
    largest = sorted(sizes, key=lambda name: -sizes[name])
    print(f"{len(sizes)} packages, {sum(sizes.values()):.0f} MB")
    for name in [*largest[:6], "nnabla-adaloss"]:
        print(f"  {name:24} {sizes.get(name, 0.0):6.1f} MB")
    print("seconds of the processor, and memory: least of", rounds)
    for statement in ("pass", *IMPORTS):
        seconds, megabytes = least(TIMED.format(statement), rounds)
        print(f"  {statement:60} {seconds:5.2f} s {megabytes:6.0f} MB")
    seconds, megabytes = least(FIRST_UPDATE, rounds)
    print(f"  {'the first update alone':60} {seconds:5.2f} s {megabytes:6.0f} MB")


if __name__ == "__main__":
    main()
