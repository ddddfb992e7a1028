# SPDX-License-Identifier: Apache-2.0
"""Parameter gradients: targets of nnabla's writes, unscaling into the fp32 masters, largest magnitudes."""

from __future__ import annotations

import math
from functools import cached_property
from typing import AbstractSet, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn

from ..core.components import Components, NodeStructure, component_of_contribution
from ..core.power_of_two import is_power_of_two
from ..core.schedule import Step
from ..kernels import Kernels, measurements_by
from ..kernels.arrays import prepare_master
from ..kernels.interface import UnscalingList
from .prepared_graph import PreparedGraph


class Contribution(NamedTuple):
    """Part of a leaf's gradient that one function writes, or that several add up at one scale."""

    leaf: int  # position of the leaf; for shared gradients, of the first one
    node: NodeStructure  # the (first) function
    variables: Tuple[nn.Variable, ...]  # that the function writes to: all share one gradient array
    scale: float  # scale of the part
    exact: bool  # True if the scale changes no bit: nnabla may add it to a gradient with the same scale
    in_sum: bool = False  # True if nnabla adds it to a gradient that is not zero: only the sum is measured


def contributions_of(prepared: PreparedGraph, node: NodeStructure, step: Step) -> List[Contribution]:
    """List the contributions of a function to the gradients of leaves."""
    # All have the step's scale, except that of a layer's input that is a leaf: its scale includes alpha.
    layers = zip(node.layer_inputs, step.alphas)
    scales = {one.input: step.scale * alpha for one, alpha in layers if one.to_leaf}
    by_leaf: Dict[int, Contribution] = {}
    for position in node.leaves:
        variable, leaf = prepared.graph.variables[position], prepared.plan.leaf(position)
        if leaf in by_leaf:
            # The function writes one part of the array that these leaves share, with one scale.
            by_leaf[leaf] = by_leaf[leaf]._replace(variables=(*by_leaf[leaf].variables, variable))
        else:
            # In float32, multiplying by a power of two changes no bit.
            scale = scales.get(position, step.scale)
            rounded = node.half or prepared.storage.rounds_gradient(variable)
            exact = not rounded and is_power_of_two(scale)
            by_leaf[leaf] = Contribution(leaf, node, (variable,), scale, exact)
    return list(by_leaf.values())


class WrittenGradient(NamedTuple):
    """Arrays of a leaf while a function writes it; afterwards target / scale is added to `total`.

    In place all three are one array. Otherwise `target` is a scratch array that replaces the master for the
    function; or `total` is a copy of the master, because the function keeps a reference to the master.
    """

    contribution: Contribution
    own: Sequence[nn.NdArray]  # own gradients of `contribution.variables`, views of one memory
    master: nn.NdArray  # the first of them
    target: nn.NdArray  # array that nnabla writes
    total: nn.NdArray  # array that holds the former contents of the master

    def put_back(self) -> None:
        """Restore the Variables' own gradient arrays, if `target` has replaced them."""
        if self.target is not self.master:
            for variable, gradient in zip(self.contribution.variables, self.own):
                variable.grad = gradient


class LeafGradients:
    """Takes the gradients of one function's leaves, and adds them to the masters, divided by their scale."""

    def __init__(self, prepared: PreparedGraph, *, unscale_each: bool = False) -> None:
        self._kernels, self._pool, self._measurements = prepared.kernels, prepared.pool, prepared.measurements
        # True: gradients are unscaled right after each function; else all in one call at the end of the pass.
        self._unscale_each = unscale_each
        self._written: List[Contribution] = []
        # By leaf: gradients that functions are writing, and written ones that wait to be unscaled.
        self._running: Dict[int, WrittenGradient] = {}
        self._waiting: Dict[int, WrittenGradient] = {}

    def take(self, *contributions: Contribution) -> None:
        """Choose the array that nnabla writes each contribution to, for one function or a whole pass."""
        # If a leaf is used twice, its first contribution must be in the master before the second is added.
        earlier = [self._waiting.pop(one.leaf, None) for one in contributions]
        self._unscale([entry for entry in earlier if entry is not None])
        for contribution in contributions:
            variables, node = contribution.variables, contribution.node
            own = [variable.grad for variable in variables]
            master = target = total = own[0]
            prepare_master(master, self._kernels.context)
            scratch = master.shape, "gradient", contribution.leaf
            # A scratch array replaces a master that a function in half would convert, or whose contents the
            # scale would round; but not if the function, such as F.lstm, keeps references to the master.
            loses_bits = node.half or not (contribution.exact or master.zeroing)
            if loses_bits and not node.own_references:
                target = self._pool.get(*scratch)
                if master.zeroing:
                    target.zero()
                else:
                    # nnabla may add, as the master was not zero: to -0.0, which preserves even signs.
                    target.fill(-0.0)
            elif node.half and not master.zeroing:
                # nnabla would add in half precision: the former contents move away, until `_unscale`.
                total = self._pool.get(*scratch)
                self._kernels.scaled_copy(master, total, 1.0)
                master.fill(-0.0)
            elif not master.zeroing:
                # The former contents get the scale of the new part; dividing the sum restores them.
                self._kernels.scale_(master, contribution.scale)
                contribution = contribution._replace(in_sum=True)
            # Noted before the swap: a signal may interrupt between any two lines.
            self._running[contribution.leaf] = WrittenGradient(contribution, own, master, target, total)
            if target is not master:
                variables[0].grad = target
                for variable in variables[1:]:
                    variable.grad = target.view(variable.shape)

    def hand_on(self, following: Sequence[Contribution]) -> None:
        """Give back leaves that a function has written, and take them for the `following` contributions."""
        entries = [self._running[one.leaf] for one in following]
        # In recurrent networks each time step writes the same weights: their scratch arrays stay in place,
        # unless another Variable or function refers to the gradient.
        if all(
            entry.target is not entry.master
            and one.variables == entry.contribution.variables
            and not (one.node.own_references or one.variables[1:])
            for one, entry in zip(following, entries)
        ):
            self._unscale([entry for entry in entries if not entry.target.zeroing])
            for one, entry in zip(following, entries):
                self._running[one.leaf] = entry._replace(contribution=one)
                # The next function adds to -0.0: added to 0.0, a contribution of -0.0 would become 0.0.
                entry.target.fill(-0.0)
        else:
            self.give_back(following)
            self.take(*following)

    def give_back(self, contributions: Optional[Sequence[Contribution]] = None) -> None:
        """Restore the masters after functions ran: of all leaves, or of these contributions."""
        # Unscaling waits for the next use of a leaf, or for the end of the pass.
        leaves = [*self._running] if contributions is None else [one.leaf for one in contributions]
        for leaf in leaves:
            entry = self._running[leaf]
            entry.put_back()
            # A still lazily zero array was not written: its master stays.
            if not entry.target.zeroing:
                self._waiting[leaf] = entry
            del self._running[leaf]
        if self._unscale_each:
            self.finish()

    def finish(self) -> List[Contribution]:
        """Unscale the waiting gradients; return all contributions of the pass, in the order of unscaling."""
        waiting = [*self._waiting.values()]
        self._waiting.clear()
        self._unscale(waiting)
        return self._written

    def restore(self) -> None:
        """Restore the masters when a pass is given up, and unscale gradients that functions have written."""
        for entry in self._running.values():
            entry.put_back()
            if entry.total is not entry.master:
                self._kernels.scaled_copy(entry.total, entry.master, 1.0)
            elif entry.target is entry.master and not entry.master.zeroing:
                # `take` has multiplied the contents by the scale, unless they were zero.
                self._kernels.scale_(entry.master, 1.0 / entry.contribution.scale)
        self._running.clear()
        self.finish()

    def _unscale(self, written: List[WrittenGradient]) -> None:
        """Start dividing written gradients by their scales, and adding them to the masters."""
        if not written:
            return
        self._written += [entry.contribution for entry in written]
        scales = [entry.contribution.scale for entry in written]
        if all(entry.target is entry.total for entry in written):
            self._measurements.unscale(UnscalingList([entry.total for entry in written], scales))
            return
        for entry in written:
            if entry.target is entry.total:
                # nnabla has perhaps converted the master to half: it must be float32 for adding.
                prepare_master(entry.total, self._kernels.context)
        sources, totals = [entry.target for entry in written], [entry.total for entry in written]
        accumulate = [source is not total and not total.zeroing for source, total in zip(sources, totals)]
        self._measurements.unscale(UnscalingList(sources, scales, totals, accumulate))
        for entry in written:
            if entry.total is not entry.master:
                self._kernels.scaled_copy(entry.total, entry.master, 1.0)


class WrittenLeaves:
    """Contributions of a pass, in the order of unscaling; shared by passes with equal ones."""

    def __init__(self, contributions: Sequence[Contribution], components: Components) -> None:
        self.contributions, self.components = contributions, components
        # By leaves: component of each `measured` contribution to them, and index of its magnitude.
        self._places: Dict[FrozenSet[int], List[Tuple[int, int]]] = {}

    @cached_property
    def measured(self) -> List[Tuple[Contribution, int]]:
        """Contributions with a magnitude of this batch, each with the index of that magnitude in the pass."""
        result: List[Tuple[Contribution, int]] = []
        latest: Dict[int, int] = {}  # index in `result` of the latest contribution to each leaf
        for place, one in enumerate(self.contributions):
            earlier = latest.get(one.leaf)
            # A first contribution `in_sum` was added to the gradient of earlier batches, and is left out.
            if not one.in_sum or (earlier is not None and result[earlier][0].scale != one.scale):
                latest[one.leaf] = len(result)
                result.append((one, place))
            elif earlier is not None:
                # The sum replaces its first part: passes without hooks, too, measure only sums. If a scratch
                # array held that part, the sum may include earlier batches: a larger amax only lowers scales.
                result[earlier] = result[earlier][0], place
        return result

    def amax_of_components(self, largest: Sequence[float], leaves: FrozenSet[int]) -> Dict[int, float]:
        """Largest finite amax of contributions to these leaves, by component; `largest`: amax of each one."""
        if leaves not in self._places:
            self._places[leaves] = [
                (component_of_contribution(one.node, one.leaf, self.components.of), place)
                for one, place in self.measured
                if one.leaf in leaves
            ]
        amaxes: Dict[int, float] = {}
        for component, place in self._places[leaves]:
            amax = largest[place]  # infinity if it overflowed, or is NaN
            if amax < math.inf and (component not in amaxes or amax > amaxes[component]):
                amaxes[component] = amax
        return amaxes


class NonfiniteGradients:
    """Sets aside, during a pass, nonfinite gradients of an earlier batch that are not zeroed."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.keys: AbstractSet[int] = frozenset()
        self._aside: Dict[int, Tuple[nn.NdArray, nn.NdArray]] = {}  # gradient and its contents, by key

    def set_aside(self, leaves: Mapping[int, nn.Variable]) -> bool:
        """Zero the gradients that are still not finite, and keep their contents; False if there are none."""
        keys = self.keys & leaves.keys()
        written = {key: leaves[key].grad for key in keys if not leaves[key].grad.zeroing}
        # Own measurements: fetching the engine's would remove results that a pass waits for.
        measurements = measurements_by(self._kernels, len(written))
        measurements.measure([*written.values()])
        for (key, gradient), statistics in zip(written.items(), measurements.fetch().statistics):
            if statistics.nonfinite:
                contents = nn.NdArray(gradient.shape)
                self._kernels.scaled_copy(gradient, contents, 1.0)
                self._aside[key] = gradient, contents
                gradient.zero()
        return bool(self._aside)

    def put_back(self, leaves: Mapping[int, nn.Variable], nonfinite: AbstractSet[int]) -> None:
        """Add the contents set aside to the gradients; `nonfinite`: keys of those nonfinite before that."""
        # Measurements of the sums are not fetched, which would wait for a GPU.
        gradients, contents = ([pair[i] for pair in self._aside.values()] for i in (0, 1))
        accumulate = [not gradient.zeroing for gradient in gradients]
        sums = UnscalingList(contents, [1.0] * len(contents), gradients, accumulate)
        measurements_by(self._kernels, len(contents)).unscale(sums)
        # All losses of a training loop share these keys: those of other losses' leaves stay.
        self.keys = nonfinite | (self.keys - leaves.keys()) | self._aside.keys()
        self._aside = {}
