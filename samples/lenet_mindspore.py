# SPDX-License-Identifier: Apache-2.0
"""LeNet5 with the NNabla counterparts of MindSpore's loss scale managers, and with adaptive scaling.

Network, solver and output follow MindSpore's tutorial on loss scale. Its managers become:

  FixedLossScaleManager(1024)                    --manager fixed --loss-scale 1024
  FixedLossScaleManager(1024, False)             --manager fixed --loss-scale 1024 --keep-overflow-update
  DynamicLossScaleManager(2**24, 2, 1000)        --manager dynamic --loss-scale 16777216 --scale-factor 2
                                                     --scale-window 1000
  (none)                                         --manager adaptive: nothing to tune

On scikit-learn's digits, enlarged to 32x32, or on MNIST's four files, gzipped or not:

  python samples/lenet_mindspore.py
  python samples/lenet_mindspore.py --data-dir mnist --epochs 10
  python samples/lenet_mindspore.py --data-dir mnist -c cudnn -t half      on a GPU

In emulated fp16, three seconds each on one CPU core, the first printed a line per epoch, such as

  epoch: 5 step: 44, loss is 0.05236738

and at the end:

  --manager adaptive                       test accuracy 97.2%, loss scale 16384, 220 batches fed
  --manager dynamic --loss-scale 16777216  test accuracy 97.2%, loss scale 32768, 229 batches fed
  --manager fixed                          test accuracy 96.7%, loss scale 1024, 220 batches fed
  --manager fixed --loss-scale 16777216    test accuracy 12.5%, loss scale 1.67772e+07, 220 batches fed
  the same with --keep-overflow-update     test accuracy 7.5%, loss scale 1.67772e+07, 220 batches fed

A scale of 2^24 overflows. Fixed, every update is dropped and nothing is learned; without dropping, the first
update makes the parameters NaN. Dynamic scaling loses nine batches until its scale fits. Adaptive scaling
measures first.

With 5000 of MNIST's own images (tools/mnist_sample.py writes them, 4000 to train on) and --epochs 10:

  --manager adaptive                       test accuracy 96.8%, loss scale 65536, 1250 batches fed
  --manager adaptive --storage none        test accuracy 95.8%, loss scale 32768, 1250 batches fed
  --manager dynamic --loss-scale 16777216  test accuracy 95.0%, loss scale 65536, 1259 batches fed
  --manager fixed                          test accuracy 96.5%, loss scale 1024, 1250 batches fed
  --manager fixed --loss-scale 16777216    test accuracy 8.1%, loss scale 1.67772e+07, 1250 batches fed

(One seed each: one image is 0.1 points.)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
from common import mnist
from common import options as common_options
from common.digits import enlarged
from common.feeder import Feeder, batches, in_epochs
from common.scores import accuracy
from common.session import Session
from option_values import positive

from nnabla_adaloss import (
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FixedLossScalingUpdater,
    FormatEmulation,
)


def lenet5(x: nn.Variable) -> nn.Variable:
    """Two convolutions with pooling, then three dense layers, on images of 32x32."""
    if x.shape[-1] == 28:  # MNIST's images
        x = F.pad(x, (2, 2, 2, 2), "constant", -1.0)
    h = F.max_pooling(F.relu(PF.convolution(x, 6, (5, 5), name="conv1")), (2, 2))
    h = F.max_pooling(F.relu(PF.convolution(h, 16, (5, 5), name="conv2")), (2, 2))
    h = F.relu(PF.affine(h, 120, name="fc1"))
    h = F.relu(PF.affine(h, 84, name="fc2"))
    return PF.affine(h, 10, name="fc3")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Train and test; return the exit status."""
    parser = common_options.parser(__doc__, iterations=220, batch_size=32, lr=0.01)
    add = parser.add_argument
    add("--data-dir", type=Path, metavar="FOLDER", help="MNIST's files (default: scikit-learn's digits)")
    add("--epochs", type=positive, metavar="N", help="instead of --iterations")
    add("--manager", choices=("fixed", "dynamic", "adaptive"), default="adaptive")
    add("--loss-scale", type=float, default=1024.0, metavar="S", help="fixed, or where dynamic starts (1024)")
    add("--keep-overflow-update", action="store_true", help="drop_overflow_update=False: of fixed")
    add("--scale-factor", type=float, default=2.0, metavar="F", help="of dynamic (2)")
    add(
        "--scale-window",
        type=int,
        default=1000,
        metavar="N",
        help="of dynamic: updates until it grows",
    )
    options = common_options.start(parser, arguments)
    train, test = enlarged(32) if options.data_dir is None else mnist.load(options.data_dir)
    steps = batches(len(train.x), options.batch_size)
    if options.epochs is not None:
        options.iterations = options.epochs * steps

    x, t = nn.Variable((options.batch_size, *train.x.shape[1:])), nn.Variable((options.batch_size, 1))
    loss = F.mean(F.softmax_cross_entropy(lenet5(x), t))
    solver = S.Momentum(options.lr, 0.9)
    solver.set_parameters(nn.get_parameters())

    def fill(number: int) -> None:
        chosen = in_epochs(len(train.x), options.batch_size, options.seed, number)
        x.d, t.d = train.x[chosen], train.t[chosen]

    updater = updater_of(options, solver, loss, Feeder(fill))
    with Session(options, updater) as session:
        for iteration in session:
            updater.update()
            session.show(updater.scale, loss)
            epoch, step = divmod(iteration, steps)
            if step + 1 == steps or iteration + 1 == options.iterations:
                session.print(f"epoch: {epoch + 1} step: {step + 1}, loss is {float(loss.d):.7g}")
    fed = updater.data_feeder.count
    print(f"test accuracy {accuracy(lenet5, test):.1%}, loss scale {updater.scale:g}, {fed} batches fed")
    return 0


def updater_of(options: Any, solver: Any, loss: nn.Variable, feed: Feeder) -> Any:
    """Make the training loop of a manager."""
    if options.manager == "adaptive":
        return AdaptiveLossScalingUpdater(solver, loss, feed, storage=options.storage)
    stored = loss if options.storage is None else FormatEmulation(loss, options.storage)
    if options.manager == "fixed":
        return FixedLossScalingUpdater(
            solver, stored, feed, options.loss_scale, drop_overflow_update=not options.keep_overflow_update
        )
    return DynamicLossScalingUpdater(
        solver, stored, feed, options.loss_scale, options.scale_factor, options.scale_window
    )


if __name__ == "__main__":
    sys.exit(main())
