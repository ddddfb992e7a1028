# SPDX-License-Identifier: Apache-2.0
"""The networks of the study, the fast ones first."""

from __future__ import annotations

from functools import partial
from typing import Dict

import nnabla.solvers as S

from .classifiers import BUILDERS
from .gan import gan
from .language import transformer
from .scene_nets import detector, segmentation
from .task import Net

_ACCURACY = "accuracy on 360 images"

NETS: Dict[str, Net] = {
    "lenet": Net("LeNet-style conv net", _ACCURACY, BUILDERS["lenet"], 0.05, 200, 0.01),
    "mlp8": Net("tanh MLP, 8 layers", _ACCURACY, BUILDERS["mlp8"], 0.1, 250, 0.01),
    "gan": Net(
        "GAN, two updaters",
        "minus MMD to real digits",
        gan,
        0.1,
        300,
        0.01,
        partial(S.Momentum, momentum=0.5),
    ),
    "mlp24": Net("tanh MLP, 24 layers", _ACCURACY, BUILDERS["mlp24"], 0.03, 250, 0.01),
    "segmentation": Net("segmentation, masked mean", "IoU of ink", segmentation, 0.1, 150, 0.01),
    "detector": Net("detector, losses 1 : 1e-4", "digits told, IoU of ink", detector, 0.02, 300, 0.01),
    "rnn64": Net("RNN over 64 steps", _ACCURACY, BUILDERS["rnn64"], 0.003, 250, 0.01),
    "conv12": Net("plain conv net, 12 layers", _ACCURACY, BUILDERS["conv12"], 0.02, 200, 0.01),
    "transformer": Net("language model", "minus nats per letter", transformer, 0.1, 150, 0.02),
    "resnet20": Net("ResNet-20, batch norm", _ACCURACY, BUILDERS["resnet20"], 0.05, 100, 0.01),
}
