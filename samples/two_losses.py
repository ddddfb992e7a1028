# SPDX-License-Identifier: Apache-2.0
"""Two losses on one network, the second 1e-12 of the first: no single scale holds the gradients of both.

One head classifies odd and even digits, the other the digit. Its loss is weighted by 1e-12, as a penalty or
an auxiliary loss may be. Adam with a tiny eps takes the same steps however small gradients are, so that fp32
learns both.

  python samples/two_losses.py --method dynamic        nnabla's updater, one scale, 65536 at first
  python samples/two_losses.py --method one            one scale that follows from what was measured
  python samples/two_losses.py --method adaptive       one for each part of the network
  python samples/two_losses.py -c cudnn -t half        on a GPU, in its own half precision

These printed, in emulated fp16 on one CPU core, 5 seconds each:

  dynamic: odd or even 97.5%, which digit 4.4% told right
  one: odd or even 97.5%, which digit 4.4% told right
  adaptive: odd or even 97.5%, which digit 93.9% told right

So does fp32 (--storage none): 97.5% and 93.9%. With --loss-weight 1e-10 the second head reached 84.2%, 88.6%
and 93.9%: at this ratio one scale begins to lose it.
"""

from __future__ import annotations

import sys
from typing import Any, Optional, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
from common import options as common_options
from common.digits import Examples, load
from common.feeder import Feeder, in_epochs
from common.scores import accuracy
from common.session import Session
from option_values import positive_number

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FormatEmulation,
)

BATCH_SIZE = 64
_WIDTH = 64


def heads(x: nn.Variable) -> Tuple[nn.Variable, nn.Variable]:
    """Logits of odd or even, shape (batch, 2), and of the digit, shape (batch, 10), on one trunk."""
    h = F.reshape(x, (x.shape[0], -1))
    for index in range(3):
        h = F.tanh(PF.affine(h, _WIDTH, name=f"trunk{index}"))
    return _head(h, 2, "odd"), _head(h, 10, "digit")


def _head(h: nn.Variable, classes: int, name: str) -> nn.Variable:
    hidden = F.tanh(PF.affine(h, _WIDTH // 2, name=f"{name}/hidden"))
    return PF.affine(hidden, classes, name=f"{name}/out")


def weighted_sum(x: nn.Variable, t: nn.Variable, weight: float) -> nn.Variable:
    """The loss of the first head, and `weight` times that of the second; `t` holds digits."""
    odd, digit = heads(x)
    is_odd = t - 2.0 * F.floor(0.5 * t)
    return F.mean(F.softmax_cross_entropy(odd, is_odd)) + weight * F.mean(F.softmax_cross_entropy(digit, t))


def solver(learning_rate: float = 3e-3) -> Any:
    """Make an Adam with a tiny eps: its steps do not depend on the size of gradients."""
    return S.Adam(learning_rate, eps=1e-30)


def updater_of(method: str, made: Any, loss: Any, feed: Feeder) -> Any:
    """Make the updater: the line that differs."""
    if method == "dynamic":
        return DynamicLossScalingUpdater(made, loss, feed, scale=65536.0)
    # "fixed": every layer's own scale stays 1, and the global one is measured.
    config = AdaLossConfig(loss_scale_method="fixed") if method == "one" else None
    return AdaptiveLossScalingUpdater(made, loss, feed, config=config)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Train and test both heads; return the exit status."""
    parser = common_options.parser(__doc__, iterations=400, batch_size=BATCH_SIZE, lr=3e-3)
    parser.add_argument("--method", choices=("dynamic", "one", "adaptive"), default="adaptive")
    parser.add_argument(
        "--loss-weight",
        type=positive_number,
        default=1e-12,
        help="multiplies the second loss (default: 1e-12)",
    )
    options = common_options.start(parser, arguments)
    train, test = load()

    x, t = nn.Variable((options.batch_size, 1, 8, 8)), nn.Variable((options.batch_size, 1))
    loss = weighted_sum(x, t, options.loss_weight)
    rate = common_options.cosine(options.lr, options.iterations)
    made = solver(rate(0))
    made.set_parameters(nn.get_parameters())

    def fill(number: int) -> None:
        chosen = in_epochs(len(train.x), options.batch_size, options.seed, number)
        x.d, t.d = train.x[chosen], train.t[chosen]

    # On a CPU, arrays that a GPU would store in fp16 are rounded, except the sum at the loss.
    stored = loss if options.storage is None else FormatEmulation(loss, options.storage, float_tail=True)
    updater = updater_of(options.method, made, stored, Feeder(fill))
    with Session(options, updater) as session:
        for iteration in session:
            made.set_learning_rate(rate(iteration))
            updater.update()
            session.show(updater.scale, loss)
    is_odd = Examples(test.x, test.t % 2)
    odd, digit = accuracy(lambda x: heads(x)[0], is_odd), accuracy(lambda x: heads(x)[1], test)
    print(f"{options.method}: odd or even {odd:.1%}, which digit {digit:.1%} told right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
