# SPDX-License-Identifier: Apache-2.0
"""Arguments of updaters as attributes: checked, or refused, when they are assigned."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Callable, Dict, List, Literal, Optional, Tuple, Union

from ..core.scale_history import HistoryPolicy
from ..core.scale_policy import ScalePolicy
from ..core.validation import choice
from ..graph.hooks import Hook

HookLike = Union[Hook, Tuple[Optional[Hook], Optional[Hook]], None]
"""Hook for forward and backward, or one for each, or none."""

GlobalScaleName = Literal["history", "dynamic"]
"""Names that `global_scale=` takes."""

OnOverflow = Literal["repeat", "next"]
"""Policy for a batch that overflows."""

Policy = Literal["raise", "skip", "warn"]
"""Policy for a batch that no loss scale can rescue."""

POLICY_FIELDS = {field.name for field in dataclasses.fields(ScalePolicy)}
"""Arguments that are fields of the `ScalePolicy` of S0."""


def keep_data() -> None:
    """Default data feeder: leaves the input variables unchanged."""


def history_of(global_scale: Any, start_scale: float, min_scale: float) -> Optional[HistoryPolicy]:
    """Make the policy of measured scales for an argument `global_scale`; None for `"dynamic"`."""
    if isinstance(global_scale, HistoryPolicy):
        return global_scale
    name = choice("global_scale", global_scale, GlobalScaleName, ", or a HistoryPolicy")
    return HistoryPolicy(start_scale=start_scale, min_scale=min_scale) if name == "history" else None


def hooks_by_pass(pre: Any, post: Any) -> List[Dict[str, Any]]:
    """Keyword arguments of forward, and of backward, for hooks; TypeError unless each is a `HookLike`."""
    pairs = {}
    for name, value in (("function_pre_hook", pre), ("function_post_hook", post)):
        pairs[name] = pair = value if isinstance(value, tuple) else (value, value)
        if len(pair) != 2 or not all(hook is None or callable(hook) for hook in pair):
            raise TypeError(
                f"{name} must be a callable, a pair (for forward, for backward) or None; got {value!r}"
            )
    return [{name: pair[index] for name, pair in pairs.items()} for index in (0, 1)]


class Setting:
    """Argument of an updater as an attribute, checked when it is assigned."""

    # It has no `__get__`: Python reads the value from the instance, at no cost.
    def __init__(
        self,
        check: Callable[[str, Any], Any] = lambda name, value: value,  # returns the value to keep, or raises
        fixed: Union[bool, str] = False,  # True: refuse another value; a name: if that setting is not None
        saved: bool = False,  # states contain it, and load only if it is equal
        reported: bool = True,  # monitors receive it
    ) -> None:
        self._check, self.fixed, self.saved, self.reported = check, fixed, saved, reported

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, updater: Any, value: Any) -> None:
        """Check and assign a value; AttributeError if another one is refused."""
        # The first assignment, by `__init__`, is never refused.
        name, values = self._name, vars(updater)
        if name in values and (
            self.fixed is True
            or (self.fixed and values.get(self.fixed) is not None and value != values[name])
        ):
            raise AttributeError(
                f"{name} cannot be changed after the updater was made: make another updater; a saved state "
                "can be loaded into it if its other settings are the same"
            )
        checked = self._check(name, value)
        if name in POLICY_FIELDS:
            updater._s0.change(**{name: checked})
        values[name] = checked


policy: Any = partial(Setting, partial(choice, words=Policy))
"""Makes the setting of a `Policy`, whose type a checker sees."""
