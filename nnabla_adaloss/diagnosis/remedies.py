# SPDX-License-Identifier: Apache-2.0
"""Remedies for faults that no loss scale can fix, by cause and function."""

from __future__ import annotations

from typing import Any, Iterator

# Remedies where the gradient ends.
DEAD = "normalise what it reads, or use F.leaky_relu"
ABOVE_ZERO = "start it above 0, or leave the function out"
DROPOUT = "lower p: it is the share dropped"
ZERO_FACTOR = "use another factor, or leave this part out"
FACTORS = "keep the factors away from 0, such as by F.maximum_scalar(x, 2**-14)"
DIFFERENT = "check that they come from different data, parameters or axes"
CHECK_MASK = "check the mask: it leaves nothing to choose from"
CHECK_MASK_AND_LABELS = "check the mask, which may be inverted, and the labels"
SMALLER_MARGIN = "make its epsilon smaller than the errors, or the targets larger"
MARGIN = "use harder samples, or a larger margin"
SMALL_FACTORS = "take factors out, and multiply the learning rate by them instead"
INITIALISE = "initialise them randomly"
ONE_FACTOR = "initialise one of the two randomly"
WHY_ZERO = "check why that is 0"
FILL = "fill it, or give a feeder that does"
FILL_TARGET = f"{FILL}; if another graph computes it, run that one's forward in the feeder, or use F.unlink"
ZEROS = "check that the feeder fills it, and that no division of integers makes it 0"
TRAIN = "make it trainable, or start it from another number"
SMALLER_BIAS = "start the bias nearer 0"
SMALLER_CONSTANT = "use a constant nearer 0"
SMALLER_FACTOR = "use a smaller factor there"
SMALLER_START = "start it nearer 0, or normalise behind it"
SOFTMAX_AXIS = "choose the axis of the places that it weighs; for a single class, use a sigmoid"
SMALLER_EPS = "use a smaller eps, such as 1e-5"
GAMMA = "start it from 1"
CONSTANT_INPUT = "check what it reads; feed larger batches or maps"
SINGLE_NUMBERS = "normalise more numbers together: over the batch or all channels, or larger maps"
SATURATED = "make what it reads smaller, by a normalization or a factor before it"
STEP = "use a smaller step between rounded numbers (delta), or larger numbers"
BOUND = "shift or widen the bound, or what it reads"
NOT_CHOSEN = "use what is left out there, or leave these layers out"
CROSS_ENTROPY = "it counts errors, which has no derivative: train on a cross entropy of the scores"
INDICES = "check the indices, and the size of the table"
LABELS = "check the labels"
COUNT_FROM_0 = "count from 0, and check the number of classes, or the size of the table"
SELF = "leave out places that are equal, such as a sample compared with itself"
NO_GRADIENT = "check whether it masks everything or has no derivative"
PADDING = "leave padding and masked places out: fill them with -1e3 before a maximum, 1e3 before a minimum"
NO_DERIVATIVE = "use a function with a derivative, such as a factor of the scores, or a straight-through one"
NO_BACKWARD = f"for a condition or an index, set need_grad=False on it; else {NO_DERIVATIVE}"
SCORES_FIRST = "give it the scores first and the labels second; unlink labels that are computed"
NOT_CONSTANT = "check what the loss computes of it, which is constant"
UNLINK_TARGET = f"{NOT_CONSTANT}: unlink a target that is computed of the prediction"
MEAN_OF_SOFTMAX = f"{NOT_CONSTANT}, as a mean over all classes of a softmax is"
MEAN_OF_NORMALIZED = f"{NOT_CONSTANT}, as a mean of normalised numbers is: put an activation before the mean"
NOTHING_LEFT = "leave it out, or change what it adds up or subtracts, which is 0 except for rounding errors"
CANCELS = "leave it out, or let it differ along the axis over which numbers are compared"
EPSILON = "make eps smaller, or the loss larger"
LEARNING_RATE = "use a larger learning rate: with a loss weight, divide it by that"
RATE = "set it above 0; if the loop sets it, do that before this examination"
SETTINGS = "check its settings, such as beta1, beta2 or decay, which must be below 1"
SMALLER_STEPS = "use a smaller learning rate"
LARGER_GRADIENTS = "make them larger: multiply the loss, or start from larger weights"
SMALLER_LOSS = "make the loss smaller: add up means, and look for what makes it so large"
DECAY = "check its weight decay (wd), and its learning rate"
UNWEIGHTED = "no weight is the reason: multiply by less, such as a smaller time step, or normalise in between"
ALIKE = "bring the loss weights of their outputs nearer, or give them a layer of their own"
LARGER_STEPS = "use a larger learning rate"
PROPORTIONAL = "start from other numbers than 0: steps are in proportion to them"
LARGER_SHARE = "use a larger learning rate or coefficient: steps are that share of the weights"
LARGER_FACTOR = "use a larger factor there"
SCHEDULE = "call a schedule of epochs once per epoch"
LARGER_NUMBERS = "make the numbers that it reads larger: look for the function that makes them small"
LARGER_LOSS = "make the loss larger: a smaller epsilon makes this solver's first steps smaller"
CLIP_LESS = "clip at a larger norm, or divide by less"
CLIP_NORM = "clip at a number above 0"
CHECK_DIVISION = "check what it divides by"
CHECK_SLICES = "check the slices behind it"
NO_UNIT = "unless other batches reach them, check what reads them, or leave them out"
UNCUT = "use the variable itself there: no unlinking, and need_grad=True"
CUT_COPY = "set need_grad=False on a copy by F.identity, for the reader that shall pass no gradient on"
_LOSS_OF_CODES = "a loss of their own, such as F.mean(F.squared_error(codes, F.unlink(x)))"
STRAIGHT = f"a straight-through estimator stops it there on purpose: train them by {_LOSS_OF_CODES}"
FORWARD = "link it, or run its forward in the feeder"
OTHERS = "the graph has other parameters: give the solver those that it was built with"
NOT_DERIVED = "a derivative by nn.grad may be a constant: that of a ReLU by its input, taken twice, is 0"
USE = "link it to the loss: look for an unlinked variable, need_grad=False or an unused output"

# Remedies for numbers that are not finite, or differ from fp32.
CLEAN = "clean the data, or leave such samples out"
FEED_INDICES = "compute them in the feeder, and feed them as an input: inputs of indices stay fp32"
IN_FEEDER = "compute it in the feeder, and feed the result"
WHOLE_NUMBERS = "feed whole numbers"
RESTORE = "restore earlier weights"
REPAIR = "repair it where it is computed or loaded: no training changes it"
FLOAT_TAIL = "train with that and its storage, or use a factor nearer 1"
MULTIPLY_FIRST = "multiply what {} reads by a constant first"
INTO_RANGE = "bring it into range, or use a wider format"
MASK = "mask with a finite number that the format holds, such as -1e3"
CONSTANT = "choose a constant that the format holds"
OPEN_ROWS = "leave one place per row open, and mask with a number that the format holds, such as -1e3"
PRODUCT = "divide an operand before the product, not the result after it"
SMALLER = "make its weights or what it reads smaller, normalise, or use a wider format"
SMALL_TERMS = "keep small terms apart from large ones, or compute it in fp32"
LARGER = "start it from a number that the format holds, or store this layer in a wider format"
STATISTICS = "run batches with batch_stat=True first, or load the statistics of a training"
TOO_SMALL = "bring them into range: fold constant factors into one, divide later, or multiply the mean"
SCALE_DATA = "multiply the data by a constant before they are fed"
NO_UNITS = f"{SCALE_DATA}, and leave out the factors that convert such units, in {{}}"
LOGARITHMS = "add up logarithms instead of multiplying"
CHAIN = f"{LOGARITHMS}, or normalise after each product"
VANISHING = "start from larger weights, such as Glorot's, or normalise between layers"
ROOM = "normalise, or start from smaller weights, so that training does not push them beyond it"
EXPLODING = "start from smaller weights or normalise between layers"
EXP_OF_LESS = "bring what it reads nearer to 0, such as by a larger bandwidth, or go on with its logarithm"
MORE_BITS = "use a format with more bits there"
PERIOD = "subtract whole periods in the feeder, or before what it reads is stored"
DIFFERENCE = "take the difference before numbers become large (subtract the mean first), or in fp32"
LARGER_STEP = "use a larger step between the two, or the derivative itself, by nn.grad"
VARIANCE = "compute a variance as F.mean((x - F.mean(x)) ** 2), which no rounding makes negative"
SUBTRACT_MEAN = "subtract the mean before the data are fed: rounding loses a variance far below the mean"
ABOVE = "keep it above 0, such as by F.maximum_scalar(x, 2**-14)"
ABSOLUTE = "take its absolute value first, by F.abs"
AWAY = "keep it away from 0 by a number that the format holds, such as 2**-14"
ZERO_DATA = f"leave such samples out, or {AWAY}"
HELD = "use a larger constant, such as 2**-14"
_OR_LOG = "; for a softmax or sigmoid, use F.log_softmax or F.sigmoid_cross_entropy"
_LOG_OF_TANH = "log(1 - F.tanh(x) ** 2) is 2 * (log(2) - x - F.softplus(-2 * x))"
LOG_OF_DIFFERENCE = f"compute it from the scores: log(1 - F.sigmoid(x)) is -F.softplus(x), and {_LOG_OF_TANH}"
ONE_MINUS_EXP = "with t = F.tanh(x / 2), 1 - F.exp(-x) is 2 * t / (1 + t), which is exact for small x"
ARCTANGENT = "keep its two inputs from being 0 together, such as by adding 2**-14 to the second"
SOFTPLUS = "use F.softplus, which is exact for large numbers"
CHOOSE_BEFORE = "choose before it, not after: F.log(F.where(condition, x, one))"
LARGER_UNITS = "use larger units, so that {} computes numbers that the format holds"
UNITS = "use units in which its factor is near 1"
NO_FACTOR = "Leave the factor out, as the updater scales the loss"
LOG, HELD_IN_LOG = AWAY + _OR_LOG, HELD + _OR_LOG
ABOVE_ONE = "keep what it reads above 1, such as by F.maximum_scalar(x, 1.002)"
IDENTITY = "add a multiple of the identity matrix to what it reads"
OF_SCORES = "use F.{0}_cross_entropy of the scores, without a {0} before it"
INSIDE_ROOT = "add a number inside the root: (F.sum(x ** 2) + 2**-14) ** 0.5"
BELOW_ONE = "clip what it reads below 1 and above -1, such as by F.clip_by_value(x, -0.999, 0.999)"
BOUND_EXP = "bound what it reads, such as by F.minimum_scalar(x, 10.0)"
BOUND_FACTOR = "bound what it reads, such as by F.tanh(x): products with it must fit, too"
SOFTMAX = "use F.softmax, which subtracts the largest number first"
LOG_SOFTMAX = "subtract the maximum first, as F.log_softmax does"
NORMALISE_DATA = "normalise the data"
MEAN_LOSS = "Add up means rather than sums"
SHIFTS = (SMALLER_BIAS, SMALLER_CONSTANT, NORMALISE_DATA)  # remedies for a shift of all numbers

# Remedies by function: for results that are too large, and for others that are not finite.
_TOO_LARGE = {
    **dict.fromkeys(("Div2", "RDivScalar", "Pow2"), AWAY),
    "Sum": "use F.mean, or sum less at a time",
    "ScatterAdd": "divide what it adds up by its number first, as a mean does",
    **dict.fromkeys(("BatchInv", "BatchLogdet"), IDENTITY),
    "Constant": CONSTANT,
}
_UNDEFINED = {
    **_TOO_LARGE,
    **dict.fromkeys(("ACos", "ASin", "ATanh"), BELOW_ONE),
    "ACosh": ABOVE_ONE,
    "ATan2": ARCTANGENT,
    "Log": LOG,
    "Norm": INSIDE_ROOT,
    "NormNormalization": AWAY,
}
# Remedies for results of large numbers, if no operand is known that makes these large.
_SIZES = {"Exp": f"subtract the maximum, or {BOUND_EXP}", "BatchMatmul": PRODUCT}
# Remedies for results with a large rounding error.
_IMPRECISE = {
    "KLMultinomial": "apply F.softmax to the scores first",
    **dict.fromkeys(("Sin", "Cos"), PERIOD),
    "BinaryCrossEntropy": OF_SCORES.format("sigmoid"),
    "CategoricalCrossEntropy": OF_SCORES.format("softmax"),
}
# Functions that pass numbers on, or shift or scale them all alike.
_PASSING = ("AddScalar", "MulScalar", "MaximumScalar", "Reshape", "Broadcast", "BroadcastTo")


def of(f: Any, known: str = "", *, too_large: bool = False) -> str:
    """Remedy for a function whose output or gradient is not finite; `known`: that of an operand."""
    kind, readers = f.info.type_name, [*_readers(f)]
    if kind == "Exp":
        if any(is_a(g, "Log") for g in readers):
            return SOFTPLUS
        # A softmax by hand may multiply by a mask before the sum, which leaves out the sample itself.
        masked = (h for g in readers if is_a(g, "Mul2") for h in _readers(g))
        sums = (g for g in (*readers, *masked) if is_a(g, "Sum"))
        behind = {h.info.type_name for g in sums for h in _readers(g)}
        if not behind.isdisjoint(("Div2", "Log")):
            return SOFTMAX if "Div2" in behind else LOG_SOFTMAX
        if not f.inputs[0].need_grad:
            return EXP_OF_LESS
        if known in ("", EXPLODING) and any(is_a(g, "Mul2") for g in readers):
            return BOUND_FACTOR
    factors = (g for v in f.outputs for g in v.function_references if is_a(g, "MulScalar"))
    if kind == "BatchMatmul" and any(abs(g.info.args["val"]) < 1.0 for g in factors):
        return PRODUCT
    if kind == "Div2":
        divisor = origin(f.inputs[1])
        if _adds_exponentials(f.inputs[1]) and not too_large:
            return SOFTMAX
        if is_a(divisor, "Norm") or (is_a(divisor, "PowScalar") and 0.0 < divisor.info.args["val"] < 1.0):
            return INSIDE_ROOT
    if kind == "Log" and any(is_a(g, "Where") for g in readers):
        return CHOOSE_BEFORE
    if kind == "Log" and _adds_exponentials(f.inputs[0]):
        return LOG_SOFTMAX
    if kind == "Sub2":
        first, second = (v.parent for v in f.inputs)
        is_variance = is_a(first, "Mean", "Sum") and is_a(second, "PowScalar", "Mul2", "Square")
        return VARIANCE if is_variance else DIFFERENCE
    if kind == "MulScalar" and abs(f.info.args["val"]) < 1.0:
        return "multiply by the factor before numbers become large"
    if kind.endswith("Normalization") and kind != "NormNormalization" and not too_large:
        return SUBTRACT_MEAN
    if kind == "PowScalar" and f.info.args["val"] < (0.0 if too_large else 1.0):
        return AWAY
    return (_TOO_LARGE if too_large else _UNDEFINED).get(kind) or known or _SIZES.get(kind, SMALLER)


def held(f: Any) -> str:
    """Remedy for a constant below its format that keeps the numbers that a function reads from 0."""
    if f.info.type_name != "Log":
        return HELD
    return LOG_SOFTMAX if _adds_exponentials(f.inputs[0]) else HELD_IN_LOG


def of_difference(f: Any) -> str:
    """Remedy for a difference that is far smaller than its operands."""
    if is_a(f, "RSubScalar") and is_a(origin(f.inputs[0]), "Exp"):
        return ONE_MINUS_EXP
    remedy = of(f) if is_a(f, "Sub2") else DIFFERENCE
    return LOG_OF_DIFFERENCE if remedy == DIFFERENCE and any(is_a(g, "Log") for g in _readers(f)) else remedy


def of_errors(f: Any, known: str = "") -> str:
    """Remedy for a function whose output has a large rounding error; `known`: that of what it reads."""
    return _IMPRECISE.get(f.info.type_name, known or MORE_BITS)


def _adds_exponentials(v: Any) -> bool:
    f = origin(v)
    return is_a(f, "Sum", "Mean") and is_a(origin(f.inputs[0]), "Exp")


def source(v: Any, *passing: str) -> Any:
    """Variable that another comes from through functions of these types."""
    while is_a(v.parent, *passing):
        v = v.parent.inputs[0]
    return v


def origin(v: Any) -> Any:
    """Function that a variable comes from through functions that pass it on; None for a leaf."""
    return source(v, *_PASSING).parent


def is_a(f: Any, *type_names: str) -> bool:
    """True for a function of one of these types."""
    return f is not None and f.info.type_name in type_names


def is_square(f: Any) -> bool:
    """True for a function that multiplies numbers by themselves."""
    is_itself = is_a(f, "Mul2") and f.inputs[0] == f.inputs[1]
    return is_itself or is_a(f, "SquaredError") or (is_a(f, "PowScalar") and f.info.args["val"] > 1.0)


def _readers(f: Any) -> Iterator[Any]:
    """Readers of a function's outputs, past functions that only shift or reshape them."""
    for v in f.outputs:
        for g in v.function_references:
            yield from _readers(g) if is_a(g, *_PASSING) else [g]
