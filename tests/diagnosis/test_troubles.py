# SPDX-License-Identifier: Apache-2.0
"""What no loss scale mends is named with its function and what it read; mended and sound networks are not."""

from __future__ import annotations

from typing import Dict

import pytest

from nnabla_adaloss import Way, diagnose

from . import troubles
from .healthy import HEALTHY
from .nets import Trouble

TROUBLES: Dict[str, Trouble] = {n: found for n, found in vars(troubles).items() if isinstance(found, Trouble)}


@pytest.mark.parametrize("name", TROUBLES)
def test_the_function_is_named_with_what_it_read(name: str) -> None:
    trouble = TROUBLES[name]
    source, feed = trouble.build(False)
    diagnosis = diagnose(source, feeder=feed)
    verdict, first = diagnosis.verdict, diagnosis.verdict.causes[0]
    assert (first.kind, first.function, first.fatal) == (trouble.kind, trouble.function, trouble.fatal), first
    assert trouble.told in first.what
    assert len(verdict.causes) == 1, verdict.causes
    assert str(first) in verdict.line
    assert (verdict.needs is None) == trouble.fatal


@pytest.mark.parametrize("name", TROUBLES)
def test_mended_nothing_is_wrong(name: str) -> None:
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
    assert diagnosis.verdict.line.startswith("float16 needs no scaling here")
