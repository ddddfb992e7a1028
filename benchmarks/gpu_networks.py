# SPDX-License-Identifier: Apache-2.0
"""Networks of benchmarks/gpu_training.py, with functions that CUDA implements on every GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "samples"))


class Size(NamedTuple):
    """Size of a network."""

    batch: int  # images, or sequences
    length: int  # side of an image, or length of a sequence
    width: int  # maps of the stem, or width of a position in the sequence
    depth: int  # blocks of the transformer
    classes: int  # of images, or symbols


SIZES = {"resnet50": Size(64, 224, 64, 0, 1000), "transformer": Size(16, 128, 512, 6, 8000)}
QUICK = {"resnet50": Size(2, 32, 2, 0, 4), "transformer": Size(2, 4, 8, 1, 8)}


def build(network: str, size: Size) -> nn.Variable:
    """Build a loss whose inputs are filled once, so that batches are not copied to the device."""
    random = np.random.default_rng(0)
    if network == "resnet50":
        from common.resnet import resnet

        x, t = nn.Variable((size.batch, 3, size.length, size.length)), nn.Variable((size.batch, 1))
        x.d, t.d = random.standard_normal(x.shape), random.integers(0, size.classes, t.shape)
        return mean(
            F.softmax_cross_entropy(
                resnet(x, "resnet50", size.width, size.classes, training=True, last_gamma=1.0), t
            )
        )
    x, t = nn.Variable((size.batch, size.length)), nn.Variable((size.batch * size.length, 1))
    x.d, t.d = random.integers(0, size.classes, x.shape), random.integers(0, size.classes, t.shape)
    return mean(F.softmax_cross_entropy(transformer(x, size), t))


def mean(losses: nn.Variable) -> nn.Variable:
    """Average by pooling; on Hopper nnabla-ext-cuda120 1.39's F.mean ends in an illegal instruction."""
    pooled = F.reshape(losses, (1, 1, losses.size, 1))
    return F.average_pooling(pooled, pooled.shape[2:])


def transformer(x: nn.Variable, size: Size, head: int = 64) -> nn.Variable:
    """Build logits of the next symbol, shape (batch * length, classes), from pre-norm blocks."""
    batch, length = x.shape
    width, heads = size.width, max(1, size.width // head)

    def normalized(h: nn.Variable, name: str) -> nn.Variable:
        return PF.batch_normalization(h, batch_stat=True, name=name)

    def projected(h: nn.Variable, name: str) -> nn.Variable:
        y = F.reshape(PF.affine(h, width, name=name), (batch, length, heads, width // heads))
        return F.reshape(F.transpose(y, (0, 2, 1, 3)), (batch * heads, length, width // heads))

    h = F.reshape(PF.embed(x, size.classes, width, name="symbols"), (batch * length, width))
    for block in range(size.depth):
        with nn.parameter_scope(f"block{block}"):
            g = normalized(h, "before_attention")
            match = F.batch_matmul(projected(g, "query"), projected(g, "key"), transpose_b=True)
            mixed = F.batch_matmul(F.softmax(match * (width // heads) ** -0.5), projected(g, "value"))
            mixed = F.transpose(F.reshape(mixed, (batch, heads, length, width // heads)), (0, 2, 1, 3))
            h = h + PF.affine(F.reshape(mixed, (batch * length, width)), width, name="mix")
            g = F.relu(PF.affine(normalized(h, "before_mlp"), 4 * width, name="up"))
            h = h + PF.affine(g, width, name="down")
    return PF.affine(normalized(h, "last"), size.classes, name="out")
