# SPDX-License-Identifier: Apache-2.0
"""What `diagnose` returns."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Dict, Union

from .numbers import NetworkNumbers, Way
from .page import as_page
from .text import as_text
from .verdicts import Verdict, judge


class Diagnosis:
    """What storing a network's numbers in a narrow format does to its gradients; `print` it.

    Args:
        numbers: what was measured.

    Attributes:
        numbers: everything that was measured, per layer and per function.
        verdict: what that means: one line, what is needed at least, what else is wrong, a line per layer.
    """

    def __init__(self, numbers: NetworkNumbers) -> None:
        self.numbers: NetworkNumbers = numbers
        self.verdict: Verdict = judge(numbers)

    def __str__(self) -> str:
        return as_text(self.numbers, self.verdict)

    def as_dict(self) -> Dict[str, Any]:
        """Numbers and verdicts as plain dicts, lists, strings and numbers; what is not finite is None."""
        numbers, verdict = self.numbers, self.verdict
        layers = []
        for layer, judged in zip(numbers.layers, verdict.layers):
            layers.append(
                {
                    "name": layer.name,
                    "type": layer.type_name,
                    "largest_gradient": _plain(layer.amax),
                    "nonzero_elements": layer.nonzero,
                    "error_with_gradients_in_fp32": _plain(layer.floor),
                    "right_scale": judged.right_scale,
                    "verdict": judged.line,
                    "ways": {
                        way.value: {name: _plain(value) for name, value in kept._asdict().items()}
                        for way, kept in layer.kept.items()
                    },
                }
            )
        return {
            "verdict": verdict.line,
            "needs": verdict.needs.value if verdict.needs is not None else None,
            "causes": [{**cause._asdict(), "kind": cause.kind.value} for cause in verdict.causes],
            "storage": numbers.storage,
            "batches": numbers.batches,
            "loss": _plain(numbers.loss),
            "stored_loss": _plain(numbers.stored_loss),
            "scales": {way.value: numbers.scales[way] for way in Way if way in numbers.scales},
            "layers": layers,
        }

    def write_html(self, path: Union[str, os.PathLike[str]]) -> None:
        """Write a page that needs nothing else, no network either.

        Raises:
            OSError: it cannot be written.
        """
        Path(path).write_text(as_page(self.numbers, self.verdict), "utf-8")


def _plain(value: float) -> Any:
    return value if math.isfinite(value) else None
