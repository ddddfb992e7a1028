# SPDX-License-Identifier: Apache-2.0
"""Who else wants to be called while backward runs."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from ..graph.hooks import Hook


class Onlookers(NamedTuple):
    """Who is called around the functions of a backward pass, besides the engine.

    Attributes:
        callbacks: nnabla's communicator callbacks, called after each function.
        pre_hook: the user's own, called before each function.
        post_hook: the user's own, called after each function.
    """

    callbacks: Optional[Any] = None
    pre_hook: Optional[Hook] = None
    post_hook: Optional[Hook] = None

    @property
    def present(self) -> bool:
        """Whether there is anybody."""
        return self != NOBODY

    @property
    def take_gradients(self) -> bool:
        """Whether somebody takes parameter gradients right after the function that writes them."""
        return self.callbacks is not None or self.post_hook is not None


NOBODY = Onlookers()
