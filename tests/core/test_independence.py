# SPDX-License-Identifier: Apache-2.0
"""Without nnabla the core chooses, learns and judges, on a network described by hand."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
sys.modules["nnabla"] = None  # importing it raises
import nnabla_adaloss
import nnabla_adaloss.core as core
from nnabla_adaloss import AdaLossConfig, HistoryPolicy
for module in pkgutil.walk_packages(core.__path__, "nnabla_adaloss.core."):
    importlib.import_module(module.name)
import numpy as np
from nnabla_adaloss.core.layer_alpha import bound_alpha, unbounded_alpha
from nnabla_adaloss.core.statistics import statistics_of
config = AdaLossConfig()
g, W = statistics_of(np.full((2, 2), 1e-7)), statistics_of(np.full((2, 2), 0.1))
assert bound_alpha(unbounded_alpha(config, "a", g, W, config.range, 2.0), 1.0, config)[0] == 16.0

from nnabla_adaloss.core.choose import Start, choose
from nnabla_adaloss.core.components import ScaledInput, LayerInput, NodeStructure, components_of
from nnabla_adaloss.core.memory import Memory, PassMeasurements, Observations
from nnabla_adaloss.core.schedule import ScaleSchedule
from nnabla_adaloss.core.verdict import Facts, Rules, PassVerdict, judge

# By position: x -> affine (weight 1) -> 2 -> affine (weight 3) -> 4 -> mean -> 5; x needs no gradient.
def node(number, kind, output, inputs=(), leaves=(), layer_inputs=(), mean=False):
    return NodeStructure(number, kind, {}, kind, (output,), inputs, leaves, layer_inputs, mean, False, False,
                         False, mean)
slot = LayerInput("second", ScaledInput(0, 1, 8.0, 8.0), 2, 3, False, False)
nodes = [node(2, "mean", 5, (4,), mean=True), node(1, "second", 4, (2,), (3,), (slot,)),
         node(0, "first", 2, (), (1,))]
components = components_of(nodes, [2, 2, 2, 2, 2, 1], by_layer=True)
assert components.names == ["mean", "second", "first"]

policy, limits, ones = HistoryPolicy(), [65504.0] * 3, (1.0,) * 3
seen = Observations(Memory(policy)).before_pass(0)
amax, used = {1: 2.0**-6, 2: 2.0**-20}, ScaleSchedule(nodes, components, [1.0] * 3, None, ones)
measured = PassMeasurements(used, limits, amax, measured_all=True)
seen = seen.after_pass(measured, completes_entry=True)
assert judge(Facts(calibrated=seen.calibrated), Rules(True, 9)) is PassVerdict.RERUN
found = seen.limits(components, ones, limits)
scales = choose(components, found, Start(2.0**15, 8.0, 2.0**-24), None).scales
assert scales == [2.0**15, 2.0**19, 2.0**33], scales
schedule = ScaleSchedule(nodes, components, scales, None, ones)
assert schedule.layers == {"second": (2.0**19, 2.0**14)}

seen, lowered = seen.after_overflow(PassMeasurements(schedule, limits, amax, overflowed=2))
assert lowered and judge(Facts(overflowed=True, lowered=lowered), Rules(True, 9)) is PassVerdict.RERUN
assert seen.limits(components, ones, limits).limits[1:] == [2.0**19, 2.0**29]

frameworks = {name.split(".")[0] for name in sys.modules} & {"nnabla", "nnabla_ext", "cupy"}
assert frameworks == {"nnabla"}, frameworks
"""


def test_core_never_imports_nnabla() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
