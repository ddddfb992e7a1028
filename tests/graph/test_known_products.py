# SPDX-License-Identifier: Apache-2.0
"""Every function of nnabla whose name says that it multiplies by weights is known as a matrix product.

A later nnabla that brings another fails here: see "A matrix product" in docs/architecture.md.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from typing import Any, Callable, Iterable, Iterator, List, Tuple

import nnabla as nn
import nnabla.backward_function as backward_package
import nnabla.function as function_module
import nnabla.functions as F
import pytest
from nnabla.function import PythonFunction

from nnabla_adaloss.graph.matrix_products import SCALABLE, is_matrix_product

pytestmark = pytest.mark.any_context

PRODUCT = re.compile(
    r"affine|conv(?!ert)|correlation|matmul|dot|einsum|linear|dense|gemm|attention|rnn|lstm|gru",
    re.IGNORECASE,
)

# What has such a name and is no product with weights.
OTHERS = {
    "AffineGrid",  # where an image is sampled: theta is an activation, and the grid is fixed
    "DequantizeLinear",
    "QuantizeLinear",
}


def function_types() -> Iterator[str]:
    """Every function written in C++."""
    for name, value in vars(function_module).items():
        if not name.startswith("_") and name[0].isupper() and callable(value):
            yield name


def gradient_types() -> Iterator[str]:
    """Every function written in Python that nn.grad makes of another; less what products inherit from."""
    for module in pkgutil.iter_modules(backward_package.__path__):
        for name, value in vars(
            importlib.import_module(f"{backward_package.__name__}.{module.name}")
        ).items():
            written_in_python = inspect.isclass(value) and issubclass(value, PythonFunction)
            if written_in_python and name not in ("LinearDataGrad", "LinearFilterGrad"):
                yield name


def suggesting(names: Iterable[str]) -> List[str]:
    return sorted(name for name in set(names) if PRODUCT.search(name) and name not in OTHERS)


FUNCTIONS = suggesting(function_types())
GRADIENTS = suggesting(gradient_types())


@pytest.mark.parametrize("type_name", FUNCTIONS + GRADIENTS)
def test_a_product_is_known(type_name: str) -> None:
    assert is_matrix_product(type_name)


def test_the_search_finds_what_there_is() -> None:
    assert {*SCALABLE, "Einsum", "GRU", "INQAffine", "LSTM", "PatchCorrelation", "RNN"} <= set(FUNCTIONS)
    assert {
        f"{layer}{part}Grad"
        for layer in ("Affine", "Convolution", "Deconvolution")
        for part in ("Data", "Filter")
    } == set(GRADIENTS)
    assert set(function_types()) >= OTHERS


@pytest.mark.parametrize("type_name", [*sorted(OTHERS), "ReLU", "Embed", "EmbedFilterGrad", "PReLU", "Mul2"])
def test_what_is_none_is_not_taken_for_one(type_name: str) -> None:
    assert not is_matrix_product(type_name)


@pytest.mark.parametrize(
    ("function", "weight", "expected"),
    [
        (F.affine, (3, 5), "Affine"),
        (F.convolution, (4, 3, 1), "Convolution"),
        (F.deconvolution, (3, 4, 1), "Deconvolution"),
    ],
)
def test_functions_in_a_graph_have_the_names_of_their_classes(
    function: Callable[..., Any], weight: Tuple[int, ...], expected: str
) -> None:
    x = nn.Variable((2, 3) + (6,) * (len(weight) - 2), need_grad=True)
    y = function(x, nn.Variable(weight, need_grad=True))
    found = {y.parent.info.type_name}
    for gradient in nn.grad([y], y.parent.inputs):
        gradient.visit(lambda f: found.add(f.info.type_name))
    assert {expected, f"{expected}DataGrad", f"{expected}FilterGrad"} <= found
