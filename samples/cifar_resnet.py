# SPDX-License-Identifier: Apache-2.0
"""ResNet-20, -56, -110 (He et al. 2016) and WideResNet-16-4 (Zagoruyko and Komodakis 2016) on CIFAR-10.

Reads CIFAR's binary version from --data-dir; without it, uses scikit-learn's digits, enlarged.

  python samples/cifar_resnet.py                                                   digits, a minute
  python samples/cifar_resnet.py --network resnet110 --iterations 10               deeper
  python samples/cifar_resnet.py --data-dir cifar-10-batches-bin --iterations 64000 --batch-size 128 \\
      --lr 0.1 --checkpoint build/resnet20.checkpoint -c cudnn -t half             as published, on a GPU
  mpirun -n 4 python samples/cifar_resnet.py --distributed -c cudnn -t half ...    four GPUs (NCCL)
  mpirun -n 2 python samples/cifar_resnet.py --distributed                         two ranks on a CPU

The first one printed, in emulated fp16 on one CPU core (not tested with CIFAR's images):

  resnet20: 99.4% of the test images correct
  loss scale 32768 at the end, 1 batches repeated, 0 lost

With -c cudnn -t half, on an H100: 98.1%.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from common import cifar
from common import options as common_options
from common import ranks as common_ranks
from common.digits import enlarged
from common.feeder import Feeder, in_epochs
from common.resnet import cifar_resnet
from common.scores import accuracy, print_result
from common.session import run

from nnabla_adaloss import AdaptiveLossScalingUpdater

MAPS = (16, 32, 64)


def wide_resnet(x: nn.Variable, training: bool, blocks: int = 2, wider: int = 4) -> nn.Variable:
    """WideResNet of 6 * blocks + 4 layers, with normalization and ReLU before each convolution."""

    def convolved(h: nn.Variable, maps: int, kernel: int, stride: int, name: str) -> nn.Variable:
        pad = kernel // 2, kernel // 2
        return PF.convolution(
            h, maps, (kernel, kernel), pad=pad, stride=(stride, stride), with_bias=False, name=name
        )

    def normalized(h: nn.Variable, name: str) -> nn.Variable:
        return F.relu(PF.batch_normalization(h, batch_stat=training, name=name))

    h = convolved(x, MAPS[0], 3, 1, "stem")
    for stage, maps in enumerate(MAPS):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            with nn.parameter_scope(f"stage{stage}/block{block}"):
                ready = normalized(h, "before_a")
                inner = normalized(convolved(ready, wider * maps, 3, stride, "a"), "before_b")
                shortcut = convolved(ready, wider * maps, 1, stride, "shortcut") if block == 0 else h
                h = convolved(inner, wider * maps, 3, 1, "b") + shortcut
    h = normalized(h, "last")
    return PF.affine(F.average_pooling(h, h.shape[2:]), 10, name="fc")


NETWORKS = {
    "resnet20": lambda x, training: cifar_resnet(x, 3, MAPS, training),
    "resnet56": lambda x, training: cifar_resnet(x, 9, MAPS, training),
    "resnet110": lambda x, training: cifar_resnet(x, 18, MAPS, training),
    "wide16_4": lambda x, training: wide_resnet(x, training),
}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Train and test; return the exit status."""
    parser = common_options.parser(__doc__, iterations=220, batch_size=32, lr=0.05)
    add = parser.add_argument
    add("--network", choices=tuple(NETWORKS), default="resnet20", help="(default: resnet20)")
    add(
        "--data-dir",
        type=Path,
        metavar="FOLDER",
        help="CIFAR-10's .bin files (default: digits)",
    )
    add("--image-size", type=int, default=16, metavar="N", help="pixels of the enlarged digits (default: 16)")
    common_ranks.add_option(parser)
    options = common_options.start(parser, arguments)
    ranks = common_ranks.join(options)
    network = NETWORKS[options.network]
    train, test = enlarged(options.image_size) if options.data_dir is None else cifar.load(options.data_dir)

    x = nn.Variable((options.batch_size // ranks.size, *train.x.shape[1:]))
    t = nn.Variable((x.shape[0], 1))
    loss = F.mean(F.softmax_cross_entropy(network(x, training=True), t))
    rate = common_options.cosine(options.lr, options.iterations)
    solver = S.Momentum(rate(0), 0.9)
    solver.set_parameters(nn.get_parameters())

    def fill(number: int) -> None:
        chosen = ranks.share(in_epochs(len(train.x), options.batch_size, options.seed, number))
        random = np.random.default_rng((options.seed, number, ranks.rank))
        # A mirrored digit is not a digit.
        x.d = cifar.shifted(train.x[chosen], random, flip=options.data_dir is not None, most=x.shape[-1] // 8)
        t.d = train.t[chosen]

    updater = AdaptiveLossScalingUpdater(
        solver,
        loss,
        Feeder(fill),
        storage=options.storage,
        weight_decay=1e-4,
        comm=ranks.comm,
        average=True,
    )
    run(options, updater, rate, ranks)
    if ranks.rank == 0:
        right = accuracy(lambda batch: network(batch, training=False), test)
        print_result(options.network, right, updater)
    return 0


if __name__ == "__main__":
    sys.exit(main())
