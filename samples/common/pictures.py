# SPDX-License-Identifier: Apache-2.0
"""Pictures of predictions, drawn into a file without a display."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Tuple

from matplotlib.figure import Figure


def add_option(made: argparse.ArgumentParser, what: str) -> None:
    """Add --picture to a sample's options."""
    made.add_argument(
        "--picture", type=_file, metavar="FILE", help=f"draw {what} into this file, .png or .pdf"
    )


def _file(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} does not end in .png or .pdf")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is no folder")
    return path


def panels(rows: int, columns: int, side: float = 1.5) -> Tuple[Figure, Any]:
    """Make a figure and its panels, an array of shape (rows, columns), with thin frames and without ticks.

    Args:
        rows: number of rows.
        columns: number of columns.
        side: of each panel, in inches.
    """
    figure = Figure(figsize=(side * columns + 0.4, side * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_color("#cccccc")
    return figure, axes


def show(panel: Any, pixels: Any) -> None:
    """Draw an image whose pixels are -1 (paper) to 1 (ink), shape (1, height, width)."""
    panel.imshow(pixels[0], cmap="gray_r", vmin=-1.0, vmax=1.0)
