# SPDX-License-Identifier: Apache-2.0
"""The trainings in which gradients lie far apart."""

from __future__ import annotations

from functools import partial
from typing import Dict, Sequence

from . import derivatives, layers_apart, several_losses
from .solvers import GroupRates, adam, lars, sgd
from .table import weight_label
from .task import Net

_ACCURACY = "accuracy on 360 images"
_SMALL = "accuracy of the small loss's head"


def _heads(weight: float) -> Net:
    title = f"two heads, 1 : {weight_label(weight)}, Adam"
    return Net(title, _SMALL, partial(several_losses.two_losses, "heads", weight), 3e-3, 250, 0.01, adam)


_TENFOLD_MINUS_10 = partial(several_losses.two_losses, "heads", 1e-10)
_BY_GROUPS = partial(GroupRates, group="small", factor=1e10)
_RISING = partial(several_losses.annealed, 1e-14, 1e-8, 250)

CELLS: Dict[str, Net] = {
    "heads_1e-5": _heads(1e-5),
    "heads_1e-8": _heads(1e-8),
    "heads_1e-10": _heads(1e-10),
    "heads_sgd": Net(
        "two heads, 1 : 1e-10, SGD by groups", _SMALL, _TENFOLD_MINUS_10, 0.1, 250, 0.01, _BY_GROUPS
    ),
    "heads_lars": Net("two heads, 1 : 1e-10, LARS", _SMALL, _TENFOLD_MINUS_10, 0.1, 250, 0.01, lars),
    "towers": Net(
        "two networks, 1 : 1e-10, Adam",
        _SMALL,
        partial(several_losses.two_losses, "towers", 1e-10),
        3e-3,
        250,
        0.01,
        adam,
    ),
    "lenet_heads": Net(
        "LeNet, two heads, 1 : 1e-10, Adam",
        _SMALL,
        partial(several_losses.lenet_heads, 1e-10),
        1e-3,
        150,
        0.01,
        adam,
    ),
    "annealed": Net("second loss from 0 to 1e-8, Adam", _SMALL, _RISING, 3e-3, 250, 0.01, adam),
    "auxiliary": Net(
        "auxiliary head, 1 : 1e-10, Adam",
        "explained ink",
        partial(several_losses.auxiliary, 1e-10),
        3e-3,
        200,
        0.01,
        adam,
    ),
    "vae": Net(
        "VAE, KL times 1e-4, Adam",
        "minus log of both",
        partial(several_losses.vae, 1e-4),
        3e-3,
        300,
        0.02,
        adam,
    ),
    "distilled": Net(
        "distillation, T = 20, SGD", _ACCURACY, partial(several_losses.distilled, 20.0), 0.1, 250, 0.01, sgd
    ),
    "residual": Net(
        "differential equation, Adam",
        "minus relative error",
        partial(derivatives.residual, 1.0),
        1e-2,
        300,
        0.01,
        adam,
    ),
    "coefficient": Net(
        "its coefficient, residual times 1e-10, Adam",
        "minus error",
        partial(derivatives.coefficient, 1e-10),
        1e-2,
        300,
        0.01,
        adam,
    ),
    "penalized": Net(
        "gradient penalty times 1e-3, SGD", _ACCURACY, derivatives.penalized, 0.1, 250, 0.01, sgd
    ),
    "one_loss_gan": Net(
        "GAN of one loss, 1 : 1e-10, Adam",
        "minus MMD to real digits",
        partial(layers_apart.gan_of_one_loss, 1e-10),
        1e-3,
        300,
        0.01,
        adam,
    ),
    "sigmoids": Net(
        "12 sigmoid layers, Adam", _ACCURACY, partial(layers_apart.sigmoids, 12), 2e-3, 300, 0.01, adam
    ),
    "embeddings": Net(
        "embeddings beside dense layers, Adam", _ACCURACY, layers_apart.embeddings, 1e-2, 200, 0.01, adam
    ),
}
IN_EIGHT_BITS: Dict[str, Sequence[str]] = {
    "heads_1e-5": ("e5m2_stored", "e4m3_stored"),
    "heads_1e-8": ("e5m2_stored", "e4m3_stored"),
    "heads_1e-10": ("fp8_hybrid",),
    "sigmoids": ("e5m2_stored", "e4m3_stored"),
}
