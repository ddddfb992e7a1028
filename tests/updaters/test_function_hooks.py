# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import List, Tuple

import pytest
from nnabla.utils.inspection import NanInfTracer, TimeProfiler

from tests.worlds.trainings import training, updater_on
from tests.worlds.values import assert_equal, snapshot


def test_hooks_see_each_function_and_change_nothing() -> None:
    train = training()
    plain = updater_on(train)
    for _ in range(12):
        plain.update()
    expected = snapshot(train.parameters)

    seen: List[Tuple[str, str]] = []
    train = training()
    updater = updater_on(
        train,
        function_pre_hook=lambda f: seen.append(("before", f.info.type_name)),
        function_post_hook=(None, lambda f: seen.append(("behind backward", f.info.type_name))),
    )
    for _ in range(12):
        updater.update()
    assert_equal(snapshot(train.parameters), expected)
    assert updater.state_dict() == plain.state_dict()
    functions, backward = len(updater.scaling.plan.functions), len(updater.scaling.plan.nodes)
    passes = 12 + updater.counters.repeats
    assert seen.count(("behind backward", "Convolution")) == passes
    assert sum(kind == "behind backward" for kind, _ in seen) == passes * backward
    assert sum(kind == "before" for kind, _ in seen) == passes * (functions + backward)


def test_nnablas_profiler() -> None:
    profiler = TimeProfiler(ext_name="cpu", device_id="0")
    with profiler.scope("training"):
        # It has hooks within a scope only.
        updater = updater_on(
            training(), function_pre_hook=profiler.pre_hook, function_post_hook=profiler.post_hook
        )
        updater.update()
    profiler.calc_elapsed_time(["training"])
    assert "training" in profiler.get_all_results()


def test_nnablas_tracer_finds_the_nan_in_the_data() -> None:
    tracer = NanInfTracer(trace_nan=True, trace_inf=True, need_details=False)
    updater = updater_on(
        training(nan=[1]), function_post_hook=(tracer.forward_post_hook, tracer.backward_post_hook)
    )
    with tracer.trace():
        updater.update()
    with pytest.raises((ValueError, RuntimeError), match="Convolution|nan or inf|not finite"), tracer.trace():
        updater.update()
