# SPDX-License-Identifier: Apache-2.0
"""Checker for layers that lose their gradients, during a training."""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, NamedTuple, Set

from ..core.validation import number, positive_integer
from ..emulation.format_emulation import FormatEmulation
from ..engine import AdaptiveLossScaling
from ..errors import warn
from ..graph.graph import Graph
from ..graph.plan import GraphPlan
from ..kernels import select_kernels
from .passes import Passes, Tally, layers_of
from .preserved import preserved, restored
from .target import refuse_half
from .watching import REPEATED


class LayerLoss(NamedTuple):
    """Share of a layer's gradient elements that are nonzero in fp32 and zero as stored.

    Attributes:
        with_alpha: with the scales of the training.
        without_alpha: with the same scale of the loss, but without those of layers.
    """

    with_alpha: float
    without_alpha: float


class SanityChecker:
    """Compares the stored gradients of every layer with fp32's, once in `every` iterations.

    Call it after each `update()`. It warns once of each layer that loses more than a threshold, and says what
    the layer would lose without scales of layers, as the implementation of Zhao et al. (arXiv 1910.12385)
    does. A check takes four passes or more on the last batch; training continues bit for bit as without it,
    except that functions with a seed of their own restart from it. Layers whose gradient differs from pass to
    pass, because of a generator that cannot be reset, are left out.

    Args:
        updater: an `AdaptiveLossScalingUpdater` with `storage=`.
        every: iterations from one check to the next. 100: a few percent of the time.
        threshold: the share that may be lost without a warning. Default 0.5: networks tolerate large losses,
            see `diagnose`.

    Attributes:
        last: results of the last check, by layer; empty before.

    Raises:
        TypeError: `updater` has no `scaling`.
        ValueError: its loss is stored in fp32 or computed in half precision, `every` is less than 1, or
            `threshold` not in [0, 1].

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> import nnabla.solvers as S
        >>> from nnabla_adaloss import AdaptiveLossScalingUpdater, SanityChecker
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> loss = F.mean(PF.affine(F.tanh(PF.affine(x, 5, name="a")), 2, name="b") ** 2)
        >>> solver = S.Sgd(0.1)
        >>> solver.set_parameters(nn.get_parameters())
        >>> updater = AdaptiveLossScalingUpdater(solver, loss, storage="float16")
        >>> checker = SanityChecker(updater, every=2)
        >>> for _ in range(4):
        ...     result = updater.update()
        ...     checker()
        >>> checker.last["a/affine"]
        LayerLoss(with_alpha=0.0, without_alpha=0.0)
    """

    def __init__(self, updater: Any, every: int = 100, threshold: float = 0.5) -> None:
        scaling = getattr(updater, "scaling", None)
        if not isinstance(scaling, AdaptiveLossScaling):
            raise TypeError(
                f"updater must be an AdaptiveLossScalingUpdater, got {type(updater).__name__}; "
                "diagnose(updater) takes any"
            )
        positive_integer("every", every)
        if not 0.0 <= number("threshold", threshold) <= 1.0:
            raise ValueError(f"threshold={threshold!r} must lie in [0, 1]")
        refuse_half(scaling.variable)
        if not isinstance(scaling.loss, FormatEmulation):
            raise ValueError(
                "updater stores everything in fp32, where nothing is lost: make it with storage='float16'"
            )
        self.last: Dict[str, LayerLoss] = {}
        self._updater, self._every, self._threshold = updater, every, threshold
        self._calls = 0
        self._warned: Set[str] = set()

    def __call__(self) -> None:
        """Count an iteration, and check in every `every`th."""
        self._calls += 1
        if self._calls % self._every == 0:
            self.check()

    def check(self) -> Dict[str, LayerLoss]:
        """Check now, on the last fed batch."""
        scaling: AdaptiveLossScaling = self._updater.scaling
        graph = Graph(scaling.variable)
        layers = layers_of(graph, GraphPlan(graph, names=scaling.plan.names))
        forget = partial(scaling.load_state_dict, scaling.state_dict())  # the statistics of these passes
        with preserved(graph, select_kernels(scaling.variable.parent.context)) as again, restored(forget):

            def forward(*_: Any) -> None:
                again(data=True)  # forward has written to leaves: a carried state, running statistics
                scaling.loss.forward()

            passes = Passes(layers, forward)
            in_fp32 = passes.with_one_scale(scaling.variable)
            without = passes.with_one_scale(scaling.loss, scale=scaling.loss_scale)
            with_alpha = passes.adaptive(scaling, scaling.iteration)
            again_in_fp32 = passes.with_one_scale(scaling.variable)
        tallies = [Tally(in_fp32) for _ in range(3)]
        for tally, stored in zip(tallies, (with_alpha, without, again_in_fp32)):
            tally.add(stored, in_fp32)
        self.last = {}
        for layer in layers:
            *shares, unsteady = (tally.of(layer) for tally in tallies)
            if unsteady.error > REPEATED:
                continue
            lost = self.last[layer.name] = LayerLoss(*(effect.underflow for effect in shares))
            if lost.with_alpha > self._threshold and layer.name not in self._warned:
                self._warned.add(layer.name)
                warn(
                    f"layer {layer.name} loses {lost.with_alpha:.0%} of its gradient in iteration "
                    f"{self._calls} ({lost.without_alpha:.0%} without scales of layers): diagnose(updater) "
                    "says why"
                )
        return self.last
