# SPDX-License-Identifier: Apache-2.0
"""Interrupts at chosen moments, and a training whose whole state can be compared."""

from __future__ import annotations

import inspect
import os
import sys
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np

import nnabla_adaloss
from nnabla_adaloss import AdaptiveLossScalingUpdater

_PACKAGE = os.path.dirname(nnabla_adaloss.__file__)


class Interrupt(KeyboardInterrupt):
    """What a signal handler raises."""


class Moments:
    """The moments of a call at which Python would run a signal handler in a line of the package.

    CPython looks for signals where a function begins, and after a call has returned; never between the calls
    that one function in C makes. It interrupts at the moment number `stop`, and notes the `place`; 0: it only
    counts.
    """

    def __init__(self, stop: int) -> None:
        self.count, self._stop = 0, stop
        self.place: Optional[str] = None

    def run(self, call: Callable[[], Any]) -> None:
        """Call, and raise `Interrupt` at the moment."""
        sys.setprofile(self._profile)
        try:
            call()
        finally:
            sys.setprofile(None)

    def _profile(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        # What is raised in a generator that nobody asks any more, when it is closed, can only be printed.
        if event == "c_call" or code.co_flags & inspect.CO_GENERATOR:
            return
        if not code.co_filename.startswith(_PACKAGE):
            return
        self.count += 1
        if self.count == self._stop:
            sys.setprofile(None)
            self.place = f"{os.path.relpath(code.co_filename, _PACKAGE)}:{frame.f_lineno}, at a {event}"
            raise Interrupt


class Training:
    """A network with batch normalization, a recurrent state and, unless it `trains_all`, a layer without a
    solver. The batch depends on the number of the iteration alone, so that what is broken off comes again.
    `sizes` says how much larger targets are, `weights` what the loss is multiplied by.
    """

    def __init__(
        self,
        sizes: Mapping[int, float] = MappingProxyType({}),
        weights: Mapping[int, float] = MappingProxyType({}),
        *,
        trains_all: bool = False,
        **options: Any,
    ) -> None:
        nn.clear_parameters()
        rng = np.random.RandomState(0)
        self.x, self.t, self.state = nn.Variable((4, 5)), nn.Variable((4, 3)), nn.Variable((4, 6))
        self.state.d = 0.0
        self._sizes, self._weights, self.weight = sizes, weights, nn.Variable(())
        h = F.tanh(PF.affine(self.x, 6, name="in", rng=rng) + PF.affine(self.state, 6, name="again", rng=rng))
        h.persistent = True
        y = PF.batch_normalization(PF.affine(h, 6, name="hidden", rng=rng), name="bn")
        y = PF.affine(F.relu(y), 3, name="out", rng=rng)
        self.loss = F.mean((y - self.t) ** 2)
        if weights:
            self.loss = self.loss * self.weight
        self.state.data = h.data
        self.solver = S.Adam(0.01)
        trained = {n: v for n, v in nn.get_parameters().items() if trains_all or not n.startswith("in/")}
        self.solver.set_parameters(trained)
        self.parameters = nn.get_parameters(grad_only=False)
        self.updater = AdaptiveLossScalingUpdater(
            self.solver, self.loss, self.feed, **{"storage": "float16", **options}
        )

    def feed(self) -> None:
        rng = np.random.default_rng(self.updater.iteration)
        self.x.d = rng.standard_normal(self.x.shape)
        self.t.d = rng.standard_normal(self.t.shape) * self._sizes.get(self.updater.iteration, 1.0)
        self.weight.d = self._weights.get(self.updater.iteration, 1.0)

    def train(self, updates: int) -> Training:
        """Train, and return this."""
        for _ in range(updates):
            self.updater.update()
        return self

    def everything(self) -> Dict[str, Any]:
        """All that decides how the training goes on, and what it has accumulated."""
        found: Dict[str, Any] = {name: v.data.data.tobytes() for name, v in self.parameters.items()}
        found["state"] = self.state.data.data.tobytes()
        if "in/affine/W" not in self.solver.get_parameters():
            # Nobody zeroes it.
            found["sum of gradients"] = self.parameters["in/affine/W"].g.tobytes()
        for name, states in self.solver.get_states().items():
            # In an order of their own after `set_states`.
            arrays = [v.d.tobytes() for _, v in sorted(states.pstate.items())]
            found[f"{name} of the solver"] = [states.t, *arrays]
        found["updater"] = repr(self.updater.state_dict())
        return found


def differences(one: Dict[str, Any], other: Dict[str, Any]) -> List[str]:
    """Names of what differs."""
    return [name for name in one if one[name] != other[name]]
