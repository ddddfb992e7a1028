# SPDX-License-Identifier: Apache-2.0
"""Parameter gradients: where nnabla writes them, and how they get into the fp32 masters unscaled."""

from __future__ import annotations

from typing import AbstractSet, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import nnabla as nn

from ..core.components import NodeStructure
from ..core.power_of_two import is_power_of_two
from ..core.schedule import Step
from ..emulation.rounded_storage import NativeStorage
from ..graph.graph import Graph
from ..graph.plan import GraphPlan
from ..kernels import Measurements
from ..kernels.arrays import prepare_master
from ..kernels.interface import Kernels, Unscaling, UnscalingList
from ..kernels.scratch import ScratchPool


class Contribution(NamedTuple):
    """Part of a leaf's gradient that one function writes, or several with one scale."""

    leaf: int  # position of the parameter, or other leaf; the first one of those that share the gradient
    function: int  # number, or of the first one
    variable: nn.Variable  # that the function writes to
    scale: float  # that the part carries
    half: bool  # whether a function of half precision writes it
    own_references: bool  # whether a function does that keeps references of its own to its gradient
    others: Tuple[nn.Variable, ...] = ()  # further ones that it writes, and whose gradient is the same array
    alone: bool = True  # whether it was written to an array that holds nothing else


def contributions_of(graph: Graph, plan: GraphPlan, node: NodeStructure, step: Step) -> List[Contribution]:
    """Contributions of a function to the gradients of leaves."""
    scales = step.targets(node) if any(slot.to_leaf for slot in node.slots) else {}
    found: Dict[int, Contribution] = {}
    for position in node.leaves:
        variable, leaf = graph.variables[position], plan.leaf(position)
        scale = scales.get(position, step.scale)
        if leaf in found:
            found[leaf] = found[leaf]._replace(others=(*found[leaf].others, variable))
        else:
            found[leaf] = Contribution(
                leaf=leaf,
                function=node.number,
                variable=variable,
                scale=scale,
                half=node.half,
                own_references=node.own_references,
            )
    return list(found.values())


def is_exact(contribution: Contribution, storage: NativeStorage) -> bool:
    """Whether nnabla adds a contribution to a scaled gradient bit for bit as to an unscaled one."""
    half, scale = contribution.half, contribution.scale
    return not half and is_power_of_two(scale) and not storage.rounds_gradient(contribution.variable)


class Written(NamedTuple):
    """A gradient that a function writes: into its master, or into a scratch array swapped in for it."""

    contribution: Contribution
    target: nn.NdArray  # what nnabla writes to
    master: nn.NdArray  # what it is added to: the leaf's own gradient, or what that held
    # Whether `target` is the leaf's own gradient, which `master` holds a copy of.
    master_is_copy: bool = False
    of_others: Tuple[nn.NdArray, ...] = ()  # the gradients of `contribution.others`


def _put_back(entry: Written) -> None:
    entry.contribution.variable.grad = entry.master
    for other, gradient in zip(entry.contribution.others, entry.of_others):
        other.grad = gradient


class LeafGradients:
    """Takes the gradients of one function's leaves, and adds them to the masters, divided by their scale."""

    def __init__(
        self,
        kernels: Kernels,
        pool: ScratchPool,
        measurements: Measurements,
        *,
        storage: NativeStorage,
        unscale_each: bool = False,
    ) -> None:
        self._kernels, self._pool, self._measurements = kernels, pool, measurements
        self._storage = storage
        # One call for all of a pass, unless somebody takes each gradient right after its function.
        self._waits = not unscale_each
        self._written: List[Contribution] = []
        # By leaf, as what waits is.
        self._running: Dict[int, Written] = {}
        self._waiting: Dict[int, List[Written]] = {}

    def take(self, *leaves: Contribution) -> None:
        """Direct the gradients of leaves to where they can be unscaled, for one function or all of a pass."""
        # A second use of a leaf must find its master as the first one leaves it.
        self._unscale([entry for one in leaves for entry in self._waiting.pop(one.leaf, ())])
        for one in leaves:
            self._take(one)

    def _take(self, contribution: Contribution) -> None:
        variable, half = contribution.variable, contribution.half
        own_references = contribution.own_references
        master = target = variable.grad
        master_is_copy = False
        prepare_master(master, self._kernels.context)
        # What is lazily zero holds nothing to be scaled, also where a function of half precision adds to it.
        if master.zeroing and (own_references or not half):
            pass
        elif own_references and half:
            # It writes to the leaf's gradient whatever is swapped, and would add in half precision.
            master_is_copy, master = True, self._scratch(contribution)
            self._kernels.scaled_copy(target, master, 1.0)
            target.fill(-0.0)
        elif own_references or is_exact(contribution, self._storage):
            # Exact both ways, and nnabla adds as it does without the engine.
            self._kernels.scale_(master, contribution.scale)
            contribution = contribution._replace(alone=False)
        else:
            target = self._scratch(contribution)
            if master.zeroing:
                target.zero()
            else:
                # nnabla has looked at the master by now, and may add: to -0.0, which changes not even a sign.
                target.fill(-0.0)
        # Noted before it is swapped: a signal may interrupt us between any two lines.
        of_others = tuple([other.grad for other in contribution.others])
        self._running[contribution.leaf] = Written(contribution, target, master, master_is_copy, of_others)
        if target is not master and not master_is_copy:
            variable.grad = target
            for other in contribution.others:
                other.grad = target.view(other.shape)

    def _scratch(self, contribution: Contribution) -> nn.NdArray:
        return self._pool.get(contribution.variable.shape, "gradient", contribution.leaf)

    def hand_on(self, following: Sequence[Contribution]) -> None:
        """Unscale what a function has written to leaves that others write next."""
        before = [self._running[contribution.leaf] for contribution in following]
        for contribution, entry in zip(following, before):
            last = entry.contribution
            apart = entry.master_is_copy or entry.target is entry.master or contribution.own_references
            if apart or contribution.variable is not last.variable or contribution.others or last.others:
                for one in before:
                    self._give_back(one)
                self.take(*following)
                return
        # Scratch arrays stay where they are.
        self._unscale([entry for entry in before if not entry.target.zeroing])
        for contribution, entry in zip(following, before):
            self._running[contribution.leaf] = Written(contribution, entry.target, entry.master)
            entry.target.fill(-0.0)

    def give_back(self) -> None:
        """Put the masters back after the function ran, and unscale what it wrote."""
        for entry in [*self._running.values()]:
            self._give_back(entry)
        if not self._waits:
            self.finish()

    def _give_back(self, entry: Written) -> None:
        if entry.target is not entry.master and not entry.master_is_copy:
            _put_back(entry)
        # An array that is still zeroing was not written: its master keeps what it has.
        if not entry.target.zeroing:
            self._waiting.setdefault(entry.contribution.leaf, []).append(entry)
        del self._running[entry.contribution.leaf]

    def finish(self) -> List[Contribution]:
        """Unscale the rest; return all contributions of the pass, in the order of unscaling."""
        waiting = [entry for entries in self._waiting.values() for entry in entries]
        self._waiting.clear()
        self._unscale(waiting)
        return self._written

    def restore(self) -> None:
        """Put the masters back when a pass is given up; harmless when none is away."""
        for entry in self._running.values():
            if entry.master_is_copy:
                self._kernels.scaled_copy(entry.master, entry.target, 1.0)
                continue
            _put_back(entry)
            if entry.target is entry.master and not entry.master.zeroing:
                self._kernels.scale_(entry.master, 1.0 / entry.contribution.scale)
        self._running.clear()
        self.finish()

    def _unscale(self, written: List[Written]) -> None:
        if not written:
            return
        self._written += [entry.contribution for entry in written]
        if all(entry.target is entry.master for entry in written):
            masters = [entry.master for entry in written]
            scales = [entry.contribution.scale for entry in written]
            self._measurements.unscale_list(UnscalingList(masters, scales))
            return
        self._measurements.unscale([self._task(entry) for entry in written])
        for entry in written:
            if entry.master_is_copy:
                self._kernels.scaled_copy(entry.master, entry.target, 1.0)

    def _task(self, entry: Written) -> Unscaling:
        in_place = entry.target is entry.master
        if in_place:
            # nnabla may have turned it into half precision.
            prepare_master(entry.master, self._kernels.context)
        accumulate = not in_place and not entry.master.zeroing
        return (entry.target, entry.master, entry.contribution.scale, accumulate)


class NonfiniteGradients:
    """Sets apart, while a pass runs, gradients that a batch has left not finite and nobody zeroes."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.keys: AbstractSet[int] = frozenset()
        # Those of them that are leaves of other losses alone.
        self._others: AbstractSet[int] = frozenset()
        self._aside: List[Tuple[int, nn.NdArray, nn.NdArray]] = []

    def set_aside(self, leaves: Mapping[int, nn.Variable]) -> bool:
        """Zero the gradients that are still not finite, and keep what they hold; False when none is."""
        self._others = self.keys - leaves.keys()
        for key in self.keys & leaves.keys():
            gradient = leaves[key].grad
            if gradient.zeroing or self._kernels.all_finite([gradient]):
                continue
            held = nn.NdArray(gradient.shape)
            self._kernels.scaled_copy(gradient, held, 1.0)
            self._aside.append((key, gradient, held))
            gradient.zero()
        return bool(self._aside)

    def put_back(self, nonfinite: AbstractSet[int]) -> None:
        """Add what was set apart to what the pass has written."""
        for _, gradient, held in self._aside:
            self._kernels.unscale_add(held, gradient, 1.0, accumulate=not gradient.zeroing)
        self.keys = nonfinite | self._others | {key for key, _, _ in self._aside}
        self._others, self._aside = frozenset(), []
