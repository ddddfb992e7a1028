# SPDX-License-Identifier: Apache-2.0
"""Three ways to scale a loss that differ in one line: nnabla's, a fixed scale, adaptive.

A conv net learns handwritten digits. Its loss is multiplied by 1e-6, like a small term of a sum.

  python samples/three_lines.py --method baseline       nnabla's DynamicLossScalingUpdater with its defaults
  python samples/three_lines.py --method fixed          the loss multiplied by 128
  python samples/three_lines.py --method adaptive       a measured scale
  python samples/three_lines.py -c cudnn -t half        on a GPU, in native half precision

They printed, in emulated fp16 on one CPU core, three seconds each:

  baseline: loss 2.4, 10.8% correct, scale 8
  fixed: loss 0.00065, 98.9% correct, scale 128
  adaptive: loss 0.00041, 97.5% correct, scale 2.74878e+11

The loss is that of the first batch, before it is multiplied; it begins at 2.3. With --loss-weight 1 they
reached 98.3%, 98.1% and 97.5%; with --loss-weight 1e-9 11.4%, 11.4% and 99.2%. (One image is 0.28 points.)
"""

from __future__ import annotations

import sys
from typing import Any, Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
from common import options as common_options
from common.digits import load
from common.feeder import Feeder, in_epochs
from common.scores import accuracy
from common.session import Session
from networks import lenet

from nnabla_adaloss import (
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FixedLossScalingUpdater,
    FormatEmulation,
)


def updater_of(method: str, solver: Any, loss: Any, feed: Feeder) -> Any:
    """The line that differs."""
    if method == "baseline":
        return DynamicLossScalingUpdater(solver, loss, feed)
    if method == "fixed":
        return FixedLossScalingUpdater(solver, loss, feed, scale=128.0)
    return AdaptiveLossScalingUpdater(solver, loss, feed)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Train and test; returns the exit status."""
    parser = common_options.parser(__doc__, iterations=600, batch_size=32, lr=0.05)
    parser.add_argument("--method", choices=("baseline", "fixed", "adaptive"), default="adaptive")
    parser.add_argument(
        "--loss-weight",
        type=common_options.positive_number,
        default=1e-6,
        help="multiplies the loss (default: 1e-6)",
    )
    options = common_options.start(parser, arguments)
    train, test = load()

    x, t = nn.Variable((options.batch_size, 1, 8, 8)), nn.Variable((options.batch_size, 1))
    error = F.mean(F.softmax_cross_entropy(lenet(x), t)).apply(persistent=True)  # to be shown
    loss = error * options.loss_weight  # the weighted one is mostly zero in fp16
    # SGD moves weights by learning rate times gradient: this takes the loss weight out again.
    rate = common_options.cosine(options.lr / options.loss_weight, options.iterations)
    solver = S.Momentum(rate(0))
    solver.set_parameters(nn.get_parameters())

    def fill(number: int) -> None:
        chosen = in_epochs(len(train.x), options.batch_size, options.seed, number)
        x.d, t.d = train.x[chosen], train.t[chosen]

    # A CPU computes in fp32, and what a GPU would store in fp16 is rounded.
    stored = loss if options.storage is None else FormatEmulation(loss, options.storage)
    updater = updater_of(options.method, solver, stored, Feeder(fill))
    with Session(options, updater) as session:
        for iteration in session:
            solver.set_learning_rate(rate(iteration))
            updater.update()
            session.show(updater.scale, error)
    fill(0)
    stored.forward()
    right = accuracy(lenet, test)
    print(f"{options.method}: loss {float(error.d):.2g}, {right:.1%} correct, scale {updater.scale:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
