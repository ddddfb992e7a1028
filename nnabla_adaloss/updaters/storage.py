# SPDX-License-Identifier: Apache-2.0
"""What `storage=` of an updater means."""

from __future__ import annotations

from typing import Optional

import nnabla as nn

from ..core.precision import StorageLike
from ..emulation.format_emulation import FormatEmulation
from ..graph.loss_like import LossLike


def with_storage(loss: LossLike, storage: Optional[StorageLike]) -> LossLike:
    """`loss`, emulating `storage` unless that is None.

    Raises:
        TypeError: `storage` is given for a loss that is wrapped already.
        ValueError: the format is unknown, or `loss` is computed in a half context.
    """
    if storage is None:
        return loss
    if not isinstance(loss, nn.Variable):
        raise TypeError(
            f"storage={storage!r} emulates a format around a Variable, but loss is a {type(loss).__name__}; "
            "leave storage out"
        )
    return FormatEmulation(loss, storage)
