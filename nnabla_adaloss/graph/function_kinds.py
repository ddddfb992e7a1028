# SPDX-License-Identifier: Apache-2.0
"""What is special about functions of nnabla: in backward, and in what forward does to memory."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple

from .reading import GraphDescription

# Their gradient is not proportional to the output gradient: they clip it or ignore it.
NON_HOMOGENEOUS: FrozenSet[str] = frozenset({"ClipGradByNorm", "ClipGradByValue", "Sink"})

# They keep references of their own to the arrays of their parameters, so that swapping has no effect.
OWN_REFERENCES: FrozenSet[str] = frozenset({"LSTM", "GRU", "RNN", "SpectralNorm"})

# Backward of these reads more than `Function.grad_depends_input_data` says.
READ_MORE: FrozenSet[str] = frozenset({"BinaryConnectAffine", "BinaryConnectConvolution"})

# Where sizes are the same, no element of an input gradient is larger than the largest of the output gradient.
NEVER_ENLARGE: FrozenSet[str] = frozenset(
    {"Add2", "Identity", "ReLU", "Reshape", "Sigmoid", "Sub2", "Tanh", "Transpose"}
)


# Functions that write into inputs of theirs in forward: which.
_WRITES: Dict[str, FrozenSet[int]] = {
    "Assign": frozenset({0}),
    "BoolScatter": frozenset({2}),
    **dict.fromkeys(
        ("BatchNormalization", "FusedBatchNormalization", "SyncBatchNormalization"), frozenset({3, 4})
    ),
    "FusedConvolution": frozenset({4, 5}),
    "MeanSubtraction": frozenset({1, 2}),
    "MinMaxQuantize": frozenset({1, 2}),
    "QuantizeLinear": frozenset({2}),
    "SpectralNorm": frozenset({1}),
    **dict.fromkeys(("BinaryConnectAffine", "BinaryConnectConvolution"), frozenset({2})),
    **dict.fromkeys(("BinaryWeightAffine", "BinaryWeightConvolution"), frozenset({2, 3})),
    **dict.fromkeys(("INQAffine", "INQConvolution"), frozenset({1, 2})),
}
_NOTHING: FrozenSet[int] = frozenset()
# Arguments of functions that write nothing where these are false.
_SWITCHES = ("batch_stat", "update_running_mean")


def written_inputs(type_name: str, args: Mapping[str, Any]) -> FrozenSet[int]:
    """Indices of the inputs that forward of a function writes, as far as it is known."""
    return _WRITES.get(type_name, _NOTHING) if all(args.get(name, True) for name in _SWITCHES) else _NOTHING


def hands_memory_on(type_name: str, args: Mapping[str, Any]) -> bool:
    """Whether a function's output is its input's memory, which it neither reads nor writes in forward."""
    return type_name == "Unlink" or (type_name == "Reshape" and args["inplace"])


class MemoryUses(NamedTuple):
    """When the memory of leaves and outputs is used, by position with the index of a function."""

    leaves: Dict[int, int]  # nameless ones but for `cut_off`, by the first function that reads their contents
    outputs: Dict[int, int]  # but for memory that was handed on, by the function that writes it
    cut_off: List[int]  # outputs that are also read as leaves, but by later functions only


def memory_uses(described: GraphDescription) -> MemoryUses:
    """When the memory of a graph is used, in a pass there and one back."""
    kinds = map(hands_memory_on, described.type_names, described.args)
    read, written = described.inputs.by_function(), described.outputs.by_function()
    functions = list(zip(kinds, read, written, described.inputs.by_function(described.producers)))
    outputs: Dict[int, int] = {}
    # With memory that is handed on, which is written when it is first met.
    filled: Dict[int, int] = {}
    for index, (hands_on, inputs, results, _) in enumerate(functions):
        if not hands_on:
            outputs.update(dict.fromkeys(results, index))
            filled.update(dict.fromkeys(results, index))
        elif inputs[0] in filled:
            filled[results[0]] = filled[inputs[0]]
    never = len(functions)
    of_leaves: Dict[int, int] = {}
    of_others: Dict[int, int] = {}
    for index in reversed(range(never)):
        hands_on, inputs, results, producers = functions[index]
        at = of_others.get(results[0], never) if hands_on else index
        for position, producer in zip(inputs, producers):
            reads = of_leaves if producer is None else of_others
            reads[position] = min(reads.get(position, never), at)
    cut_off = [p for p, index in of_leaves.items() if filled.get(p, never) < index]
    left_out = {*cut_off, *(p for p, (_, name) in described.kept.items() if name is not None)}
    leaves = {p: index for p, index in of_leaves.items() if p not in left_out}
    return MemoryUses(leaves, outputs, cut_off)
