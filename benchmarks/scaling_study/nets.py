# SPDX-License-Identifier: Apache-2.0
"""Networks of the experiments, the fast ones of each list first."""

from __future__ import annotations

from functools import partial
from typing import Dict

import nnabla.solvers as S

from . import classifiers, derivatives, several_losses
from .classifiers import classifier
from .gan import gan
from .language import transformer
from .scene_nets import detector, segmentation
from .task import Net
from .text import weight_label

_ACCURACY = "accuracy on 360 images"
_SMALL = "accuracy of the small loss's head"
_TINY = 1e-30


def adam(learning_rate: float) -> object:
    """Make an Adam with a tiny eps: its steps do not depend on the size of gradients."""
    return S.Adam(learning_rate, eps=_TINY)


def lars(learning_rate: float) -> object:
    """Make LARS: its step is a share of the weight's norm for any gradient."""
    return S.Lars(learning_rate, 0.9, 0.02, _TINY)


_lenet = partial(classifier, classifiers.lenet, 32)
_mlp8 = partial(classifier, partial(classifiers.mlp, 8, 128, 0.58), 64)
_mlp24 = partial(classifier, partial(classifiers.mlp, 24, 64, 1.0), 64)
_rnn64 = partial(classifier, partial(classifiers.rnn, 64, 48), 32)
_conv12 = partial(classifier, classifiers.conv12, 32)
_resnet20 = partial(classifier, classifiers.resnet20, 32)

NETS: Dict[str, Net] = {
    "lenet": Net("LeNet-style conv net", _ACCURACY, _lenet, 0.05, 200, 0.01),
    "mlp8": Net("tanh MLP, 8 layers", _ACCURACY, _mlp8, 0.1, 250, 0.01),
    "gan": Net(
        "GAN, two updaters",
        "minus MMD to real digits",
        gan,
        0.1,
        300,
        0.01,
        partial(S.Momentum, momentum=0.5),
    ),
    "mlp24": Net("tanh MLP, 24 layers", _ACCURACY, _mlp24, 0.03, 250, 0.01),
    "segmentation": Net("segmentation, masked mean", "IoU of ink", segmentation, 0.1, 150, 0.01),
    "detector": Net("detector, losses 1 : 1e-4", "digits told, IoU of ink", detector, 0.02, 300, 0.01),
    "rnn64": Net("RNN over 64 steps", _ACCURACY, _rnn64, 0.003, 250, 0.01),
    "conv12": Net("plain conv net, 12 layers", _ACCURACY, _conv12, 0.02, 200, 0.01),
    "transformer": Net("language model", "minus nats per letter", transformer, 0.1, 150, 0.02),
    "resnet20": Net("ResNet-20, batch norm", _ACCURACY, _resnet20, 0.05, 100, 0.01),
}


def _heads(weight: float) -> Net:
    title = f"two heads, 1 : {weight_label(weight)}, Adam"
    return Net(title, _SMALL, partial(several_losses.two_losses, "heads", weight), 3e-3, 250, 0.01, adam)


_heads_10 = partial(several_losses.two_losses, "heads", 1e-10)
_towers = partial(several_losses.two_losses, "towers", 1e-10)
_lenet_heads = partial(several_losses.lenet_heads, 1e-10)
_rising = partial(several_losses.annealed, 1e-14, 1e-8, 250)
_auxiliary = partial(several_losses.auxiliary, 1e-10)
_vae = partial(several_losses.vae, 1e-4)
_residual = partial(derivatives.residual, 1.0)
_coefficient = partial(derivatives.coefficient, 1e-10)
_sigmoids = partial(classifier, partial(classifiers.sigmoids, 12), 64)

FAR_APART: Dict[str, Net] = {
    "heads_1e-5": _heads(1e-5),
    "heads_1e-8": _heads(1e-8),
    "heads_1e-10": _heads(1e-10),
    "heads_lars": Net("two heads, 1 : 1e-10, LARS", _SMALL, _heads_10, 0.1, 250, 0.01, lars),
    "towers": Net("two networks, 1 : 1e-10, Adam", _SMALL, _towers, 3e-3, 250, 0.01, adam),
    "lenet_heads": Net("LeNet, two heads, 1 : 1e-10, Adam", _SMALL, _lenet_heads, 1e-3, 150, 0.01, adam),
    "annealed": Net("second loss from 0 to 1e-8, Adam", _SMALL, _rising, 3e-3, 250, 0.01, adam),
    "auxiliary": Net("auxiliary head, 1 : 1e-10, Adam", "explained ink", _auxiliary, 3e-3, 200, 0.01, adam),
    "vae": Net("VAE, KL times 1e-4, Adam", "minus log of both", _vae, 3e-3, 300, 0.02, adam),
    "residual": Net("differential equation, Adam", "minus relative error", _residual, 1e-2, 300, 0.01, adam),
    "coefficient": Net(
        "its coefficient, residual times 1e-10, Adam", "minus error", _coefficient, 1e-2, 300, 0.01, adam
    ),
    "sigmoids": Net("12 sigmoid layers, Adam", _ACCURACY, _sigmoids, 2e-3, 300, 0.01, adam),
}
