# SPDX-License-Identifier: Apache-2.0
"""Time training iterations on several MPI ranks that share one batch, and the exchange by itself.

  python benchmarks/distributed.py
  mpirun -n 2 python benchmarks/distributed.py

The first column is the time of an update, of the slowest rank; the second that of the exchange alone, after a
barrier, with all gradients ready: packing, summing and, with delay 1, the statistics. Both are the fastest
tenth of the repetitions, because disturbances only add time. Both kinds of scaling are at their defaults:
adaptive measures its global scale, which is exchanged with the gradients. With a core per rank, times should
be little more than that of one rank divided by the number of ranks. Set OMP_NUM_THREADS=1 in all cases.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, Callable, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    MPICommunicator,
)


def updater_of(kind: str, comm: Optional[MPICommunicator], batch: int, width: int) -> Any:
    nn.clear_parameters()
    rng = np.random.default_rng(0)
    x = nn.Variable.from_numpy_array(rng.standard_normal((batch, 784)).astype(np.float32))
    t = nn.Variable.from_numpy_array(rng.integers(0, 10, (batch, 1)))
    h = x
    for index in range(3):
        h = F.relu(PF.affine(h, width, name=f"hidden{index}"))
    loss = F.mean(F.softmax_cross_entropy(PF.affine(h, 10, name="output"), t))
    solver = S.Momentum(1e-3)
    solver.set_parameters(nn.get_parameters())
    if kind == "dynamic":
        grads = [p.grad for p in nn.get_parameters().values()]
        return DynamicLossScalingUpdater(solver, loss, lambda: None, comm=comm, grads=grads)
    config = AdaLossConfig(delay=int(kind[-1]))
    return AdaptiveLossScalingUpdater(solver, loss, comm=comm, config=config, average=True)


def seconds(comm: MPICommunicator, repeats: int, action: Callable[[], Any]) -> float:
    """Time of the slowest rank: the 10th percentile over the repetitions."""
    found = []
    for _ in range(repeats):
        comm.barrier()
        begin = time.perf_counter()
        action()
        found.append(time.perf_counter() - begin)
    return float(np.percentile(comm.all_reduce_max_float(found), 10))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=128, help="of all ranks together (default: 128)")
    parser.add_argument("--width", type=int, default=512, help="of the three hidden layers (default: 512)")
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    comm = MPICommunicator()
    comm.init()
    with comm.abort_on_exception():
        batch = options.batch_size // comm.size
        if comm.rank == 0:
            print(f"{comm.size} rank(s), {batch} of {options.batch_size} images each")
        for kind in ("dynamic", "adaptive, delay 0", "adaptive, delay 1"):
            updater = updater_of(kind, comm, batch, options.width)
            for _ in range(3):
                updater.update()
            update = seconds(comm, options.repeats, updater.update)
            exchange = seconds(comm, options.repeats, lambda updater=updater: exchange_of(updater, comm))
            megabytes = sum(4e-6 * p.size for p in updater.solver.get_parameters().values())
            if comm.rank == 0:
                print(
                    f"  {kind:18} update {1e3 * update:7.2f} ms   exchange of {megabytes:.1f} MB "
                    f"{1e3 * exchange:6.2f} ms"
                )


def exchange_of(updater: Any, comm: MPICommunicator) -> None:
    if isinstance(updater, AdaptiveLossScalingUpdater):
        updater._exchange_gradients()
    else:
        comm.all_reduce([p.grad for p in updater.solver.get_parameters().values()])


if __name__ == "__main__":
    main()
