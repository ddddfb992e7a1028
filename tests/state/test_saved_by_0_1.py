# SPDX-License-Identifier: Apache-2.0
"""State files of version 0.1 load: layers get the names they have now, and training goes on as it would have.

The files were written by version 0.1 (commit a3169af), after six updates of the training in
`saved_by_0_1/network.py` and with limits planted for two layers; `*_went_on.json` is what its next four
updates did.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nnabla_adaloss.state import read_state
from tests.state.saved_by_0_1.network import make

FOLDER = Path(__file__).parent / "saved_by_0_1"

NAME_NOW = {
    "out/affine": "out/affine",
    "BatchMatmul": "out/affine/BatchMatmul",
    "BatchMatmul:1": "out/affine/BatchMatmul:1",
    "BatchMatmul[1]": "q/affine/BatchMatmul",
    "BatchMatmul[1]:1": "q/affine/BatchMatmul:1",
    "q/affine": "q/affine",
    "k/affine": "k/affine",
    "rnn/affine": "rnn/affine#3",
    "rnn/affine[1]": "rnn/affine#2",
}


@pytest.mark.parametrize("delay", [0, 1])
def test_a_state_of_the_version_before_goes_on(delay: int) -> None:
    _, updater = make(delay)
    for _ in range(6):
        updater.update()
    saved = read_state(FOLDER / f"delay{delay}.json")
    # Parameters to the bit are those of the machine that trained them.
    saved["parameters"] = updater.state_dict()["parameters"]
    updater.load_state_dict(saved)
    ours = updater.state_dict()["scaling"]
    for part in ("layers", "limits"):
        assert ours[part] == {NAME_NOW[before]: values for before, values in saved["scaling"][part].items()}
    assert set(ours["layers"]) == set(updater.scaling.layers)
    assert ours["delayed"] == saved["scaling"]["delayed"]

    expected = json.loads((FOLDER / f"delay{delay}_went_on.json").read_text("utf-8"))
    results = [updater.update() for _ in range(4)]
    assert [[r.updated, r.scale, r.retries] for r in results] == expected["results"]
    assert sorted(updater.scaling.layer_scales.values()) == expected["layer_scales"]


def test_the_names_of_another_network_are_not_taken_for_earlier_ones() -> None:
    _, updater = make(0)
    saved = read_state(FOLDER / "delay0.json")
    saved["scaling"]["network"][-1] = "Affine rnn/affine[3] 4x3x6"
    before = updater.state_dict()
    with pytest.raises(ValueError, match=r"another network: it has Affine rnn/affine\[3\]"):
        updater.load_state_dict(saved)
    assert updater.state_dict() == before
