# SPDX-License-Identifier: Apache-2.0
"""What an installation takes: room on disk by package, time to import, and the first update's compiling."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from importlib.metadata import Distribution, distributions
from typing import Dict, Optional

DESCRIPTION = """\
Prints the size of the installed packages, how long imports take in a fresh process, and how long the first
update takes with and without the compiled CPU kernels on disk. Run it in an environment that holds nothing
else: pip install . in an empty one. Nothing is wanted of it but that nobody is surprised.
"""

IMPORTS = (
    "import nnabla_adaloss",
    "import numpy",
    "import nnabla",
    "import numba",
    "import scipy.special",
    "from nnabla_adaloss import AdaptiveLossScalingUpdater",
)

TIMED = "import time; start = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"

FIRST_UPDATE = """
import time
import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
import nnabla.solvers as S
from nnabla_adaloss import AdaptiveLossScalingUpdater
x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
loss = F.mean(PF.affine(F.tanh(PF.affine(x, 5, name="a")), 2, name="b") ** 2)
solver = S.Sgd(0.1)
solver.set_parameters(nn.get_parameters())
updater = AdaptiveLossScalingUpdater(solver, loss, storage="float16")
start = time.process_time()
updater.update()
print(time.process_time() - start)
"""


def size(package: Distribution) -> int:
    """Bytes on disk of all files of an installed package."""
    paths = (package.locate_file(file) for file in package.files or ())
    return sum(os.path.getsize(str(path)) for path in paths if os.path.isfile(str(path)))


def seconds(program: str, rounds: int, environment: Optional[Dict[str, str]] = None) -> float:
    """The least number that a program printed last, each time in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    environment = {**os.environ, **(environment or {})}
    runs = (
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        for _ in range(rounds)
    )
    return min(float(printed.split()[-1]) for printed in runs)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("--rounds", type=int, default=5, help="imports are timed so often (default: 5)")
    rounds = parser.parse_args().rounds
    sizes = {package.metadata["Name"]: size(package) / 1e6 for package in distributions()}
    largest = sorted(sizes, key=lambda name: -sizes[name])
    print(f"{len(sizes)} packages, {sum(sizes.values()):.0f} MB")
    for name in [*largest[:8], "nnabla-adaloss"]:
        print(f"  {name:24} {sizes.get(name, 0.0):6.1f} MB")
    print("import, least of", rounds)
    for statement in IMPORTS:
        print(f"  {statement:56} {seconds(TIMED.format(statement), rounds):5.2f} s")
    print("first update, seconds of the processor")
    with tempfile.TemporaryDirectory() as cache:
        environment = {"NUMBA_CACHE_DIR": cache}
        print(f"  kernels compiled           {seconds(FIRST_UPDATE, 1, environment):5.2f} s")
        print(f"  kernels read from the disk {seconds(FIRST_UPDATE, rounds, environment):5.2f} s")


if __name__ == "__main__":
    main()
