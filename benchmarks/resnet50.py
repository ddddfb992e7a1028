# SPDX-License-Identifier: Apache-2.0
"""ResNet-50, in any width: the network that costs are measured on."""

from __future__ import annotations

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF


def resnet50(x: nn.Variable, classes: int, width: int) -> nn.Variable:
    """He et al. 2016: bottleneck blocks, 3 + 4 + 6 + 3 of them; `width` is 64 in the paper."""

    def unit(h: nn.Variable, maps: int, kernel: int, stride: int, name: str) -> nn.Variable:
        pad = (kernel // 2,) * 2
        size, step = (kernel,) * 2, (stride,) * 2
        h = PF.convolution(h, maps, size, pad=pad, stride=step, with_bias=False, name=name)
        return PF.batch_normalization(h, name=name)

    h = F.relu(unit(x, width, 7, 2, "stem"))
    h = F.max_pooling(h, (3, 3), stride=(2, 2), pad=(1, 1))
    for stage, blocks in enumerate((3, 4, 6, 3)):
        maps = width * 2**stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            with nn.parameter_scope(f"stage{stage}/block{block}"):
                shortcut = unit(h, 4 * maps, 1, stride, "shortcut") if block == 0 else h
                inner = F.relu(unit(h, maps, 1, 1, "a"))
                inner = F.relu(unit(inner, maps, 3, stride, "b"))
                h = F.relu(unit(inner, 4 * maps, 1, 1, "c") + shortcut)
    return PF.affine(F.global_average_pooling(h), classes, name="fc")
