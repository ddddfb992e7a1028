# SPDX-License-Identifier: Apache-2.0
"""Functions of nnabla that behave differently from the others in backward."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, Mapping, Sequence

import nnabla as nn

# Their gradient is not proportional to the output gradient: they clip it or ignore it.
NON_HOMOGENEOUS: FrozenSet[str] = frozenset({"ClipGradByNorm", "ClipGradByValue", "Sink"})

# They keep references of their own to the arrays of their parameters, so that swapping has no effect.
OWN_REFERENCES: FrozenSet[str] = frozenset({"LSTM", "GRU", "RNN", "SpectralNorm"})

# Where sizes are the same, no element of an input gradient is larger than the largest of the output gradient.
NEVER_ENLARGE: FrozenSet[str] = frozenset(
    {"Add2", "Identity", "ReLU", "Reshape", "Sigmoid", "Sub2", "Tanh", "Transpose"}
)


def is_half(backends: Sequence[str]) -> bool:
    """Whether the first of the `backends` of a context is one of half precision."""
    return bool(backends) and backends[0].endswith((":half", ":mixed_half"))


def float_context(context: nn.Context) -> nn.Context:
    """The context that computes in float where `context` computes in half precision."""
    backends = [f"{name.partition(':')[0]}:float" if is_half([name]) else name for name in context.backend]
    return nn.Context(list(dict.fromkeys(backends)), context.array_class, context.device_id)


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
