# SPDX-License-Identifier: Apache-2.0
"""Verdicts on methods: as good as fp32 or not, by a rule, as a table."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Sequence, Tuple

from problems import PROBLEMS
from report import weight_label

REFERENCE = "fp32"
POINTS = 3
"""How many percentage points of test accuracy below fp32 still count as the same."""
LEARNED = 0.5
"""Test accuracy from which fp32 counts as having learned; chance is 0.1."""

# Marks for encodings without ✓ and ✗.
_ASCII = {"✓": "+", "✗": "-"}


class Score(NamedTuple):
    """Result of one training.

    Attributes:
        network: key of `PROBLEMS`.
        loss_weight: factor of the mean cross entropy, or of the second of two losses.
        method: key of `METHODS`.
        test_accuracy: share of test images that the final fp32 weights classify correctly.
        thrown_away: number of batches without an update.
    """

    network: str
    loss_weight: float
    method: str
    test_accuracy: float
    thrown_away: int


class Verdicts:
    """Comparison of scores with fp32's for the same network and loss weight.

    Args:
        scores: one for each method, network and loss weight, fp32 included.

    Attributes:
        methods: in the order of the scores.
        cases: network and loss weight, likewise.
        compared: the cases in which fp32 has learned, and a comparison makes sense.
    """

    def __init__(self, scores: Sequence[Score]) -> None:
        self._scores = {(s.method, s.network, s.loss_weight): s for s in scores}
        self.methods = list(dict.fromkeys(s.method for s in scores))
        self.cases: List[Tuple[str, float]] = list(dict.fromkeys((s.network, s.loss_weight) for s in scores))
        self.compared = [case for case in self.cases if self.accuracy(REFERENCE, case) >= LEARNED]

    def accuracy(self, method: str, case: Tuple[str, float]) -> float:
        """Test accuracy of a method in a case."""
        return self._scores[method, case[0], case[1]].test_accuracy

    def works(self, method: str, case: Tuple[str, float]) -> bool:
        """True if that is at most `POINTS` percentage points below fp32's."""
        below = self.accuracy(REFERENCE, case) - self.accuracy(method, case)
        return below <= POINTS / 100 + 1e-9

    def mark(self, method: str, case: Tuple[str, float]) -> str:
        """Mark ✓ if a method works, else ✗; empty for fp32 itself, and where that has not learned."""
        if method == REFERENCE or case not in self.compared:
            return ""
        return "✓" if self.works(method, case) else "✗"

    def count(self, method: str) -> int:
        """Number of compared cases in which a method works."""
        return sum(self.works(method, case) for case in self.compared)

    def table(self, encoding: str = "utf-8") -> str:
        """Write a row for each method, then the rule, then a line for each method with its count."""
        marks = marks_for(encoding)
        networks = list(dict.fromkeys(network for network, _ in self.cases))
        weights = [case_label(case) for case in self.cases]
        per_network = len(self.cases) // len(networks)
        first = "".join(f"   {PROBLEMS[name].title:^{10 * per_network - 3}}" for name in networks)
        lines = ["", f"{'test accuracy':16}{first}".rstrip(), _row("loss weight", weights, per_network)]
        for method in self.methods:
            cells = [self._cell(method, case, marks) for case in self.cases]
            lines.append(_row(method, cells, per_network))
        lines += [
            "",
            f"{marks['✓']} at most {POINTS} points below fp32 with the same net and loss weight, "
            f"{marks['✗']} further below",
        ]
        if len(self.compared) < len(self.cases):
            lines.append(f"no mark where fp32 has not learned ({LEARNED:.0%}): more --iterations")
        lines.append("")
        lines += [self._summary(method) for method in self.methods if method != REFERENCE]
        return "\n".join(lines)

    def _summary(self, method: str) -> str:
        thrown_away = sum(self._scores[(method, *case)].thrown_away for case in self.cases)
        batches = f"{thrown_away} batch{'es' if thrown_away != 1 else ''} thrown away"
        return f"{method:16} works untouched in {self.count(method)} of {len(self.compared)}, {batches}"

    def _cell(self, method: str, case: Tuple[str, float], marks: Dict[str, str]) -> str:
        return f"{self.accuracy(method, case):.1%} {marks.get(self.mark(method, case), ' ')}"


def _row(head: str, cells: Sequence[str], per_network: int) -> str:
    text = f"{head:16}"
    for index, cell in enumerate(cells):
        text += ("   " if index % per_network == 0 else "  ") + f"{cell:>8}"
    return text.rstrip()


def case_label(case: Tuple[str, float]) -> str:
    """Loss weight of a case, or the ratio of its losses."""
    network, weight = case
    return PROBLEMS[network].before_weight + weight_label(weight)


def marks_for(encoding: str) -> Dict[str, str]:
    """Choose the marks for ✓ and ✗ in an encoding."""
    try:
        "✓✗".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return _ASCII
    return {mark: mark for mark in _ASCII}
