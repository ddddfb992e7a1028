# SPDX-License-Identifier: Apache-2.0
"""Adaptive loss scaling for NNabla: a loss scale for each part of the network (component).

All public names are here; `__init__.pyi` lists them. A name is imported at its first use, so that parts
without nnabla (`nnabla_adaloss.core`, the doctor) work if it is missing.
"""

from __future__ import annotations

from typing import List

import lazy_loader

from .cuda_libraries import preload_cuda_libraries

__version__ = "0.2.0.dev0"

# nnabla's GPU extension finds the libraries of NVIDIA's wheels only if they are loaded before it.
preload_cuda_libraries()

__getattr__, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]


def __dir__() -> List[str]:
    return sorted(__all__)
