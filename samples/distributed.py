# SPDX-License-Identifier: Apache-2.0
"""Training on handwritten digits with several processes that share each batch."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence

from option_values import positive

if TYPE_CHECKING:
    from common.digits import Examples

    from nnabla_adaloss import MPICommunicator


DESCRIPTION = """\
Trains a network on scikit-learn's handwritten digits with several MPI processes ("ranks") in emulated fp16
storage, and compares the loss scaling methods:

  dynamic      nnabla's DynamicLossScalingUpdater: one scale for the whole network
  adaptive     AdaptiveLossScalingUpdater at its defaults: a measured scale for each component

Start it on any number of ranks:

  python samples/distributed.py --ranks 2         starts mpirun itself
  mpirun -n 2 python samples/distributed.py       what --ranks does, and how to start your own
  python samples/distributed.py                   one rank, no mpirun
"""

EPILOG = """\
How it works. Each rank has the whole network and a slice of each batch. After backward, gradients are
summed over the ranks, and every rank makes the same update. The loss is divided by the number of ranks, so
the sum is the gradient of the whole batch's mean: up to fp16's rounding, the training equals that of one
process.

How the two methods differ in use:

  dynamic      you broadcast the parameters of rank 0 and list the gradients to exchange
  adaptive     you pass the communicator; the updater does the rest, and checks it every check_every updates

With dynamic, an overflow on one rank makes all ranks drop the batch. With adaptive, that rank repeats its
share with lower scales while the others wait, and nothing is lost. Ctrl-C, an exception or a killed rank
ends all ranks, with the error of the one that failed.

The table: test accuracy on 360 images; batches lost to overflow; images per second of all ranks together,
including the emulation of fp16 (it says nothing about a GPU, and ranks need a core each to gain anything);
and whether all ranks end with identical parameters.

--ranks lets Open MPI run as root, with more ranks than cores, on this machine only; for your own launch
lines see docs/distributed.md.

Examples:
  python samples/distributed.py --ranks 4 --quick
  python samples/distributed.py --ranks 2 --network lenet --method adaptive
"""

LAUNCH_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl": "self,sm",
}


class Row(NamedTuple):
    """Result of one training."""

    method: str
    accuracy: float
    loss: float
    thrown_away: int
    images_per_second: float


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Train with each method; return the exit status."""
    options = parse(arguments)
    # Ranks share the cores of a machine: more threads would only compete.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.ranks is not None:
        launch(options.ranks, sys.argv[1:] if arguments is None else arguments)
    logging.getLogger("nnabla").setLevel(logging.WARNING)  # its message would appear once per rank
    from nnabla_adaloss import MPICommunicator

    comm = MPICommunicator(timeout_s=300)
    comm.init()
    with comm.abort_on_exception():
        if options.batch_size % comm.size:
            if comm.rank == 0:
                print(
                    f"--batch-size {options.batch_size} cannot be shared by {comm.size} ranks",
                    file=sys.stderr,
                )
            return 2
        rows = [train(method, comm, options) for method in options.method]
        if comm.rank == 0:
            print(table(rows, comm.size, options.batch_size))
    return 0


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parse the options; exit with a message if one is wrong."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # `launch` must find --ranks in its full form
    )
    add = parser.add_argument
    add("--ranks", type=positive, metavar="N", help="start this program with mpirun on N ranks")
    add(
        "--method",
        nargs="+",
        choices=tuple(UPDATERS),
        default=list(UPDATERS),
        help="how to scale the loss (default: both, one after the other)",
    )
    add("--quick", action="store_true", help="60 updates instead of 300, for a quick look")
    add("--iterations", type=positive, metavar="N", help="updates per training (default: 300)")
    add("--network", choices=("mlp", "lenet"), default="mlp", help="(default: mlp, eight hidden layers)")
    add(
        "--batch-size",
        type=positive,
        default=64,
        metavar="N",
        help="images per batch, of all ranks together (default: 64)",
    )
    add(
        "--loss-weight",
        type=float,
        default=1e-6,
        metavar="W",
        help="factor of the loss: small ones underflow in fp16 (default: 1e-6)",
    )
    add("--seed", type=int, default=0, help="decides initial weights and batches (default: 0)")
    options = parser.parse_args(arguments)
    if options.iterations is None:
        options.iterations = 60 if options.quick else 300
    return options


def launch(ranks: int, arguments: Sequence[str]) -> None:
    """Replace this process by mpirun with this program; never return."""
    # The environment's own launcher first: another MPI's would start jobs of one rank each.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None:
        sys.exit("--ranks needs mpirun: pip install 'nnabla-adaloss[mpi]'")
    without_ranks = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    without_ranks.add_argument("--ranks")
    _, rest = without_ranks.parse_known_args(arguments)
    command = [mpirun, "-n", str(ranks), sys.executable, str(Path(__file__).resolve()), *rest]
    os.execve(mpirun, command, {**LAUNCH_ENVIRONMENT, **os.environ})


class ShareFeeder:
    """Fills two Variables with this rank's share of the next batch.

    Args:
        examples: the source.
        x: receives the pixels.
        t: receives the digits.
        comm: determines this rank's share.
        seed: determines the order.
    """

    def __init__(self, examples: Examples, x: Any, t: Any, comm: MPICommunicator, seed: int) -> None:
        import numpy as np

        self.count = 0
        self._examples, self._x, self._t, self._comm = examples, x, t, comm
        self._random = np.random.RandomState(seed)

    def __call__(self) -> None:
        batch_size = self._x.shape[0] * self._comm.size
        # All ranks draw the same batch, and each takes every size-th image of it.
        batch = self._random.choice(len(self._examples.x), batch_size, replace=False)
        share = batch[self._comm.rank :: self._comm.size]
        self._x.d = self._examples.x[share]
        self._t.d = self._examples.t[share]
        self.count += 1


def train(method: str, comm: MPICommunicator, options: argparse.Namespace) -> Row:
    """Train one network; every rank trains on its share of the data."""
    import nnabla as nn
    import nnabla.functions as F
    import nnabla.solvers as S
    from common.digits import load
    from networks import NETWORKS
    from tqdm import tqdm

    recipe = NETWORKS[options.network]
    data = load()
    nn.clear_parameters()
    nn.seed(options.seed + comm.rank)  # ranks start different: rank 0 broadcasts its parameters
    x = nn.Variable((options.batch_size // comm.size, *data.train.x.shape[1:]))
    t = nn.Variable((x.shape[0], 1))
    # The sum over the ranks is then the mean over the whole batch.
    weight = options.loss_weight / comm.size
    loss = F.mean(F.softmax_cross_entropy(recipe.build(x), t)) * weight
    # SGD moves weights by learning rate times gradient: this cancels the loss weight.
    learning_rate = recipe.learning_rate / options.loss_weight
    solver = S.Momentum(learning_rate, 0.9)
    solver.set_parameters(nn.get_parameters())
    feeder = ShareFeeder(data.train, x, t, comm, options.seed)
    updater = UPDATERS[method](solver, loss, feeder, comm, options.iterations)

    begin, warmed_up = 0.0, 0
    # Under mpirun ranks cannot detect a terminal: one bar, rarely updated.
    bar = tqdm(
        range(options.iterations), desc=method, unit=" updates", disable=comm.rank > 0, mininterval=0.5
    )
    for iteration in bar:
        solver.set_learning_rate(learning_rate * (1.0 - iteration / options.iterations))
        updater.update()
        if iteration == 0:  # it may have compiled kernels
            begin, warmed_up = time.perf_counter(), feeder.count
    seconds = time.perf_counter() - begin

    # Raises on every rank unless the ranks have the same parameters, to the bit.
    comm.check_agreement({name: p.data for name, p in nn.get_parameters().items()})
    logits = recipe.build(nn.Variable.from_numpy_array(data.test.x))
    mean = F.mean(F.softmax_cross_entropy(logits, nn.Variable.from_numpy_array(data.test.t)))
    nn.forward_all([logits, mean])
    right = float((logits.d.argmax(axis=1) == data.test.t[:, 0]).mean())
    images_per_second = (feeder.count - warmed_up) * options.batch_size / seconds
    return Row(method, right, float(mean.d), feeder.count - options.iterations, images_per_second)


def _dynamic(solver: Any, loss: Any, feeder: ShareFeeder, comm: MPICommunicator, iterations: int) -> Any:
    from nnabla_adaloss import DynamicLossScalingUpdater, FormatEmulation

    parameters = solver.get_parameters().values()
    comm.bcast([p.data for p in parameters], 0)
    grads = [p.grad for p in parameters]
    loss = FormatEmulation(loss, "float16")
    # nnabla's 2000 updates until the scale doubles are too many for a training as short as this.
    growth_interval = max(1, iterations // 40)
    return DynamicLossScalingUpdater(solver, loss, feeder, N=growth_interval, comm=comm, grads=grads)


def _adaptive(solver: Any, loss: Any, feeder: ShareFeeder, comm: MPICommunicator, iterations: int) -> Any:
    from nnabla_adaloss import AdaptiveLossScalingUpdater

    return AdaptiveLossScalingUpdater(solver, loss, feeder, comm=comm, storage="float16", check_every=50)


UPDATERS: Dict[str, Any] = {"dynamic": _dynamic, "adaptive": _adaptive}


def table(rows: Sequence[Row], ranks: int, batch_size: int) -> str:
    """Write the rows below a head."""
    plural = "s" if ranks > 1 else ""
    lines: List[str] = [
        "",
        f"{ranks} rank{plural}, {batch_size // ranks} images each per batch",
        f"  {'':10}{'test accuracy':>15}{'test loss':>12}{'thrown away':>14}{'images/s':>11}",
    ]
    lines += [
        f"  {row.method:10}{row.accuracy:>15.1%}{row.loss:>12.4f}{row.thrown_away:>14}"
        f"{row.images_per_second:>11.0f}"
        for row in rows
    ]
    if ranks > 1:
        lines += ["", f"All {ranks} ranks hold the same parameters, to the bit."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
