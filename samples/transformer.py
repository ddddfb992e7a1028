# SPDX-License-Identifier: Apache-2.0
"""Small language model: a transformer that predicts the next letter of Python's help.

  python samples/transformer.py                                      a minute
  python samples/transformer.py --checkpoint build/model.checkpoint             press Ctrl-C any time, then
  python samples/transformer.py --checkpoint build/model.checkpoint --resume    resumes bit for bit
  python samples/transformer.py --width 512 --heads 8 --blocks 8 --length 256 -c cudnn -t half      one GPU
  mpirun -n 2 python samples/transformer.py --distributed            ranks on CPUs
  mpirun -n 4 python samples/transformer.py --distributed -c cudnn -t half --batch-size 64          four GPUs

The first one printed, in emulated fp16 on one CPU core (fails on an H100: docs/gpu.md):

  3.36 bits per unseen letter (chance: 6)
  loss scale 131072 at the end, 1 batches repeated, 0 lost
"""

from __future__ import annotations

import math
import sys
from typing import Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from common import options as common_options
from common import ranks as common_ranks
from common.feeder import Feeder
from common.scores import fate
from common.session import run
from common.text import text, windows
from option_values import positive

from nnabla_adaloss import AdaptiveLossScalingUpdater

TEST_WINDOWS = 256
# Logit of masked positions: as in many published models, and within the range of float16.
HIDDEN = -1e4


def logits(x: nn.Variable, symbols: int, width: int, heads: int = 2, blocks: int = 2) -> nn.Variable:
    """Logits of each next symbol, shape (batch, length, symbols), from pre-norm blocks."""
    length = x.shape[1]
    places = nn.parameter.get_parameter_or_create("places", (1, length, width), I.NormalInitializer(0.1))
    h = PF.embed(x, symbols, width, initializer=I.NormalInitializer(0.5), name="letters")
    h = h + F.broadcast(places, h.shape)
    for block in range(blocks):
        with nn.parameter_scope(f"block{block}"):
            h = h + attention(PF.layer_normalization(h, batch_axis=(0, 1), name="before_attention"), heads)
            g = PF.layer_normalization(h, batch_axis=(0, 1), name="before_mlp")
            g = F.relu(PF.affine(g, 4 * width, base_axis=2, name="up"))
            h = h + PF.affine(g, width, base_axis=2, name="down")
    h = PF.layer_normalization(h, batch_axis=(0, 1), name="last")
    return PF.affine(h, symbols, base_axis=2, name="out")


def attention(h: nn.Variable, heads: int) -> nn.Variable:
    """Causal attention: each position attends up to itself."""
    batch, length, width = h.shape
    size = width // heads

    def projected(name: str) -> nn.Variable:
        y = F.reshape(PF.affine(h, width, base_axis=2, name=name), (batch, length, heads, size))
        return F.reshape(F.transpose(y, (0, 2, 1, 3)), (batch * heads, length, size))

    match = F.batch_matmul(projected("query"), projected("key"), transpose_b=True) * size**-0.5
    hidden = np.triu(np.full((1, length, length), HIDDEN, np.float32), 1)
    mask = F.broadcast(nn.Variable.from_numpy_array(hidden), match.shape)
    mixed = F.batch_matmul(F.softmax(match + mask, axis=2), projected("value"))
    mixed = F.transpose(F.reshape(mixed, (batch, heads, length, size)), (0, 2, 1, 3))
    return PF.affine(F.reshape(mixed, (batch, length, width)), width, base_axis=2, name="mix")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Train and test; return the exit status."""
    parser = common_options.parser(__doc__, iterations=600, batch_size=16, lr=3e-3)
    parser.add_argument("--width", type=positive, default=64, metavar="N", help="(default: 64)")
    parser.add_argument("--heads", type=positive, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--blocks", type=positive, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--length", type=positive, default=48, metavar="N", help="(default: 48)")
    common_ranks.add_option(parser)
    options = common_options.start(parser, arguments)
    ranks = common_ranks.join(options)
    train, test, symbols = text()
    shape = options.width, options.heads, options.blocks
    length = options.length

    x = nn.Variable((options.batch_size // ranks.size, length))
    t = nn.Variable((*x.shape, 1))
    loss = F.mean(F.softmax_cross_entropy(logits(x, symbols, *shape), t))
    rate = common_options.cosine(options.lr, options.iterations)
    solver = S.Adam(rate(0))
    solver.set_parameters(nn.get_parameters())

    def fill(number: int) -> None:
        random = np.random.default_rng((options.seed, number))
        starts = random.integers(0, len(train) - length - 1, options.batch_size)
        seen, following = windows(train, ranks.share(starts), length)
        x.d, t.d = seen, following[:, :, np.newaxis]

    updater = AdaptiveLossScalingUpdater(
        solver,
        loss,
        Feeder(fill),
        storage=options.storage,
        comm=ranks.comm,
        average=True,
        on_gradients=lambda solver: solver.clip_grad_by_norm(1.0),  # they are unscaled
    )
    run(options, updater, rate, ranks)

    starts = np.linspace(0, len(test) - length - 2, TEST_WINDOWS).astype(np.int64)
    seen, following = (nn.Variable.from_numpy_array(part) for part in windows(test, starts, length))
    predicted = logits(seen, symbols, *shape)
    with nn.context_scope(common_options.single(options)):  # a mean of thousands needs more than 11 bits
        test_loss = F.mean(F.softmax_cross_entropy(predicted, F.reshape(following, (*following.shape, 1))))
    test_loss.forward(clear_buffer=True)
    bits = float(test_loss.d) / math.log(2.0)
    if ranks.rank == 0:
        print(f"{bits:.2f} bits per unseen letter (chance: {math.log2(symbols):.0f})")
        print(fate(updater))
    return 0


if __name__ == "__main__":
    sys.exit(main())
