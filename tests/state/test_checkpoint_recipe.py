# SPDX-License-Identifier: Apache-2.0
"""The recipe for checkpoints in docs/checkpoints.md, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScalingUpdater

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def recipe() -> str:
    document = DOCUMENT.read_text("utf-8")
    block = re.search(r"```python\n(.*?)```", document, re.DOTALL)
    assert block
    return block[1]


def start() -> Dict[str, Any]:
    """A training that begins, and the functions of the recipe for it."""
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    x = nn.Variable((8, 5))
    h = F.tanh(PF.affine(x, 6, name="a", rng=rng))
    loss = F.mean(PF.affine(h, 3, name="b", rng=rng) ** 2)
    solver = S.Momentum(0.1)
    solver.set_parameters(nn.get_parameters())

    def feed() -> None:
        x.d = np.random.default_rng(updater.iteration).standard_normal(x.shape)

    updater = AdaptiveLossScalingUpdater(solver, loss, feed, scale=2.0**10, N=2, storage="float16")
    names = {"nn": nn, "solver": solver, "updater": updater}
    exec(recipe(), names)
    return names


def parameters() -> Dict[str, np.ndarray]:
    return {name: parameter.d.copy() for name, parameter in nn.get_parameters().items()}


def goes_on_from(folder: Path, iteration: int, expected: Dict[str, np.ndarray]) -> None:
    """Assert that a new training loads this, and that its next update is the same."""
    new = start()
    new["load_checkpoint"](folder)
    assert new["updater"].iteration == iteration
    assert new["updater"].update().updated
    np.testing.assert_equal(parameters(), expected)


def test_a_checkpoint_saved_twice_at_one_iteration(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    run = start()
    run["load_checkpoint"](folder)  # there is none yet
    assert run["updater"].iteration == 0
    for _ in range(3):
        run["updater"].update()
    run["save_checkpoint"](folder)
    run["save_checkpoint"](folder)
    run["updater"].update()
    goes_on_from(folder, 3, parameters())


def test_the_last_one_saved_is_loaded_also_after_going_back(tmp_path: Path) -> None:
    run = start()
    run["save_checkpoint"](tmp_path)
    for _ in range(12):
        run["updater"].update()
        run["save_checkpoint"](tmp_path)
    again = start()
    again["updater"].update()
    again["save_checkpoint"](tmp_path)
    again["updater"].update()
    goes_on_from(tmp_path, 1, parameters())


def test_one_that_was_not_finished_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    run["updater"].update()
    run["save_checkpoint"](tmp_path)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AdaptiveLossScalingUpdater, "save_states", killed)
        with pytest.raises(KeyboardInterrupt):
            run["save_checkpoint"](tmp_path)
    run["updater"].update()
    expected = parameters()
    run["updater"].update()
    goes_on_from(tmp_path, 1, expected)
    run = start()
    run["save_checkpoint"](tmp_path)
    assert [found.name for found in run["checkpoints"](tmp_path)] == ["00000001", "00000002"]
