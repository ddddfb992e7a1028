# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import sys
import types

import pytest

from nnabla_adaloss.core import METHODS, AdaLossConfig, resolve_method


def test_built_in_names():
    assert set(METHODS) == {"approx_range", "abs_range", "element_wise_range", "fixed"}
    assert all(resolve_method(name) is method for name, method in METHODS.items())


def test_fixed_ignores_the_gradient():
    config = AdaLossConfig(fixed_loss_scale=32.0)
    assert METHODS["fixed"].function(None, None, config=config, fan_in=1.0) == 32.0


def test_a_function_is_found_by_name(monkeypatch):
    module = types.ModuleType("methods_of_a_user")
    module.constant = lambda g, W, *, config, fan_in: 4.0
    monkeypatch.setitem(sys.modules, "methods_of_a_user", module)
    method = resolve_method("methods_of_a_user:constant")
    assert method.function is module.constant
    assert not method.takes_statistics


def test_a_callable_is_taken_as_it_is():
    assert resolve_method(math.fsum).function is math.fsum


@pytest.mark.parametrize("name", ["", "approx", "math.fsum", "math:fsun", "no_module:f", ":", "a b:c"])
def test_unknown_names(name):
    with pytest.raises(ValueError, match=f"loss_scale_method='{name}'"):
        resolve_method(name)


def test_a_callable_that_raises_while_imported_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "broken_methods_of_a_user.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="cannot be imported: No module named 'no_such_package'"):
        resolve_method("broken_methods_of_a_user:f")
