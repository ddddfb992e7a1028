# SPDX-License-Identifier: Apache-2.0
"""A complete training in half precision: handwritten digits, a small conv net, nothing to tune.

  python samples/minimal.py

prints, after three seconds in emulated fp16 on one CPU core:

  32 of 32 correct, loss scale 65536
"""

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from common.digits import load
from tqdm import trange

from nnabla_adaloss import AdaptiveLossScalingUpdater

digits, random = load(), np.random.default_rng(0)
x, t = nn.Variable((32, 1, 8, 8)), nn.Variable((32, 1))
h = F.relu(PF.convolution(x, 16, (3, 3), pad=(1, 1), name="conv1"))
h = F.relu(PF.convolution(F.max_pooling(h, (2, 2)), 32, (3, 3), pad=(1, 1), name="conv2"))
y = PF.affine(h, 10, name="fc")
loss = F.mean(F.softmax_cross_entropy(y, t))
solver = S.Momentum(lr=0.02)
solver.set_parameters(nn.get_parameters())


def feed():
    batch = random.integers(0, len(digits.train.t), 32)
    x.d, t.d = digits.train.x[batch], digits.train.t[batch]


updater = AdaptiveLossScalingUpdater(solver, loss, feed, storage="float16")  # on a GPU in half: no storage
for _ in trange(400):
    result = updater.update()

x.d, t.d = digits.test.x[:32], digits.test.t[:32]  # digits that the network has not seen
y.forward()
print(f"{(y.d.argmax(axis=1) == t.d[:, 0]).sum()} of 32 correct, loss scale {result.scale:g}")
