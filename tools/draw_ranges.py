# SPDX-License-Identifier: Apache-2.0
"""Draw the ranges of a network's gradients and of float16, for the documentation."""

from __future__ import annotations

import argparse
import math
import warnings
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent

DESCRIPTION = """\
Trains eight dense layers for 40 iterations, their loss multiplied by 1e-6, and draws how many elements of
each layer's gradient have each binary exponent, without scaling and with the measured scales.
"""

LAYERS, ITERATIONS, LOSS_WEIGHT = 8, 40, 1e-6
# Exponents of float16: normal numbers from 2**-14 to below 2**16, subnormal ones from 2**-24.
SMALLEST, SMALLEST_NORMAL, LARGEST = -24, -14, 16
EXPONENTS = range(-48, 20)


class Spread(NamedTuple):
    """Distribution of the magnitudes of a layer's gradient."""

    shares: npt.NDArray[np.float64]
    scale: int  # its binary logarithm


def measure() -> Dict[str, Spread]:
    """Train, and measure the gradients of the last iteration; the layer next to the loss comes last."""
    import nnabla as nn
    import nnabla.functions as F
    import nnabla.parametric_functions as PF
    import nnabla.solvers as S

    from nnabla_adaloss import AdaptiveLossScalingUpdater, LossScaleWarning, Recorder

    nn.clear_parameters()
    nn.seed(0)
    random = np.random.default_rng(0)
    x, t = nn.Variable((64, 16)), nn.Variable((64, 1))
    h = x
    for number in range(1, LAYERS):
        h = F.tanh(PF.affine(h, 64, name=f"layer{number}"))
    loss = F.mean(F.softmax_cross_entropy(PF.affine(h, 4, name=f"layer{LAYERS}"), t)) * LOSS_WEIGHT
    solver = S.Momentum(0.05 / LOSS_WEIGHT)
    solver.set_parameters(nn.get_parameters())

    def feed() -> None:
        x.d = random.standard_normal(x.shape)
        t.d = x.d[:, :4].argmax(axis=1, keepdims=True)

    recorder = Recorder(every=ITERATIONS, histograms=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossScaleWarning)  # fp32 keeps the full range
        updater = AdaptiveLossScalingUpdater(solver, loss, feed, monitors=[recorder])
    for _ in range(ITERATIONS):
        updater.update()
    recording = recorder.recording
    return {name: _spread(recording.at(name, ITERATIONS)) for name in reversed(recording.layers)}


def _spread(row: Any) -> Spread:
    first, *counts = row.exponents
    shares = np.zeros(len(EXPONENTS))
    for exponent, count in enumerate(counts, first):
        if exponent in EXPONENTS:
            shares[EXPONENTS.index(exponent)] = count / (row.elements - row.zeros)
    return Spread(shares, round(math.log2(row.scale)))


def lost(spread: Spread, scaled: bool) -> float:
    """Share of elements that would underflow in float16."""
    shift = 0 if scaled else spread.scale
    return float(sum(share for e, share in zip(EXPONENTS, spread.shares) if e - shift < SMALLEST - 1))


def draw(spreads: Dict[str, Spread], target: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9.0, 4.2), sharey=True, constrained_layout=True)
    titles = ("as they are", "with the scales that were measured")
    names: List[str] = list(spreads)
    for panel, title, scaled in zip(panels, titles, (False, True)):
        panel.axvspan(SMALLEST_NORMAL, LARGEST, color="#cfe6cf", label="normal numbers of float16")
        panel.axvspan(SMALLEST, SMALLEST_NORMAL, color="#fbe8c4", label="subnormal: bits are lost")
        for height, name in enumerate(names):
            spread = spreads[name]
            at = np.array(EXPONENTS) - (0 if scaled else spread.scale) + 0.5
            shape = 1.6 * spread.shares / spread.shares.max() * 0.5
            panel.fill_between(at, height, height + shape, step="mid", color="#1f6fb2", linewidth=0)
            told = f"{lost(spread, scaled):.0%} lost"
            x, side = (-45.0, "left") if scaled else (18.0, "right")
            panel.text(x, height + 0.12, told, ha=side, fontsize=9, color="#333333")
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("magnitude")
        panel.set_xticks([-40, -24, -14, 0, 15], ["$2^{-40}$", "$2^{-24}$", "$2^{-14}$", "1", "$2^{15}$"])
        panel.set_xlim(-46, 19)
    panels[0].set_yticks([height + 0.3 for height in range(len(names))], names)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    plt.close(figure)


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Train, draw, and print the numbers of the picture."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "ranges.png")
    target: Path = parser.parse_args(arguments).output
    spreads = measure()
    draw(spreads, target)
    for name, spread in spreads.items():
        print(f"{name}: {lost(spread, False):.1%} lost, with 2^{spread.scale} {lost(spread, True):.1%}")
    print(target)


if __name__ == "__main__":
    main()
