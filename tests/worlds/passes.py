# SPDX-License-Identifier: Apache-2.0
"""Passes of an engine, and iterations as an updater runs them, until scales are good."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterable, Iterator, List, Optional, Tuple
from unittest import mock

import nnabla as nn
import numpy as np

from nnabla_adaloss import AdaptiveLossScaling
from nnabla_adaloss.core.choose import Choice
from nnabla_adaloss.core.components import Components
from nnabla_adaloss.core.layer_record import Reason
from nnabla_adaloss.engine import chooser
from tests.worlds.values import Values, gradients, zero_grads


def run(loss: Any, *scale: Optional[float], clear: bool = False, **options: Any) -> Values:
    """The gradients of one pass, of an engine or of nnabla's own."""
    zero_grads()
    loss.forward(clear_no_need_grad=clear)
    loss.backward(*scale, clear_buffer=clear, **options)
    return gradients()


def settle(
    scaling: AdaptiveLossScaling,
    iteration: int = 0,
    scale: Optional[float] = None,
    *,
    leaves: Optional[Iterable[nn.Variable]] = None,
    clear: bool = True,
    **options: Any,
) -> List[str]:
    """Run one iteration with one batch; return the kinds of its passes."""
    kinds: List[str] = []
    zeroed = None if leaves is None else list(leaves)
    for number in range(8):
        zero_grads(zeroed)
        scaling.forward(clear_no_need_grad=clear)
        scaling.backward(scale, clear_buffer=clear, iteration=iteration, rerun=number > 0, **options)
        kinds.append(scaling.result.kind)
        if scaling.calibrated:
            break
    return kinds


def calibrated(scaling: AdaptiveLossScaling, scale: Optional[float] = 8.0) -> Values:
    """The gradients of a batch, with scales that are good."""
    settle(scaling, scaling.iteration, scale, clear=False)
    return gradients()


@contextmanager
def any_scales(seed: int, exponents: Optional[Tuple[int, int]]) -> Iterator[None]:
    """Have scales drawn for each component, whatever is known of it, each time that scales are chosen."""
    rng = np.random.default_rng(seed)

    def draw(components: Components, *_: Any, **__: Any) -> Choice:
        assert exponents is not None
        scales = [2.0 ** int(rng.integers(*exponents)) for _ in components.names]
        return Choice(scales, {edge.layer: Reason.SCALE_LIMIT for edge in components.edges if edge.layer})

    if exponents is None:
        yield
        return
    with mock.patch.object(chooser, "choose", draw):
        yield


class Noting:
    """A loss that notes what its backward is called with; `after` runs where nnabla's communicators do."""

    def __init__(self, variable: nn.Variable, after: Optional[Callable[[], None]] = None) -> None:
        self.variable, self.after = variable, after
        self.callbacks: Any = None
        self.hooked = False

    def forward(self, **options: Any) -> None:
        self.variable.forward(**options)

    def backward(
        self, scale: float, clear_buffer: bool, callbacks: Any, pre: Any, post: Any, *, grad: Any = None
    ) -> None:
        self.callbacks, self.hooked = callbacks, bool(pre or post)

        def communicate(f: Any) -> None:
            if post is not None:
                post(f)
            if self.after is not None:
                self.after()

        after = post if self.after is None else communicate
        self.variable.backward(
            scale, clear_buffer=clear_buffer, function_pre_hook=pre, function_post_hook=after
        )


def look(f: Any) -> None:
    """A hook that sees each function."""
