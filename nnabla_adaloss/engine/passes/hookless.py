# SPDX-License-Identifier: Apache-2.0
"""Backward pass of most iterations: nnabla's own, without hooks, except after single functions."""

from __future__ import annotations

from typing import List, Sequence, Tuple

import nnabla as nn

from ..chooser import Decision
from ..hookless_steps import HooklessSteps, LeafList
from ..leaf_gradients import Contribution, LeafGradients, WrittenLeaves
from ..prepared_graph import PreparedGraph
from ..scaled_weights import ScaledWeights
from .hooked import Hooks, PassInputs


class HooklessPass:
    """Swaps all weights, runs nnabla's backward, and unscales all gradients."""

    def __init__(
        self, prepared: PreparedGraph, decision: Decision, inputs: PassInputs, steps: HooklessSteps
    ) -> None:
        self._prepared, self._decision, self._inputs, self._steps = prepared, decision, inputs, steps
        # Usually all masters (the leaves' fp32 gradients) are zero: most leaves are then unscaled in lists.
        # Others, in `one_by_one`, are unscaled by `LeafGradients`, which can add to a master.
        self._lists, self._one_by_one = steps.leaf_lists if inputs.all_zero else ([], steps.leaves)
        # Lists whose leaves nnabla is writing, with their masters.
        self._running: List[Tuple[LeafList, Sequence[nn.NdArray]]] = []
        # Variables made persistent for this pass: nnabla would free their gradients before they are measured.
        self._kept: List[nn.Variable] = []
        self._weights = ScaledWeights(prepared)
        self._leaves = LeafGradients(prepared)

    def begin(self) -> Tuple[Hooks, Hooks]:
        """Prepare measuring, and swap weights and gradients; return the hooks before and after functions."""
        graph, measured = self._prepared.graph, self._decision.slice
        if measured is not None:
            # Activations are measured now, and gradients are kept for `end`: backward would free both.
            self._prepared.statistics.measure((), measured.activations)
            for position in measured.gradients:
                variable = graph.variables[position]
                # An emulated storage measures the gradients that it rounds: it has entries of the last pass.
                is_rounded = graph.keys[position] in self._prepared.storage.gradients
                if not (is_rounded or variable.persistent):
                    # Noted before it is set: a signal may interrupt between any two lines.
                    self._kept.append(variable)
                    variable.persistent = True
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
        # A leaf's contributions that differ in scale are divided one by one, each before the next is added.
        numbers = {hash(graph.functions[number]): number for number in (*rescales, *contributions)}

        def after(f: object) -> None:
            number = numbers.get(hash(f), -1)
            if number in rescales:
                self._prepared.rescale(rescales[number])
            if number in contributions:
                self._leaves.hand_on(contributions[number])

        return (), (after,)

    def end(self) -> WrittenLeaves:
        """Restore weights, measure, unscale gradients of leaves; return the leaves that were written."""
        prepared, measured, schedule = self._prepared, self._decision.slice, self._decision.schedule
        # Restored first: weights are measured below, not their scaled copies.
        self._weights.restore()
        if measured is not None:
            scaled = [(p, schedule.scales[p]) for p in measured.gradients if p in schedule.scales]
            prepared.statistics.measure(scaled, measured.weights)
            self._release(clear=self._inputs.clear_buffer)
        written: List[Contribution] = []
        if self._one_by_one:
            self._leaves.give_back()
            written += self._leaves.finish()
        for one, masters in self._running:
            one.put_back(masters)
            leaves, gradients = one.list_written()
            prepared.measurements.unscale(gradients)
            written += leaves
        self._running = []
        return self._steps.written_leaves(written, schedule.components)

    def restore(self) -> None:
        """Restore all swapped arrays, if any."""
        self._release()
        self._weights.restore()
        self._leaves.restore()
        for one, masters in self._running:
            one.put_back(masters)
            for master in masters:
                # It was zero before the pass, and may hold a scaled gradient now.
                master.zero()

    def _release(self, *, clear: bool = False) -> None:
        """Let nnabla free the kept gradients again; `clear`: free them now, as it would have in this pass."""
        while self._kept:
            self._kept[-1].persistent = False
            variable = self._kept.pop()
            if clear:
                variable.grad.clear()
