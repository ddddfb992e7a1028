# SPDX-License-Identifier: Apache-2.0
"""Random training programs beside nnabla's own loop: bit for bit in fp32.

`ADALOSS_FUZZ=100 pytest tests/fuzz/test_programs.py` tries some thousands.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from nnabla_adaloss import AdaLossConfig
from nnabla_adaloss.engine import slices
from tests.fuzz.budget import budget
from tests.fuzz.programs import COMBINATIONS, HEADS, STEPS, WEIGHTS, Head, Program, Records
from tests.worlds.passes import any_scales, look
from tests.worlds.random_graphs import assert_same_above_subnormals
from tests.worlds.values import assert_equal, bits
from tests.worlds.warned import warned


class Way(NamedTuple):
    """How a program is run with this package."""

    kind: str  # "updater" or "scaler"
    hooked: bool
    method: str
    delay: Optional[int]
    drawn: Optional[Tuple[int, int]]  # exponents of random scales for each component; None: chosen
    seed: int

    def train(self, program: Program) -> Records:
        """The program in this way."""
        settings: Any = {"use_bound": False, "dtype": "float16", "delay": self.delay, "measure_every": 2}
        config = AdaLossConfig(self.method, fixed_loss_scale=4.0, **settings)
        hooks = {"function_post_hook": (None, look)} if self.hooked and self.kind == "updater" else {}
        # Each iteration measures a slice, however little there is.
        with any_scales(self.seed, self.drawn), mock.patch.object(slices, "_LEAST", 1):
            return program.train(self.kind, config, **hooks)


@st.composite
def programs(draw: Any) -> Program:
    again = st.sampled_from([False] * 5 + [True])
    steps = draw(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), again), max_size=6))
    head = st.builds(
        Head,
        st.sampled_from(sorted(HEADS)),
        st.sampled_from([0, 0, 1, 2]),
        st.sampled_from(["none", "none", *WEIGHTS]),
        # Below 2**-126, scales keep more than float32 does.
        st.sampled_from([1.0, 0.3, 1e-3, 100.0, -1.0, 1e-6, 1e-9, 1e4]),
    )
    heads = draw(st.lists(head, min_size=1, max_size=3))
    return Program(
        tuple(steps),
        tuple(heads),
        draw(st.sampled_from(["Sgd", "Momentum", "Adam"])),
        rebuilt=draw(st.sampled_from(["", "", "same", "varied"])),
        clear=draw(st.booleans()),
        batches=draw(st.sampled_from([1, 1, 2])),
        clip=draw(st.sampled_from(["", "", "norm", "value"])),
        toggled=draw(st.sampled_from(["", "", "parameter", "inner", "nothing"])),
        rates=draw(st.booleans()),
        saved=draw(st.sampled_from([0, 0, 0, 1, 2, 3, 4])),
        input_gradient=draw(st.booleans()),
        apart=draw(st.booleans()),
        combination=draw(st.sampled_from(["sum", *COMBINATIONS])),
        limit=draw(st.sampled_from([np.inf, 2.0**10, 2.0**4])),
    )


methods = st.sampled_from(["amax_history"] * 3 + ["approx_range", "abs_range", "element_wise_range", "fixed"])
ways = st.builds(
    lambda kind, hooked, method, delay, drawn, seed: Way(
        kind, hooked, method, None if method == "element_wise_range" else delay, drawn, seed
    ),
    st.sampled_from(["updater", "scaler"]),
    st.booleans(),
    methods,
    st.sampled_from([None, None, 0]),
    st.sampled_from([None, None, (-6, 12)]),
    st.integers(0, 2**31),
)


def check(program: Program, way: Way) -> None:
    """Assert that no bit is another, but for what is subnormal without a scale."""
    if way.kind == "updater":
        program = program._replace(apart=False, limit=np.inf if way.drawn else program.limit)
    else:
        program = program._replace(limit=np.inf, undone=False)
    with warned():
        expected = dict(program.train("plain"))
        # Scales end at 2**-100: beside products of weights and gradients beyond 2**100, small gradients on
        # the same trunk are lost.
        arrays = [array for one in expected.values() for array in one.values()]
        if not all((np.abs(array) < 2.0**50).all() for array in arrays):
            return
        if any(again for _, again in program.steps):
            for iteration, one in program.train("nnabla"):
                assert_equal(one, expected[iteration])
        found = way.train(program)
    for iteration, one in found:
        assert one.keys() == expected[iteration].keys()
        for name, array in expected[iteration].items():
            assert_same_above_subnormals(bits(one[name]), bits(array), f"{name} of iteration {iteration}")


@budget(20)
@given(programs(), ways)
def test_a_program_trains_as_in_nnablas_loop(program: Program, way: Way) -> None:
    check(program, way)


def of(*steps: str, again: bool = False, **options: Any) -> Program:
    return Program(tuple((step, again) for step in steps), (Head("squares", 0, "none", 1.0),), **options)


KEPT = {
    "two leaves of one gradient in a function": of("own view"),
    "a residual that the convolution reads": of("fused residual"),
    "a convolution that is computed again within": of("fused normalized", again=True),
    "a gradient that is written for the user": of("noisy", batches=2),
    "a memory that forward writes, in batches that are repeated": of(
        "scattered trained", "limited", limit=4.0
    ),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("kind", ["updater", "scaler"])
@pytest.mark.parametrize("drawn", [None, (-6, 12)])
def test_programs_that_once_failed(name: str, kind: str, drawn: Any) -> None:
    check(KEPT[name], Way(kind, False, "amax_history", None, drawn, 1))
