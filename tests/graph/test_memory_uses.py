# SPDX-License-Identifier: Apache-2.0
"""When forward reads leaves and writes outputs."""

from __future__ import annotations

from typing import Callable, Dict, Optional

import nnabla as nn
import nnabla.functions as F
import pytest

from nnabla_adaloss.graph.function_kinds import memory_uses
from nnabla_adaloss.graph.reading import GraphReading, read_graph

pytestmark = pytest.mark.any_context


def cut(v: nn.Variable) -> nn.Variable:
    return v.get_unlinked_variable(need_grad=False)


def types(reading: GraphReading, uses: Dict[int, int]) -> Dict[nn.Variable, str]:
    """The type of the function that uses each variable."""
    found = [*reading.described.type_names, "never"]
    return {reading.variables[p]: found[index] for p, index in uses.items()}


def test_leaves_are_read_and_outputs_written() -> None:
    x, t = nn.Variable((2, 3)), nn.Variable((2, 3))
    h = F.tanh(x)
    reading = read_graph(F.squared_error(F.sin(h), F.exp(t) + x))
    uses = memory_uses(reading.description({}))
    assert types(reading, uses.leaves) == {x: "Tanh", t: "Exp"}
    assert types(reading, uses.outputs)[h] == "Tanh"
    assert len(uses.outputs) == 5
    assert not uses.cut_off


def test_parameters_are_left_out() -> None:
    x, w = nn.Variable((2, 3)), nn.Variable((2, 3), need_grad=True)
    reading = read_graph(F.mean(x * w))
    assert list(types(reading, memory_uses(reading.description({hash(w): "w"})).leaves)) == [x]
    assert list(types(reading, memory_uses(reading.description({})).leaves)) == [x, w]


def after(y: nn.Variable) -> nn.Variable:
    return F.sin(y) * F.exp(cut(y))


def before(y: nn.Variable) -> nn.Variable:
    return F.exp(cut(y)) * F.sin(y)


def both(y: nn.Variable) -> nn.Variable:
    return before(y) + F.cos(cut(y))


def in_one_function(y: nn.Variable) -> nn.Variable:
    return y - cut(y)


def reshaped_before(y: nn.Variable) -> nn.Variable:
    return F.reshape(cut(y), (6,)) * F.reshape(y, (6,))


def copied_before(y: nn.Variable) -> nn.Variable:
    return F.reshape(cut(y), (6,), inplace=False) * F.reshape(y, (6,))


def of_a_reshaped_one(y: nn.Variable) -> nn.Variable:
    flat = F.reshape(y, (6,))
    return F.sin(flat) * cut(flat)


def before_it_is_reshaped(y: nn.Variable) -> nn.Variable:
    return F.mean(F.sin(y)) + F.mean(F.exp(cut(y))) + F.mean(F.cos(F.reshape(y, (6,))))


def read_before_and_unlinked(y: nn.Variable) -> nn.Variable:
    return F.exp(F.unlink(cut(y))) * y


@pytest.mark.parametrize(
    ("build", "first"),
    [
        (after, None),
        (before, "Exp"),
        (both, "Exp"),
        (in_one_function, None),
        (reshaped_before, None),
        (copied_before, "Reshape"),
        (of_a_reshaped_one, None),
        (before_it_is_reshaped, None),
        (read_before_and_unlinked, "Exp"),
    ],
)
def test_what_is_read_cut_off_from_the_graph_is_told_by_the_order(
    build: Callable[[nn.Variable], nn.Variable], first: Optional[str]
) -> None:
    x = nn.Variable((2, 3))
    y = F.tanh(x)
    reading = read_graph(F.mean(build(y)))
    uses = memory_uses(reading.described)
    leaves = types(reading, uses.leaves)
    leaves.pop(x)
    assert leaves == ({} if first is None else {y: first})
    assert len(uses.cut_off) == (first is None)


def test_memory_that_is_handed_on_is_not_written() -> None:
    x = nn.Variable((2, 3))
    flat = F.unlink(F.reshape(x, (6,)))
    reading = read_graph(F.mean(F.sin(flat)))
    uses = memory_uses(reading.described)
    assert types(reading, uses.leaves) == {x: "Sin"}
    assert len(uses.outputs) == 2
    reading = read_graph(flat)
    assert types(reading, memory_uses(reading.described).leaves) == {x: "never"}
