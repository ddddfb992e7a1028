# SPDX-License-Identifier: Apache-2.0
"""What objects know at a moment, to go back to when an iteration is broken off."""

from __future__ import annotations

from typing import Any, Dict, List, Protocol, Sequence


class Undoable(Protocol):
    """An object that an iteration changes."""

    @property
    def undone(self) -> Sequence[str]:
        """The attributes that are brought back.

        Their values are replaced, never changed, so that to keep them costs nothing.
        """


class Savepoint:
    """The present attributes of objects.

    Args:
        objects: the objects.

    Example:
        >>> class Count:
        ...     undone = ("value",)
        ...     value = 0
        >>> count = Count()
        >>> count.value = 1
        >>> before = Savepoint([count])
        >>> count.value = 2
        >>> before.restore()
        >>> count.value
        1
    """

    def __init__(self, objects: Sequence[Undoable]) -> None:
        self._objects = objects
        # To copy all attributes takes less time than to pick some.
        self._saved: List[Dict[str, Any]] = list(map(dict, map(vars, objects)))

    def restore(self) -> None:
        """Bring the attributes back; it may be called again after it was interrupted."""
        for one, saved in zip(self._objects, self._saved):
            vars(one).update({name: saved[name] for name in one.undone})
