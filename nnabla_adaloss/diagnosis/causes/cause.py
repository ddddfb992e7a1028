# SPDX-License-Identifier: Apache-2.0
"""Something that is wrong, and what to do about it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ..numbers import FunctionNumbers


class Kind(str, Enum):
    """What is wrong."""

    WEIGHT_NOT_FINITE = "weight_not_finite"
    DATA_NOT_FINITE = "data_not_finite"
    WRONG_LABELS = "wrong_labels"
    WRONG_INDICES = "wrong_indices"
    LEARNING_RATE = "learning_rate"
    FORWARD_NOT_FINITE = "forward_not_finite"
    BACKWARD_NOT_FINITE = "backward_not_finite"
    BEYOND_STORAGE = "beyond_storage"
    STORED_ZERO = "stored_zero"
    ATTENTION_OVERFLOW = "attention_overflow"
    ACTIVATION_OVERFLOW = "activation_overflow"
    LARGE_LOSS = "large_loss"
    CONSTANT_INPUT = "constant_input"
    DEAD_RELU = "dead_relu"
    ZERO_WEIGHTS = "zero_weights"
    SATURATED = "saturated"
    NO_GRADIENT = "no_gradient"
    UNTRAINED = "untrained"
    EXPLODING = "exploding"
    SHRINKING = "shrinking"
    SMALL_LOSS = "small_loss"
    SPREAD = "spread"


class Cause(NamedTuple):
    """Something that is wrong, and what to do about it.

    Attributes:
        kind: what it is.
        layer: the layer that it is about; the function where there is no layer, or the labels or parameters.
        what: what is wrong, in words.
        remedy: what to do.
        fatal: whether no loss scale helps.
    """

    kind: Kind
    layer: str
    what: str
    remedy: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.layer}: {self.what}. {self.remedy[0].upper()}{self.remedy[1:]}"


def place(f: FunctionNumbers) -> str:
    """The layer that a function is or comes after; its own name where there is none."""
    return f.layer or f.name


def subject(f: FunctionNumbers) -> str:
    """What a function is called in a sentence about its layer: `its Log`; `it` if it is the layer itself."""
    return "it" if f.name == place(f) else f"its {f.type_name}"


def count(number: int, what: str) -> str:
    """A number of things."""
    return f"{number} {what}{'s' if number != 1 else ''}"
