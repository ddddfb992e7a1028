# SPDX-License-Identifier: Apache-2.0
"""Residual networks of CIFAR-10 and of ImageNet, in any width."""

from __future__ import annotations

from typing import Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import numpy as np

BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}


def cifar_resnet(
    x: nn.Variable, blocks: int, maps: Sequence[int], training: bool, decay_rate: float = 0.9
) -> nn.Variable:
    """Logits of 6 * blocks + 2 layers (He et al. 2016, section 4.2), shortcuts padded with zeros."""

    def unit(h: nn.Variable, maps: int, stride: int = 1) -> nn.Variable:
        h = PF.convolution(h, maps, (3, 3), pad=(1, 1), stride=(stride, stride), with_bias=False)
        return PF.batch_normalization(h, batch_stat=training, decay_rate=decay_rate)

    with nn.parameter_scope("stem"):
        h = F.relu(unit(x, maps[0]))
    for stage, width in enumerate(maps):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            shortcut = h
            if stride == 2:
                shortcut = F.pad(h[:, :, ::2, ::2], (0, width // 2, 0, 0, 0, 0))
            with nn.parameter_scope(f"stage{stage}/block{block}/a"):
                h = F.relu(unit(h, width, stride))
            with nn.parameter_scope(f"stage{stage}/block{block}/b"):
                h = F.relu(unit(h, width) + shortcut)
    return PF.affine(F.average_pooling(h, h.shape[2:]), 10, name="fc")


def resnet(
    x: nn.Variable, network: str, width: int, classes: int, training: bool, last_gamma: float = 0.0
) -> nn.Variable:
    """Logits of ResNet-18 or -50 (He et al. 2016), whose bottlenecks stride in their 3x3 convolution.

    Args:
        x: images, shape (batch, 3, height, width).
        network: a key of `BLOCKS`.
        width: maps of the stem; 64 in the paper.
        classes: number of logits of each image.
        training: normalize by the statistics of the batch.
        last_gamma: initial gamma of each block's last normalization. 0: a block starts as its shortcut (Goyal
            et al. 2017).
    """
    bottleneck = network == "resnet50"

    def unit(
        h: nn.Variable, maps: int, kernel: int, stride: int, name: str, last: bool = False
    ) -> nn.Variable:
        spread = float(np.sqrt(2.0 / (h.shape[1] * kernel * kernel)))
        h = PF.convolution(
            h,
            maps,
            (kernel, kernel),
            pad=(kernel // 2, kernel // 2),
            stride=(stride, stride),
            w_init=I.NormalInitializer(spread),
            with_bias=False,
            name=name,
        )
        start = {"gamma": I.ConstantInitializer(last_gamma if last else 1.0)}
        return PF.batch_normalization(h, batch_stat=training, param_init=start, name=name)

    h = F.relu(unit(x, width, 7, 2, "stem"))
    h = F.max_pooling(h, (3, 3), stride=(2, 2), pad=(1, 1))
    for stage, blocks in enumerate(BLOCKS[network]):
        maps = width * 2**stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            wide = 4 * maps if bottleneck else maps
            with nn.parameter_scope(f"stage{stage}/block{block}"):
                shortcut = h
                if stride != 1 or h.shape[1] != wide:
                    shortcut = unit(h, wide, 1, stride, "shortcut")
                if bottleneck:
                    inner = F.relu(unit(h, maps, 1, 1, "a"))
                    inner = unit(F.relu(unit(inner, maps, 3, stride, "b")), wide, 1, 1, "c", last=True)
                else:
                    inner = unit(F.relu(unit(h, maps, 3, stride, "a")), maps, 3, 1, "b", last=True)
                h = F.relu(inner + shortcut)
    return PF.affine(F.average_pooling(h, h.shape[2:]), classes, name="fc")
