# SPDX-License-Identifier: Apache-2.0
"""Every planted trouble is named with its layer, its kind and a remedy that helps; sound networks are not
accused.
"""

from __future__ import annotations

import pytest

from nnabla_adaloss import diagnose

from .healthy import HEALTHY
from .troubles import TROUBLES


@pytest.mark.parametrize("name", TROUBLES)
def test_the_first_layer_its_cause_and_a_remedy_are_named(name: str) -> None:
    trouble = TROUBLES[name]
    source, feed = trouble.build(False)
    diagnosis = diagnose(source, feeder=feed)
    first = diagnosis.verdict.causes[0]
    assert (first.layer, first.kind.value, first.fatal) == (trouble.layer, trouble.kind, trouble.fatal), (
        diagnosis
    )
    assert trouble.remedy in first.remedy, diagnosis
    # What follows from it is not told.
    assert sum(cause.fatal for cause in diagnosis.verdict.causes) == trouble.fatal, diagnosis
    assert diagnosis.verdict.line.startswith(f"No loss scale helps: {trouble.layer}: ") == trouble.fatal


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
    assert diagnosis.verdict.needs is not None, diagnosis
