# SPDX-License-Identifier: Apache-2.0
"""Settings of adaptive loss scaling, `AdaLossConfig`: names, defaults, checks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import AbstractSet, Any, List, Optional, Sequence, Union

from .formats import FLOAT16, FORMATS, DTypeLike, Format, get_format
from .layer_selection import LayerSelection
from .methods import METHODS, AmaxHistory, Method, MethodLike, Range, parameter_names, resolve_method
from .precision import Precision
from .validation import boolean, explains_keywords, integer, positive_integer, positive_number, strings

# Settings that "amax_history" does not use, although other methods do.
_OF_PUBLISHED_METHODS = "n_uf_threshold", "scale_upper_bound", "accum_upper_bound", "use_bound"


@dataclass(frozen=True)
class AdaLossConfig:
    """Configuration of adaptive loss scaling (Zhao et al. 2019, arXiv 1910.12385).

    Immutable and validated when made; `dataclasses.replace(config, ...)` makes a changed copy.

    Attributes:
        loss_scale_method: how a layer's scale (alpha) is computed. A built-in name (`"approx_range"`,
            `"amax_history"`, `"abs_range"`, `"element_wise_range"`, `"fixed"`), or `"package.module:name"`
            (which type checkers refuse: give them the object itself), or a `Method`, or a function `f(g, W,
            *, config, fan_in) -> float` of NumPy arrays (`W` may be None). `"approx_range"` assumes normal
            distributions (section 3.3 of the paper). `"amax_history"` gives each part of the network
            (component) the largest scale that its gradients allow. None: `"amax_history"` in a network;
            `"approx_range"` for a single layer.
        fixed_loss_scale: the scale of every layer when the method is `"fixed"`.
        init_scale: additional factor of the loss gradient, besides the global loss scale.
        n_uf_threshold: for `"approx_range"`: p, accepted share of elements that underflow, in (0, 1).
        u_min: smallest magnitude to keep from underflow. None: taken from `dtype` (6e-8 for float16).
        u_max: largest magnitude to keep from overflow. None: largest number of `dtype` (65504 for float16).
        dtype: the format that gradients are stored in: the name of one, a dtype of NumPy's, or a `Format`.
            None: that of the storage (`storage=`, or a half context; a conflict is an error), else float16.
        update_per_n_iteration: number of iterations after which a layer's scale is recomputed.
        measure_every: scales are chosen in one of this many iterations (or of `update_per_n_iteration`, if
            that is more), and reused in between. With `delay=1` each iteration measures another slice of the
            arrays, and keeps the gradients of that slice until its backward ends: more iterations, less
            memory. An overflow is detected in every iteration, and causes a new measurement of everything.
            Default 8: underflow in float16 is as with 1, and more save little time
            (benchmarks/results/measuring.md).
        scale_upper_bound: largest scale of one layer, for all methods except `"amax_history"`.
        accum_upper_bound: largest product of scales from the loss to a layer, likewise; both as published.
        use_bound: True if the two upper bounds apply. Measurements limit scales in any case.
        power_of_two: round scales down to powers of two, so that scaling never rounds a gradient.
        max_rescue_ratio: for `"element_wise_range"`: share of the products, largest first, to keep from
            underflow; in (0, 1]. None: all of them, so that one tiny product determines the scale.
        include: names of the layers to scale, as `fnmatch` patterns, each of which must match a layer.
        exclude: names of layers not to scale, likewise; wins over `include`.
        delay: 1 computes scales from the statistics of earlier iterations, before backward starts: no hooks,
            and no synchronization with a device. 0 computes them from those of the same iteration, as the
            paper does. None: 1, or 0 for a method that needs arrays.

    Raises:
        TypeError: an argument is of the wrong type; a boolean is not a number.
        ValueError: an argument is out of range, or the method or dtype is unknown.

    Example:
        >>> from nnabla_adaloss import AdaLossConfig
        >>> AdaLossConfig(n_uf_threshold=1e-4, scale_upper_bound=128.0).range
        Range(u_min=6e-08, u_max=65504.0)
    """

    loss_scale_method: Optional[MethodLike] = None
    fixed_loss_scale: float = 1.0
    init_scale: float = 1.0
    n_uf_threshold: float = 1e-3
    u_min: Optional[float] = None
    u_max: Optional[float] = None
    dtype: Optional[Union[DTypeLike, Format]] = None
    update_per_n_iteration: int = 1
    scale_upper_bound: float = 16.0
    accum_upper_bound: float = 1024.0
    use_bound: bool = True
    power_of_two: bool = True
    max_rescue_ratio: Optional[float] = None
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    delay: Optional[int] = None
    measure_every: int = 8

    def __post_init__(self) -> None:
        positive = "fixed_loss_scale", "init_scale", "scale_upper_bound", "accum_upper_bound"
        given = [name for name in ("u_min", "u_max") if getattr(self, name) is not None]
        for name in (*positive, *given):
            self._set(name, positive_number(name, getattr(self, name)))
        if self.dtype is not None and not isinstance(self.dtype, Format):
            self._set("dtype", get_format(self.dtype, argument="dtype").name)
        u_min, u_max = self.range
        if u_min >= u_max:
            raise ValueError(
                f"u_min={u_min!r} must be smaller than u_max={u_max!r} (None takes either from dtype)"
            )
        for name in ("use_bound", "power_of_two"):
            self._set(name, boolean(name, getattr(self, name)))
        for name in ("update_per_n_iteration", "measure_every"):
            positive_integer(name, getattr(self, name))
        if self.delay is not None and integer("delay", self.delay) not in (0, 1):
            raise ValueError(f"delay={self.delay!r} must be 0, 1 or None")
        for name in ("include", "exclude"):
            self._set(name, strings(name, getattr(self, name), "patterns of layer names"))
        # Methods check their own parameters: a wrong value is refused even if another method is in use.
        for name in METHODS:
            resolve_method(name, self)
        resolve_method(self.method)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @cached_property
    def method(self) -> Method:
        """`loss_scale_method` with its parameters; for None, the method of layers that are scaled by hand."""
        method = self.loss_scale_method
        return resolve_method("approx_range" if method is None else method, self)

    @cached_property
    def range(self) -> Range:
        """(u_min, u_max), with None replaced by values of `dtype`."""
        return self.range_in(FLOAT16 if self.dtype is None else get_format(self.dtype))

    def range_in(self, stored: Format) -> Range:
        """(u_min, u_max) of gradients that are stored in a format, unless given here."""
        u_min = stored.u_min if self.u_min is None else self.u_min
        return Range(u_min, stored.max if self.u_max is None else self.u_max)

    @property
    def iterations_per_measurement(self) -> int:
        """Number of iterations in which every array is measured once, and scales are chosen once."""
        return max(self.measure_every, self.update_per_n_iteration)

    @property
    def selection(self) -> LayerSelection:
        """`include` and `exclude`."""
        return LayerSelection(tuple(self.include), tuple(self.exclude))

    @property
    def changed_without_effect(self) -> List[str]:
        """Names of changed settings that the default method ignores; empty if a method was named."""
        if self.loss_scale_method is not None:
            return []
        return [name for name in _OF_PUBLISHED_METHODS if getattr(self, name) != getattr(AdaLossConfig, name)]

    @property
    def unused_by_method(self) -> AbstractSet[str]:
        """Names of all settings that the method does not use, changed or not: recordings leave them out."""
        used = parameter_names(self.method)
        if "config" in used:
            return frozenset()  # a user's function, which may read any setting
        parameters = {name for method in METHODS.values() for name in parameter_names(method)}
        published = _OF_PUBLISHED_METHODS if isinstance(self.method, AmaxHistory) else ()
        return {*parameters.difference(used), *published}

    def for_network(self) -> AdaLossConfig:
        """Configuration for the gradients of a network: with `loss_scale_method` filled in."""
        return replace(self, loss_scale_method="amax_history") if self.loss_scale_method is None else self

    def for_storage(self, precision: Optional[Precision]) -> AdaLossConfig:
        """Fill in `dtype` from a storage, float16 for None (unknown); ValueError if a given one differs."""
        # Formats that differ only in saturating have one range, and scales depend on nothing else.
        stored = FLOAT16 if precision is None else precision.stored_gradients.saturating(False)
        if self.dtype is None:
            # Saved states have names. A user's own "float16" with other numbers would be lost as a name.
            dtype: Any = stored.name if FORMATS.get(stored.name) == stored else stored
            return replace(self, dtype=dtype)
        own = get_format(self.dtype)
        if precision is not None and own.saturating(False) != stored:
            raise ValueError(
                f"config has dtype={own.name!r}, but storage keeps gradients in {stored.name}: "
                "leave dtype out (u_min and u_max set a range of your own)"
            )
        return self


_REMOVED_ARGUMENTS = {
    "planned_bytes": "scaled copies of weights take as much memory as they need; leave it out",
    "recorder": "give the updater or scaler monitors=[...] with an object that has on_layer_scaled(event): "
    "event.record is the LayerRecord",
    "debug_level": "give the updater or scaler monitors=[LogMonitor(level)]",
}
AdaLossConfig.__init__ = explains_keywords(_REMOVED_ARGUMENTS)(AdaLossConfig.__init__)  # type: ignore[method-assign]
