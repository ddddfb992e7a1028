# SPDX-License-Identifier: Apache-2.0
"""Draw the components of a network's gradients and their scales, for the documentation."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from tools.draw_ranges import LARGEST, LOSS_WEIGHT, ROOT, SMALLEST, SMALLEST_NORMAL

DESCRIPTION = """\
Trains a small network in emulated float16, its loss multiplied by 1e-6, and draws the components of its
gradients in backward order: the largest gradient (amax) and scale S of each, and the alpha of each layer,
the ratio of the scales after and before it. At the right is the effect of S on amax.

A component is named after the function that its first gradient belongs to; MulScalar at the loss is its
weight. The residual block is inside one component: both its paths end at the same gradient. The last layer
starts with small weights and the hidden one with large ones, so that scales differ.
"""

EPILOG = """\
examples:
  python -m tools.draw_components                         the picture in docs/images
  python -m tools.draw_components --output picture.svg    another file; the suffix decides the format
"""

NORMAL, SUBNORMAL, SINGLE, SEVERAL = "#cfe6cf", "#fbe8c4", "#f3e3ee", "#dbe8f5"
LINE, EDGE, DOT = "#27333f", "#8b98a5", "#1f6fb2"


class Box(NamedTuple):
    """A component; numbers are binary logarithms."""

    name: str
    amax: float
    scale: float
    single: bool  # True if its gradients are scalars


class Arrow(NamedTuple):
    """Path from a component, by number, to another one or, beside a skip connection, to itself."""

    before: int
    after: int
    layer: Optional[str]  # None: a function at the loss
    factor: float  # a binary logarithm


def train() -> Any:
    """Train for 20 updates and return the engine."""
    import nnabla as nn
    import nnabla.functions as F
    import nnabla.initializer as I
    import nnabla.parametric_functions as PF
    import nnabla.solvers as S
    import numpy as np

    from nnabla_adaloss import AdaptiveLossScalingUpdater

    nn.clear_parameters()
    nn.seed(0)
    random, weights = np.random.default_rng(0), np.random.RandomState(0)
    x, t = nn.Variable((64, 16)), nn.Variable((64, 4))
    h = PF.affine(x, 64, name="first")
    h = h + F.tanh(PF.affine(h, 64, name="residual"))
    h = F.tanh(PF.affine(h, 64, name="hidden", w_init=I.NormalInitializer(1.0, weights)))
    y = PF.affine(h, 4, name="last", w_init=I.NormalInitializer(0.01, weights))
    loss = F.mean(F.squared_error(y, t)) * LOSS_WEIGHT
    solver = S.Momentum(0.02 / LOSS_WEIGHT)
    solver.set_parameters(nn.get_parameters())

    def feed() -> None:
        x.d = random.standard_normal(x.shape)
        t.d = np.sin(x.d[:, :4])

    updater = AdaptiveLossScalingUpdater(solver, loss, feed, storage="float16")
    for _ in range(20):
        updater.update()
    return updater.scaling


def amaxes(scaling: Any) -> Dict[str, float]:
    """Largest magnitude of each component with the loss weights of the last pass."""
    schedule = scaling.result.schedule
    weights = dict(zip(schedule.components.names, schedule.loss_weights))
    return {name: amax * weights[name] for name, amax in scaling.components.unit_amaxes().items()}


def read(scaling: Any) -> Tuple[List[Box], List[Arrow]]:
    """Read the components of an engine's last pass, in backward order, and the paths between them."""
    schedule, measured = scaling.result.schedule, amaxes(scaling)
    graph, scales = schedule.components, [math.log2(scale) for scale in schedule.component_scales]
    boxes = [
        # The gradient of the loss is 1 and not measured.
        Box(name, math.log2(measured.get(name, 1.0)), scale, index in graph.scalar_components)
        for index, (name, scale) in enumerate(zip(graph.names, scales))
    ]
    arrows = [
        Arrow(e.predecessor, e.successor, e.layer, scales[e.successor] - scales[e.predecessor])
        for e in graph.edges
    ]
    for node in schedule.nodes:
        own = graph.of[node.outputs[0]]
        for layer in [slot.layer for slot in node.layer_inputs if graph.of[slot.input] == own]:
            arrows.append(Arrow(own, own, layer, math.log2(schedule.layers[layer][1])))
    return boxes, arrows


def power(exponent: float) -> str:
    """Write a power of two for the picture."""
    return f"$2^{{{round(exponent, 1):g}}}$"


def title(box: Box) -> str:
    """Name of a component; functions at the loss belong to no layer, and MulScalar is the loss weight."""
    return box.name.rpartition("/")[2].replace("MulScalar", "loss weight") if box.single else box.name


def told(arrow: Arrow, before: Box) -> str:
    """Label of an arrow."""
    factor = power(arrow.factor)
    return f"{arrow.layer}:  alpha = {factor}" if arrow.layer else f"{title(before)}:  × {factor}"


def figure_of(boxes: Sequence[Box], arrows: Sequence[Arrow]) -> Any:
    """Draw the components at the left and the range of float16 at the right."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch, Patch

    line = {"arrowstyle": "-|>", "color": LINE, "shrinkA": 0, "shrinkB": 0}
    inner = {arrow.before for arrow in arrows if arrow.before == arrow.after}
    heights = [1.3 if number in inner else 0.7 for number in range(len(boxes))]
    tops = [sum(heights[:number]) + 0.6 * number for number in range(len(boxes) + 1)]
    figure = Figure(figsize=(8.0, 0.85 * tops[-1] + 0.6), layout="constrained")
    flow, ranges = figure.subplots(1, 2, sharey=True, width_ratios=(1.1, 1.0))
    for box, top, height in zip(boxes, tops, heights):
        round_box = FancyBboxPatch((0, top), 10, height, boxstyle="round,pad=0,rounding_size=0.12")
        round_box.set(facecolor=SINGLE if box.single else SEVERAL, edgecolor=EDGE)
        flow.add_patch(round_box)
        flow.text(5, top + 0.21, title(box), ha="center", va="center", fontsize=11, weight="bold")
        values = f"amax = {power(box.amax)}    S = {power(box.scale)}"
        flow.text(5, top + 0.48, values, ha="center", va="center", fontsize=11)
        at, stored = top + 0.35, box.amax + box.scale
        ranges.annotate("", (stored, at), (box.amax, at), arrowprops={**line, "color": DOT, "shrinkB": 3})
        ranges.plot([box.amax], [at], "o", color=DOT, markerfacecolor="white")
        ranges.plot([stored], [at], "o", color=DOT)
        ranges.text((box.amax + stored) / 2, at - 0.09, f"× {power(box.scale)}", ha="center", fontsize=10)
    for arrow in arrows:
        start, end = tops[arrow.before] + heights[arrow.before], tops[arrow.after]
        if arrow.before == arrow.after:
            start, end = end + 0.72, start - 0.1
            around = {**line, "connectionstyle": "arc,angleA=0,angleB=0,armA=28,armB=28,rad=10"}
            flow.annotate("", (2.0, end), (2.0, start), arrowprops=around)
            flow.text(1.7, (start + end) / 2, "skip", ha="right", va="center", fontsize=10)
        flow.annotate("", (2.0, end), (2.0, start), arrowprops=line)
        beside = 3.4 if arrow.before == arrow.after else 2.4
        flow.text(beside, (start + end) / 2, told(arrow, boxes[arrow.before]), va="center", fontsize=10)
    flow.set(title="components, from the loss backwards", xlim=(-0.1, 10.1), ylim=(tops[-1] - 0.5, -0.1))
    flow.axis("off")
    ranges.axvspan(SMALLEST_NORMAL, LARGEST, color=NORMAL)
    ranges.axvspan(SMALLEST, SMALLEST_NORMAL, color=SUBNORMAL)
    ranges.set(title="largest gradient (amax), without and with S", xlim=(-31, 19))
    ranges.set_xticks([-24, -14, 0, 15], ["$2^{-24}$", "$2^{-14}$", "1", "$2^{15}$"])
    ranges.tick_params(axis="y", left=False)
    colors = {"scalars": SINGLE, "several elements": SEVERAL}
    colors.update({"normal numbers of float16": NORMAL, "subnormal": SUBNORMAL})
    patches = [Patch(color=color, label=label) for label, color in colors.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Train and draw."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    picture = ROOT / "docs" / "images" / "components.png"
    parser.add_argument(
        "--output", type=Path, default=picture, help="docs/images/components.png if not given"
    )
    target: Path = parser.parse_args(arguments).output
    boxes, arrows = read(train())
    target.parent.mkdir(parents=True, exist_ok=True)
    figure_of(boxes, arrows).savefig(target, dpi=120)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
