# SPDX-License-Identifier: Apache-2.0
"""nnabla's own updater with the communicator, against one process that is given all ranks' data."""

from __future__ import annotations

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from nnabla_adaloss.communicators import MPICommunicator

STEPS, BATCH = 10, 12  # the batch divides by 2, 3 and 4 ranks


def train(comm, rank, size):
    """The parameters after training on the share of each batch that `rank` of `size` has."""
    nn.clear_parameters()
    share = BATCH // size
    x, t = nn.Variable((share, 20)), nn.Variable((share, 1))
    rng = np.random.default_rng(0 if comm is None else rank)  # parameters differ until they are sent
    hidden = F.relu(PF.affine(x, 30, name="first", w_init=lambda shape: rng.standard_normal(shape) * 0.2))
    logits = PF.affine(hidden, 5, name="second", w_init=lambda shape: rng.standard_normal(shape) * 0.2)
    loss = F.mean(F.softmax_cross_entropy(logits, t)) / size
    parameters = nn.get_parameters()
    if comm is not None:
        comm.bcast([p.data for p in parameters.values()], 0)
        comm.check_agreement({name: p.data for name, p in parameters.items()})
    data = np.random.default_rng(1)

    def feed():
        whole_x, whole_t = data.standard_normal((BATCH, 20)), data.integers(0, 5, (BATCH, 1))
        x.d, t.d = whole_x[rank * share : (rank + 1) * share], whole_t[rank * share : (rank + 1) * share]

    solver = S.Adam(1e-2)
    solver.set_parameters(parameters)
    grads = [p.grad for p in parameters.values()]
    updater = DynamicLossScalingUpdater(solver, loss, feed, scale=256.0, comm=comm, grads=grads)
    for _ in range(STEPS):
        updater.update()
    return {name: p.data for name, p in parameters.items()}


if __name__ == "__main__":
    communicator = MPICommunicator()
    communicator.init()
    together = train(communicator, communicator.rank, communicator.size)
    communicator.check_agreement(together)
    alone = train(None, 0, 1)
    for name, array in alone.items():
        np.testing.assert_allclose(together[name].data, array.data, rtol=0, atol=1e-6, err_msg=name)
    communicator.barrier()
    if communicator.rank == 0:
        print("equal")
