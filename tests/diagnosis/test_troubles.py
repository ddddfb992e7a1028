# SPDX-License-Identifier: Apache-2.0
"""What no loss scale mends is named with its function and what it read; mended and sound networks are not."""

from __future__ import annotations

from functools import partial
from typing import Callable, Dict, Iterator

import nnabla as nn
import nnabla.solvers as S
import pytest

from nnabla_adaloss import Diagnosis, Way, diagnose
from nnabla_adaloss.graph.graph import Graph
from nnabla_adaloss.graph.plan import GraphPlan
from tests.worlds.trainings import updater_of

from . import troubles
from .healthy import HEALTHY
from .nets import Built, Trouble

TROUBLES: Dict[str, Trouble] = {n: found for n, found in vars(troubles).items() if isinstance(found, Trouble)}
# Of each kind, the one that an updater trains, too.
TRAINED = {trouble.kind: name for name, trouble in TROUBLES.items()}


def faces(build: Callable[[], Built], trained: bool = True) -> Iterator[Diagnosis]:
    """What is said of a network, and, if it is a loss alone, of an updater that trains what it depends on."""
    source, feed = build()
    yield diagnose(source, feeder=feed, batches=2)
    if trained and isinstance(source, nn.Variable):
        nn.clear_parameters()
        loss, feed = build()
        graph = Graph(loss)
        leaves = graph.by_key(GraphPlan(graph).leaves)
        parameters = {name: v for name, v in nn.get_parameters().items() if hash(v) in leaves}
        yield diagnose(
            updater_of(loss, feed, S.Adam(1e-3, eps=1e-30), parameters or nn.get_parameters()), batches=2
        )


@pytest.mark.parametrize("name", TROUBLES)
def test_the_function_is_named_with_its_inputs(name: str) -> None:
    trouble = TROUBLES[name]
    for diagnosis in faces(partial(trouble.build, False), TRAINED[trouble.kind] == name):
        verdict, first = diagnosis.verdict, diagnosis.verdict.causes[0]
        assert (first.kind, first.function, first.fatal) == (trouble.kind, trouble.function, trouble.fatal)
        assert trouble.told in first.what
        assert first.remedy == (trouble.remedy or first.remedy)
        assert first.parameters == (trouble.parameters or first.parameters)
        assert tuple(cause.function for cause in verdict.causes[1:]) == trouble.others, verdict.causes
        assert str(first) in verdict.line
        # Scaling trains the rest of a network, unless storage itself damages layers.
        damages = not all(layer.serves for layer in verdict.layers)
        assert (verdict.needs is None) == (trouble.fatal or damages)
        # Table and data agree: a format is served where a column says so.
        table = str(diagnosis).partition("\n\nformat ")[2].splitlines()[1 : 1 + len(verdict.formats)]
        serve = {row.split()[0]: " yes, " in row for row in table}
        assert serve == {name: bool(way) for name, way in diagnosis.as_dict()["formats"].items()}


@pytest.mark.parametrize("name", TROUBLES)
def test_mended_nothing_is_wrong(name: str) -> None:
    source, feed = TROUBLES[name].build(True)
    diagnosis = diagnose(source, feeder=feed, batches=1)
    assert not diagnosis.verdict.causes, diagnosis
    assert diagnosis.verdict.needs is not None, diagnosis


@pytest.mark.parametrize("name", HEALTHY)
def test_nobody_is_accused_falsely(name: str) -> None:
    for diagnosis in faces(HEALTHY[name]):
        assert not diagnosis.verdict.causes, diagnosis
        assert diagnosis.verdict.needs is Way.NONE, diagnosis
        assert diagnosis.verdict.line.startswith("float16 needs no scaling here")
        # A backbone or weights that no solver has may have been forgotten; what another one has, has not. The
        # sum before the division of a mean by hand is beyond the format. A derivative jumps.
        noted = "generator", "fine_tuned_head", "biases_only", "mean_by_hand", "spatial_transformer"
        assert bool(diagnosis.numbers.notes) == (name in noted), diagnosis
