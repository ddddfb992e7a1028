# SPDX-License-Identifier: Apache-2.0
"""Effect of constants in a loss in nnabla's half precision, without and with the float tail.

    python benchmarks/half_constants.py

Prints, for each loss, the error of the parameter gradients of its first update against fp32, as the ratio of
Euclidean norms of the worst parameter, without the float tail and with it (the default): in native half, and
in emulated float16. Then the message of native half with the float tail. 1 is a lost gradient.
"""

from __future__ import annotations

import warnings
from typing import Callable, Dict, List, NamedTuple, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from numpy.typing import NDArray

from nnabla_adaloss import AdaptiveLossScalingUpdater, LossScaleError, LossScaleWarning

HALF = nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")
FLOAT = nn.Context(["cpu:float"], "CpuCachedArray", "0")

Loss = Callable[[nn.Variable, nn.Variable], nn.Variable]
Gradients = Dict[str, NDArray[np.float64]]


def _weight(value: float, *shape: int) -> nn.Variable:
    return nn.Variable.from_numpy_array(np.full(shape, value, np.float32))


CASES: Dict[str, Loss] = {
    "mean(a)": lambda a, b: F.mean(a),
    "mean(a) * 1e-7": lambda a, b: F.mean(a) * 1e-7,
    "mean(a) * 1e-8": lambda a, b: F.mean(a) * 1e-8,
    "mean(a) * 1e-10": lambda a, b: F.mean(a) * 1e-10,
    "mean(a) * 1e-12": lambda a, b: F.mean(a) * 1e-12,
    "mean(a) * 1e-30": lambda a, b: F.mean(a) * 1e-30,
    "mean(a) * 1e4": lambda a, b: F.mean(a) * 1e4,
    "mean(a) * 1e8": lambda a, b: F.mean(a) * 1e8,
    "1e-9 * mean(a) * 1e9": lambda a, b: 1e-9 * F.mean(a) * 1e9,
    "mean(a) + 1e-9 * mean(b)": lambda a, b: F.mean(a) + 1e-9 * F.mean(b),
    "mean(a) * Variable(1e-9)": lambda a, b: F.mean(a) * F.reshape(_weight(1e-9, 1), ()),
    "1e-9 / (1 + mean(a))": lambda a, b: 1e-9 / (1.0 + F.mean(a)),
    "sum(stack(mean(a), 1e-9 * mean(b)))": lambda a, b: F.sum(F.stack(F.mean(a), 1e-9 * F.mean(b))),
    "mean(a * 1e-9)": lambda a, b: F.mean(a * 1e-9),
    "mean(a * Variable(1e-9))": lambda a, b: F.mean(a * _weight(1e-9, 16, 4)),
    "mean(maximum(a, 1e-8))": lambda a, b: F.mean(F.maximum_scalar(a, 1e-8)),
    "mean(a / (b + 1e-8))": lambda a, b: F.mean(a / (b + 1e-8)),
    "mean(1e-9 / (a + 1))": lambda a, b: F.mean(1e-9 / (a + 1.0)),
    "mean(huber(a, b, 1e-7))": lambda a, b: F.mean(F.huber_loss(a, b, 1e-7)),
    "mean over 65536 elements": lambda a, b: F.mean(F.broadcast(F.reshape(a, (16, 4, 1)), (16, 4, 1024))),
}


class Row(NamedTuple):
    """Errors of one loss, and the reason of the update in native half where it is not `"updated"`."""

    loss: str
    half_without: float
    half: float
    emulated_without: float
    emulated: float
    said: str


def network(loss: Loss) -> nn.Variable:
    """Build a loss of the positive outputs of two small heads."""
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    x = nn.Variable.from_numpy_array(rng.randn(16, 6).astype(np.float32))
    h = F.tanh(PF.affine(x, 8, name="body", rng=rng))
    a, b = (F.softplus(PF.affine(h, 4, name=name, rng=rng)) for name in "ab")
    return loss(a, b)


def gradients(
    loss: Loss, context: nn.Context, storage: str, *, float_tail: bool = True
) -> Tuple[Gradients, str]:
    """Compute the parameter gradients of the first update, and its message."""
    with nn.context_scope(context):
        variable = network(loss)
    solver = S.Sgd(0.0)
    solver.set_parameters(nn.get_parameters())
    found: Gradients = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LossScaleWarning)
        updater = AdaptiveLossScalingUpdater(
            solver,
            variable,
            storage=storage or None,
            float_tail=float_tail,
            on_gradients=lambda s: found.update(
                {k: v.g.astype(np.float64) for k, v in s.get_parameters().items()}
            ),
        )
        try:
            reason = updater.update().reason
        except LossScaleError as error:
            reason = str(error)
    said = [str(w.message) for w in caught] + ([] if reason == "updated" else [reason])
    return found, "; ".join(said)


def error(found: Gradients, exact: Gradients) -> float:
    """Relative error of the worst parameter; 1 without gradients."""
    norms = {name: float(np.linalg.norm(g)) for name, g in exact.items()}
    return max(
        (
            float(np.linalg.norm(found.get(name, 0.0) - exact[name])) / norm
            for name, norm in norms.items()
            if norm
        ),
        default=0.0,
    )


def measure(name: str) -> Row:
    """Train one update of the loss `name` of `CASES` in each way."""
    loss = CASES[name]
    exact, _ = gradients(loss, FLOAT, "float32")
    half_without, _ = gradients(loss, HALF, "", float_tail=False)
    half, said = gradients(loss, HALF, "")
    emulated_without, _ = gradients(loss, FLOAT, "float16", float_tail=False)
    emulated, _ = gradients(loss, FLOAT, "float16")
    found = half_without, half, emulated_without, emulated
    return Row(name, *(error(one, exact) for one in found), said)


def table(rows: List[Row]) -> str:
    """Write the rows as text."""
    lines = [f"{'loss':38}{'half':>9}{'+ tail':>9}{'emulated':>10}{'+ tail':>9}  said"]
    for row in rows:
        numbers = f"{row.half_without:9.2g}{row.half:9.2g}{row.emulated_without:10.2g}{row.emulated:9.2g}"
        lines.append(f"{row.loss:38}{numbers}  {row.said or '-'}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([measure(name) for name in CASES]))
