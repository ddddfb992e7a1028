# SPDX-License-Identifier: Apache-2.0
"""Adaptive loss scaling around one loss: what the updater is made of."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.config import AdaLossConfig
from ..core.formats import get_format
from ..core.layer_limits import LayerLimit, LayerLimitPolicy
from ..core.layer_scale import Constraints
from ..core.methods import Fixed, Needs
from ..core.precision import Precision
from ..core.scale_history import HistoryPolicy
from ..core.validation import integer
from ..errors import GraphChangedError
from ..graph.function_kinds import computes_in_half
from ..graph.hooks import Hook
from ..graph.loss_like import (
    LossLike,
    Seed,
    check_scale,
    check_seed,
    refuse_a_loss_that_scales_itself,
    variable_of,
)
from ..graph.names import named, registered_names
from ..graph.plan import GraphPlan
from ..graph.reading import read_graph
from ..graph.structure import PlanOptions
from ..kernels import Kernels, NNablaAdaLoss, select_kernels
from ..monitor import Audience, LayerScaled, audience_of
from .backward_pass import BackwardPass, ScaleChoice
from .batch_guard import BatchGuard
from .blame import layer_to_blame
from .component_scales import ComponentPass, ComponentScales, windows_of
from .emulated_storage import EmulatedStorage
from .forward_state import ForwardState
from .held_pass import HeldPass
from .held_scales import HeldScales, StepRecorder
from .holding import Holding
from .layer_alphas import AlphasByComponent, AlphasByMethod, AlphasOfOne, LayerAlphas
from .layer_watch import LayerWatch, Stored
from .loss_section import GivenScale, LossSection, MeasuredScale, OneScale
from .pass_context import PassContext
from .planned_steps import Obstacle, PlannedSteps, plan_steps
from .prepared_graph import GraphPreparation, PreparedGraph
from .run_pass import AnyPass, run_pass, unscale_visible
from .saved_names import fingerprint, with_names_of

# Where host and network share the memory: a network whose scaled weights are larger has layers that take long
# beside what is done around them.
_MAX_BYTES = 2**25


class AdaptiveLossScaling:
    """Runs backward with one loss scale per layer (Zhao et al. 2019, arXiv 1910.12385, algorithm 1).

    The graph stays as it is: the scales are applied around each function's own backward. Afterwards every
    parameter gradient is unscaled, in fp32, added to what it held before; gradients of inputs and of
    variables that stay readable (persistent, or `clear_buffer=False`) are unscaled too.

    Args:
        loss: the loss Variable, or a wrapper such as `FormatEmulation`.
        config: how scales are computed; None for `AdaLossConfig()`.
        non_homogeneous: type names of functions whose input gradient is not proportional to their output
            gradient, beyond nnabla's own. They see unscaled gradients.
        parameters: parameters by name, for layers whose parameters nnabla does not know by name: what
            `solver.get_parameters()` or `module.get_parameters()` returns.
        limit_policy: how a layer whose scale overflowed backs off and recovers.
        history: how scales follow from what was measured, where `backward` is given none; None for
            `HistoryPolicy()`.
        forward_state: what is known of parameters that forward writes, from other graphs.
        monitors: who is told each time a layer was scaled: objects with some of the methods of `Monitor`.

    Attributes:
        audience: these monitors; None for none.
        config: the configuration, with `dtype` filled in.
        components: what was measured of the network, and the scales that follow from it.
        guard: what a training loop asks about single batches.
        iteration: number of the next iteration.

    Raises:
        TypeError: `loss` is no loss, or `config` no `AdaLossConfig`.
        ValueError: `loss` needs no gradient or scales itself, or `config.dtype` is not what gradients are
            stored in.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> loss = F.mean(PF.affine(F.tanh(PF.affine(x, 5, name="a")), 2, name="b") ** 2)
        >>> scaling = AdaptiveLossScaling(loss)
        >>> scaling.forward(clear_no_need_grad=True)
        >>> scaling.backward(clear_buffer=True)
        >>> sorted(scaling.layer_scales)
        ['b/affine']
    """

    def __init__(
        self,
        loss: LossLike,
        config: Optional[AdaLossConfig] = None,
        *,
        non_homogeneous: Sequence[str] = (),
        parameters: Optional[Mapping[str, nn.Variable]] = None,
        limit_policy: Optional[LayerLimitPolicy] = None,
        history: Optional[HistoryPolicy] = None,
        forward_state: Optional[ForwardState] = None,
        monitors: Sequence[Any] = (),
    ) -> None:
        if config is not None and not isinstance(config, AdaLossConfig):
            raise TypeError(f"config must be an AdaLossConfig or None, got {type(config).__name__}")
        if isinstance(loss, AdaptiveLossScaling):
            raise TypeError(
                "loss is scaled already: it is an AdaptiveLossScaling; give the loss that was wrapped in it, "
                "or its FormatEmulation"
            )
        self._storage: Optional[EmulatedStorage] = getattr(loss, "emulated_storage", None)
        self._variable = variable_of(loss)
        reading = read_graph(self._variable)
        refuse_a_loss_that_scales_itself(reading.described)
        context = self._variable.parent.context
        self.config = (AdaLossConfig() if config is None else config).stored_in(
            self._storage.precision if self._storage else Precision() if computes_in_half(context) else None
        )
        self._loss = loss
        self.audience: Optional[Audience] = audience_of(monitors)
        self._kernels = select_kernels(context)
        self._ada_loss = NNablaAdaLoss(self.config, self._kernels, limit_policy)
        self._delay = self._choose_delay()
        if self._delay and not self._ada_loss.takes_statistics:
            raise ValueError(
                "delay=1 keeps statistics, not arrays, and "
                f"loss_scale_method={self.config.loss_scale_method!r} looks at arrays; "
                "choose delay=0 or another method"
            )
        method = self.config.method
        self._by_layer = method.needs is Needs.COMPONENTS
        policy = HistoryPolicy() if history is None else history
        if self._by_layer:
            policy = method.policy(policy)
    def _choose_delay(self) -> int:
        if self.config.delay is not None:
            return self.config.delay
        # On a GPU every look at a result within the pass would wait for the device.
        return int(self._kernels.asynchronous and self._ada_loss.takes_statistics)


def _looks_after(
    communicator_callbacks: Optional[Any], pre_hook: Optional[Hook], post_hook: Optional[Hook]
) -> bool:
    """Whether somebody takes gradients as each function leaves them."""
    return communicator_callbacks is not None or post_hook is not None


def _new_holding(config: AdaLossConfig, delay: int) -> Holding:
    method = config.method
    return Holding(
        config.iterations_per_measurement,
        constant=isinstance(method, Fixed) and method.fixed_loss_scale == 1.0,
        delayed=bool(delay),
    )
