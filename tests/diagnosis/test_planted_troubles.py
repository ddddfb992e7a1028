# SPDX-License-Identifier: Apache-2.0
"""Every planted trouble is named with its layer, its kind and a remedy that helps; sound networks are not
accused.
"""

from __future__ import annotations

from typing import Dict

import pytest

from nnabla_adaloss import Way, diagnose

from . import troubles_of_data, troubles_of_layers
from .healthy import HEALTHY
from .nets import Trouble

TROUBLES: Dict[str, Trouble] = {
    name: found
    for module in (troubles_of_data, troubles_of_layers)
    for name, found in vars(module).items()
    if isinstance(found, Trouble)
}


@pytest.mark.parametrize("name", TROUBLES)
def test_the_first_layer_its_cause_and_a_remedy_are_named(name: str) -> None:
    trouble = TROUBLES[name]
    source, feed = trouble.build(False)
    diagnosis = diagnose(source, feeder=feed)
    verdict = diagnosis.verdict
    first, fatal = verdict.causes[0], trouble.needs is None
    assert (first.layer, first.kind, first.fatal) == (trouble.layer, trouble.kind, fatal), diagnosis
    assert trouble.remedy in first.remedy, diagnosis
    assert verdict.needs is trouble.needs, diagnosis
    assert all(first.what in layer.line for layer in verdict.layers if layer.name == first.layer), diagnosis
    # What follows from it is not told.
    assert [cause.kind for cause in verdict.causes[1:]] == list(trouble.beside), diagnosis
    assert verdict.line.startswith(f"No loss scale helps: {first}") == fatal


@pytest.mark.parametrize("name", TROUBLES)
def test_with_the_remedy_nothing_is_wrong(name: str) -> None:
    source, feed = TROUBLES[name].build(True)
    diagnosis = diagnose(source, feeder=feed)
    assert not diagnosis.verdict.causes, diagnosis
    assert diagnosis.verdict.needs is not None, diagnosis


@pytest.mark.parametrize("name", HEALTHY)
def test_nobody_is_accused_falsely(name: str) -> None:
    source, feed = HEALTHY[name]()
    diagnosis = diagnose(source, feeder=feed)
    assert not diagnosis.verdict.causes, diagnosis
    assert diagnosis.verdict.needs is Way.NONE, diagnosis
    assert diagnosis.verdict.line == "float16 needs no scaling here."
