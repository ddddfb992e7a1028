# SPDX-License-Identifier: Apache-2.0
"""Addresses by one call into C are nnabla's own, or are asked for through Python."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Callable, Dict, List, Optional, Sequence

import nnabla as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnabla_adaloss.doctor.probes import array_addresses
from nnabla_adaloss.host_context import HOST
from nnabla_adaloss.kernels import addresses
from nnabla_adaloss.kernels.addresses import DirectAddresses, addresses_of, direct_addresses
from nnabla_adaloss.kernels.arrays import FLOAT16, FLOAT32

Arrays = List[nn.NdArray]


def written(shape: Sequence[int], dtype: Any = np.float32) -> nn.NdArray:
    return nn.NdArray.from_numpy_array(np.ones(shape, dtype))


def filled() -> nn.NdArray:
    array = nn.NdArray((5,))
    array.fill(2.0)
    return array


def zeroed() -> nn.NdArray:
    array = written((5,))
    array.zero()
    return array


KINDS: Dict[str, Callable[[], nn.NdArray]] = {
    "float": lambda: written((2, 3)),
    "half": lambda: written((7,), np.float16),
    "double": lambda: written((3,), np.float64),
    "integers": lambda: written((3,), np.int32),
    "empty": lambda: written((0, 2)),
    "scalar": lambda: written(()),
    "filled": filled,
    "zeroed": zeroed,
    "never written": lambda: nn.NdArray((4,)),
    "gradient": lambda: nn.Variable((2, 2), need_grad=True).grad,
    "narrowed": lambda: written((6, 2)).narrow(0, 2, 3),
    "view": lambda: written((6, 2)).view((3, 4)),
}


def ask_python(arrays: Arrays, halves: Any, *, write_only: bool = False) -> List[int]:
    dtypes = [
        FLOAT16 if half else FLOAT32 for half in (halves if halves is not None else [False] * len(arrays))
    ]
    return [x.data_ptr(dtype, HOST, write_only) for x, dtype in zip(arrays, dtypes)]


def test_nnabla_is_as_expected() -> None:
    assert direct_addresses() is not None


@given(
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=20),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None)
def test_they_are_nnablas_whatever_the_arrays_are(
    kinds: List[str], all_float: bool, write_only: bool
) -> None:
    arrays = [KINDS[kind]() for kind in kinds]
    halves = None if all_float else np.array([kind == "half" for kind in kinds], np.bool_)
    found = list(addresses_of(arrays, halves, HOST, write_only=write_only))
    assert found == ask_python(arrays, halves, write_only=write_only)
    assert {x.dtype for x in arrays} <= {FLOAT16, FLOAT32}
    assert not any(x.zeroing for x in arrays)


def test_those_that_need_memory_or_another_dtype_never_go_to_c(monkeypatch: pytest.MonkeyPatch) -> None:
    direct, asked = DirectAddresses(), []

    class Noting:
        def of(self, arrays: Arrays, halves: Any, *, write_only: bool) -> Any:
            asked.append(arrays)
            return direct.of(arrays, halves, write_only=write_only)

    monkeypatch.setattr(addresses, "direct_addresses", Noting)
    ordinary = [written((2,)) for _ in range(20)]
    for kind in ("half", "double", "filled", "zeroed", "never written"):
        addresses_of([*ordinary, KINDS[kind]()], None, HOST)
    assert not asked
    monkeypatch.setitem(sys.modules, "nnabla_ext.cuda", sys)
    addresses_of(ordinary, None, HOST)
    assert not asked, "memory may be on a device"
    monkeypatch.delitem(sys.modules, "nnabla_ext.cuda")
    addresses_of(ordinary, None, HOST)
    assert asked == [ordinary]


def test_arrays_are_used_as_by_nnabla() -> None:
    """The count of modifications, and a gradient that shares memory, follow."""
    one, other = [written((3,)) for _ in range(9)], [written((3,)) for _ in range(9)]
    for write_only in (False, True):
        addresses_of(one, None, HOST, write_only=write_only)
        ask_python(other, None, write_only=write_only)
        assert [x.modification_count for x in one] == [x.modification_count for x in other]


class Library:
    """nnabla's library with some symbols replaced."""

    def __init__(self, **replaced: str) -> None:
        self._real, self._replaced = addresses.nnabla_library(), replaced

    def __getitem__(self, symbol: str) -> Any:
        for part, other in self._replaced.items():
            if part in symbol:
                symbol = other
        return self._real[symbol]


def test_a_symbol_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(data_ptr="_ZN4nbla7NdArray12data_pointerEv")
    monkeypatch.setattr(addresses, "nnabla_library", lambda: library)
    with pytest.raises(ImportError, match="no symbol .*data_pointer"):
        DirectAddresses()


def test_contexts_that_are_not_pythons_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Both strings stay empty.
    library = Library(assign="_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE5clearEv")
    monkeypatch.setattr(addresses, "nnabla_library", lambda: library)
    with pytest.raises(ImportError, match="other contexts"):
        DirectAddresses()


def test_an_address_that_is_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = DirectAddresses.of

    def off(self: DirectAddresses, arrays: Arrays, halves: Any, *, write_only: bool) -> Any:
        return exact(self, arrays, halves, write_only=write_only) + 8 * write_only

    monkeypatch.setattr(DirectAddresses, "of", off)
    with pytest.raises(ImportError, match="other addresses"):
        DirectAddresses()


def off_by_a_word(self: DirectAddresses, arrays: Arrays, halves: Any, *, write_only: bool) -> Any:
    return np.array([x.data_ptr(x.dtype, HOST, write_only) + 8 for x in arrays])


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"data_ptr": "_ZN4nbla7NdArray12data_pointerEv"}, "no symbol"),
        # A method of the same arguments, which returns the C++ object of the memory.
        ({"data_ptr": "_ZN4nbla7NdArray4castENS_6dtypesERKNS_7ContextEb"}, "other addresses"),
        # The strings of a context are not where its constructor reads them.
        ({"assign": "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE5clearEv"}, "other contexts"),
        (None, "other addresses"),
    ],
    ids=["no symbol", "wrong symbol", "layout", "address"],
)
def test_python_serves_where_nnabla_is_not_as_expected_and_doctor_says_so(
    broken: Optional[Dict[str, str]], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken is None:
        monkeypatch.setattr(DirectAddresses, "of", off_by_a_word)
    else:
        library = Library(**broken)
        monkeypatch.setattr(addresses, "nnabla_library", lambda: library)
    direct_addresses.cache_clear()
    try:
        arrays = [written((3,)) for _ in range(20)]
        assert direct_addresses() is None
        assert list(addresses_of(arrays, None, HOST)) == ask_python(arrays, None)
        assert array_addresses().startswith("one by one through Python, which takes longer: nnabla's library")
        assert reason in array_addresses()
    finally:
        direct_addresses.cache_clear()


def test_trainings_are_the_same_either_way() -> None:
    """Here in processes of their own, as kernels are bound once."""
    program = """
import hashlib, sys
import nnabla as nn, numpy as np
import nnabla.functions as F, nnabla.parametric_functions as PF, nnabla.solvers as S
from nnabla_adaloss import AdaptiveLossScalingUpdater
from nnabla_adaloss.kernels import addresses
if sys.argv[1] == "python":
    addresses.direct_addresses = lambda: None
x, rng = nn.Variable((4, 8)), np.random.RandomState(0)
h = x
for i in range(10):
    h = F.tanh(PF.affine(h, 8, name=f"a{i}", rng=rng))
loss, solver = F.mean(h**2), S.Adam()
solver.set_parameters(nn.get_parameters())
feed = lambda: setattr(x, "d", rng.randn(4, 8))
updater = AdaptiveLossScalingUpdater(solver, loss, feed, storage="float16")
for _ in range(12):
    updater.update()
print(hashlib.sha256(b"".join(p.d.tobytes() for p in nn.get_parameters().values())).hexdigest())
"""
    found = {
        subprocess.run([sys.executable, "-c", program, way], capture_output=True, check=True).stdout.split()[
            -1
        ]
        for way in ("python", "c")
    }
    assert len(found) == 1
