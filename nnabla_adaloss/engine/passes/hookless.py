# SPDX-License-Identifier: Apache-2.0
"""Backward pass of most iterations: nnabla's own, without hooks, except after single functions.

A hook follows a function only if gradients are multiplied after it, or if several functions add to one leaf
and their contributions are rounded, or have other scales than one power of two.
"""

from __future__ import annotations

from typing import List, Sequence, Tuple

import nnabla as nn

from ..chooser import Decision
from ..hookless_steps import HooklessSteps, LeafList
from ..leaf_gradients import Contribution, LeafGradients, WrittenLeaves
from ..prepared_graph import PreparedGraph
from ..scaled_weights import ScaledWeights
from ..slices import Slice
from .hooked import Hooks, PassInputs


class HooklessPass:
    """Swaps all weights, runs nnabla's backward, and unscales all gradients."""

    def __init__(
        self, prepared: PreparedGraph, decision: Decision, inputs: PassInputs, steps: HooklessSteps
    ) -> None:
        self._prepared, self._schedule, self._slice = prepared, decision.schedule, decision.slice
        self._inputs, self._steps = inputs, steps
        # First contributions to leaves for `LeafGradients`. If all masters (the leaves' fp32 gradients) are
        # zero, as usual, nnabla may write them: most leaves are in lists instead.
        self._lists, self._one_by_one = steps.leaf_lists if inputs.all_zero else ([], steps.leaves)
        # Lists whose leaves nnabla is writing, with their masters.
        self._running: List[Tuple[LeafList, Sequence[nn.NdArray]]] = []
        # Variables made persistent for this pass: nnabla would free their gradients before they are measured.
        self._kept: List[nn.Variable] = []
        self._weights = ScaledWeights(prepared)
        self._leaves = LeafGradients(prepared)

    def begin(self) -> Tuple[Hooks, Hooks]:
        """Prepare measuring, and swap weights and gradients; return the hooks before and after functions."""
        graph = self._prepared.graph
        if self._slice is not None:
            self._keep_measured(self._slice)
        if self._steps.weights.keys:
            self._weights.swap(self._steps.weights)
        if self._one_by_one:
            self._leaves.take(*self._one_by_one)
        for one in self._lists:
            masters = [self._inputs.masters[place] for place in one.places]
            # Noted before the swap: a signal may interrupt between any two lines.
            self._running.append((one, masters))
            one.begin(masters, self._prepared.pool)
        rescales, contributions = self._steps.rescales_after, self._steps.next_contributions
        if not (rescales or contributions):
            return (), ()
        numbers = {hash(graph.functions[number]): number for number in (*rescales, *contributions)}

        def after(f: object) -> None:
            number = numbers.get(hash(f), -1)
            if number in rescales:
                self._prepared.rescale(rescales[number])
            if number in contributions:
                self._leaves.hand_on(contributions[number])

        return (), (after,)

    def _keep_measured(self, measured: Slice) -> None:
        """Measure activations, and keep gradients for `end` to measure: backward would free both."""
        graph, storage = self._prepared.graph, self._prepared.storage
        self._prepared.statistics.measure((), measured.activations)
        for position in measured.gradients:
            variable = graph.variables[position]
            # An emulated storage measures all that it rounds: the gradients that it rounded in the last pass.
            if graph.keys[position] not in storage.gradients and not variable.persistent:
                # Noted before it is set: a signal may interrupt between any two lines.
                self._kept.append(variable)
                variable.persistent = True

    def end(self) -> WrittenLeaves:
        """Restore weights, measure, unscale gradients of leaves; return the leaves that were written."""
        prepared, measured, scales = self._prepared, self._slice, self._schedule.scales
        # The weights themselves are measured, not their copies.
        self._weights.restore()
        if measured is not None:
            scaled = [(p, scales[p]) for p in measured.gradients if p in scales]
            prepared.statistics.measure(scaled, measured.weights)
            kept = self._kept[:]
            self._release()
            # nnabla would have cleared them, too.
            for variable in kept if self._inputs.clear_buffer else ():
                variable.grad.clear()
        written: List[Contribution] = []
        if self._one_by_one:
            self._leaves.give_back()
            written += self._leaves.finish()
        for one, masters in self._running:
            one.put_back(masters)
            leaves, gradients = one.written()
            prepared.measurements.unscale(gradients)
            written += leaves
        self._running = []
        return self._steps.written_leaves(written, self._schedule.components)

    def restore(self) -> None:
        """Restore all swapped arrays, if any."""
        self._release()
        self._weights.restore()
        self._leaves.restore()
        for one, masters in self._running:
            one.put_back(masters)
            for master in masters:
                # It was zero before the pass, which has perhaps written it.
                master.zero()

    def _release(self) -> None:
        """Allow nnabla again to free the gradients that were kept."""
        while self._kept:
            self._kept[-1].persistent = False
            self._kept.pop()
