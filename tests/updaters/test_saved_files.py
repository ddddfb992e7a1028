# SPDX-License-Identifier: Apache-2.0
"""Files that an earlier version wrote are loaded, and training goes on as it did there."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.saved.trainings import TRAININGS, Saved

SAVED = Path(__file__).parents[1] / "saved"
# Updaters write a file of states as well.
CASES = [
    (folder.name, name, kind)
    for folder in sorted(SAVED.iterdir())
    for name in TRAININGS
    for kind in ("checkpoint", "states")
    if (folder / f"{name}.{kind}").is_file()
]


def test_there_are_files() -> None:
    assert len(CASES) > len(TRAININGS)


@pytest.mark.parametrize(("version", "name", "kind"), CASES)
def test_training_goes_on_from_the_files_of_an_earlier_version(version: str, name: str, kind: str) -> None:
    saved = Saved(SAVED / version, name)
    expected: Any = json.loads((SAVED / version / "outcomes.json").read_text(encoding="utf-8"))[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(the )?state")
        warnings.filterwarnings("error", message="the parameters")
        found = json.loads(json.dumps(saved.go_on(from_states=kind == "states")))
    losses = [[one.pop("losses") for one in all_of] for all_of in (found, expected)]
    assert found == expected
    # Sums of the processor's own order.
    np.testing.assert_allclose(*losses, rtol=1e-5)
