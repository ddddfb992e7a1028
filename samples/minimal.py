# SPDX-License-Identifier: Apache-2.0
"""Complete training in half precision: handwritten digits, a small conv net, nothing to tune.

Copy this file anywhere. It needs only nnabla_adaloss and scikit-learn, which has the digits:
pip install '.[samples]' in a checkout installs both.

  python minimal.py

prints, after two seconds in emulated fp16 on one CPU core:

  31 of 32 correct, loss scale 65536
"""

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from sklearn.datasets import load_digits

from nnabla_adaloss import AdaptiveLossScalingUpdater

digits, random = load_digits(), np.random.default_rng(0)
images, labels = digits.images[:, np.newaxis] / 8 - 1, digits.target[:, np.newaxis]
x, t = nn.Variable((32, 1, 8, 8)), nn.Variable((32, 1))
h = F.relu(PF.convolution(x, 16, (3, 3), pad=(1, 1), name="conv1"))
h = F.relu(PF.convolution(F.max_pooling(h, (2, 2)), 32, (3, 3), pad=(1, 1), name="conv2"))
y = PF.affine(h, 10, name="fc")
loss = F.mean(F.softmax_cross_entropy(y, t))
solver = S.Momentum(lr=0.02)
solver.set_parameters(nn.get_parameters())


def feed():
    batch = random.integers(32, len(labels), 32)
    x.d, t.d = images[batch], labels[batch]


updater = AdaptiveLossScalingUpdater(solver, loss, feed, storage="float16")  # on a GPU in half: no storage
for _ in range(400):
    result = updater.update()

x.d, t.d = images[:32], labels[:32]  # test digits
y.forward()
print(f"{(y.d.argmax(axis=1) == t.d[:, 0]).sum()} of 32 correct, loss scale {result.scale:g}")
