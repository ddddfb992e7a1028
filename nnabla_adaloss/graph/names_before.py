# SPDX-License-Identifier: Apache-2.0
"""What functions were called in version 0.1, for reading states that were saved by it."""

from __future__ import annotations

from typing import Any, Dict, Sequence

import nnabla as nn

from .names import ParameterNames


def function_names_before(functions: Sequence[Any], parameters: ParameterNames) -> Dict[int, str]:
    """The name of each function, by function key: numbered in backward order, as in `rnn/affine[1]`.

    Args:
        functions: the functions that backward visits, in its order.
        parameters: the names of the parameters.
    """
    names: Dict[int, str] = {}
    counts: Dict[str, int] = {}
    for f in functions:
        scopes = (_scope(v, parameters) for v in f.inputs[1:])
        scope = next((s for s in scopes if s), f.info.type_name)
        number = counts.get(scope, 0)
        counts[scope] = number + 1
        names[hash(f)] = scope if number == 0 else f"{scope}[{number}]"
    return names


def _scope(v: nn.Variable, parameters: ParameterNames) -> str:
    while v.parent is not None and v.parent.inputs:
        v = v.parent.inputs[0]
    name = parameters.get(hash(v), "")
    return name.rsplit("/", 1)[0] if "/" in name else name
