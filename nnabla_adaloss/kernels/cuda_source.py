# SPDX-License-Identifier: Apache-2.0
"""The CUDA source that the package ships, and the layouts of its structs as NumPy dtypes."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any, Dict, List

import numpy as np

SCALARS: Dict[str, Any] = {"u32": np.uint32, "u64": np.uint64, "float": np.float32, "double": np.float64}


class CudaSource:
    """`adaloss.cu`, and what host code must agree with it on, read from the text itself.

    Attributes:
        text: the source.

    Example:
        >>> CudaSource().constant("EXPONENT_BINS")
        256
    """

    def __init__(self) -> None:
        self.text = resources.files(__package__).joinpath("adaloss.cu").read_text(encoding="utf-8")

    @property
    def kernels(self) -> List[str]:
        """The names of the kernels."""
        return re.findall(r"__global__ __launch_bounds__\(.*?\) void (\w+)\(", self.text)

    def constant(self, name: str) -> int:
        """The value of `constexpr u32 NAME = value;` or `#define NAME value`."""
        match = re.search(rf"^(?:constexpr u32 {name} = |#define {name} )(\d+)\b", self.text, re.MULTILINE)
        if match is None:
            raise KeyError(name)
        return int(match[1])

    def layout(self, name: str) -> np.dtype[Any]:
        """The dtype of `struct NAME`, padded as C++ pads it."""
        match = re.search(rf"^struct {name} {{\n(.*?)^}};", self.text, re.MULTILINE | re.DOTALL)
        if match is None:
            raise KeyError(name)
        fields: List[Any] = []
        for kind, field, length in re.findall(r"^ *(\w+) (\w+)(?:\[(\w+)\])?;", match[1], re.MULTILINE):
            dtype = SCALARS[kind] if kind in SCALARS else self.layout(kind)
            fields.append((field, dtype, (self.constant(length),)) if length else (field, dtype))
        return np.dtype(fields, align=True)
