# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""The CPU kernels' loops, compiled by numba: they take addresses and hand back numbers.

Every loop walks its arrays in blocks that stay in the first-level cache. A block goes through a vectorized
fast path that assumes ordinary numbers; the largest magnitude found in it tells whether that was true, and a
block where it was not goes through a careful one. Float16 is widened by the processor's instructions where it
has them: on the fly for statistics, else into a float32 buffer.
Numbers are handled as bit patterns, whose unsigned order is the order of magnitudes: an integer maximum sees
infinities and NaNs, a floating point one may not.

The types are numba's to infer. All compiled code lives in this one file because numba's cache on disk notices
changes in a function's own file only.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from .compilation import compiled

# Elements per block. Starting a block costs a wait for memory, so long ones are faster; short ones stay in
# the cache while they are gone through twice, and keep float32 sums exact: these to 4e-6 in the worst case.
# Zeros of a block are counted in 16 bits.
BLOCK = 4096

# Sums may be taken in any order; NaNs and infinities stay real. `exact` says so aloud: a function that says
# nothing inherits the freedom of whichever caller happens to be compiled first, and (x + c) - c becomes x.
summing = numba.njit(fastmath={"reassoc", "nsz", "contract"})
exact = numba.njit(fastmath=False)

PEEK = 64  # how many elements of a block are looked at beforehand

SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
EXPONENT = np.uint32(0x7F800000)  # also the bit pattern of infinity
ZERO = np.uint32(0)
ONE = np.uint32(1)

# Between these a block's largest square and its sum of squares are far from float32's limits, so squares that
# underflow are too small to count beside it.
SAFE_TO_SQUARE_FROM = np.uint32((127 - 50) << 23)
SAFE_TO_SQUARE_TO = np.uint32((127 + 50) << 23)

HALF_MAGNITUDE = np.uint16(0x7FFF)
HALF_INFINITY = np.uint32(0x7C00)
HALF_SMALLEST_NORMAL = np.uint32(0x0400)
HALF_QUIET_NAN = np.uint32(0x7E00)
HALF_REBIAS = np.uint32((127 - 15) << 23)
HALF_SUBNORMAL = np.float32(2.0**-24)
FLOAT32_HALF_NORMAL = np.uint32((127 - 14) << 23)  # 2^-14
FLOAT32_HALF_OVERFLOW = np.uint32(
    0x477FF000
)  # 65520, halfway from the largest float16 to where the next would be
# In [0.5, 1) float32 numbers are multiples of 2^-24, float16's smallest subnormal.
HALF_ULP_BELOW_ONE = np.float32(0.5)


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@intrinsic
def _as_float(typing_context, bits):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


@intrinsic
def _as_bits(typing_context, value):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


# ---- float16 <-> float32, exact up and half to even down


def converts_halves() -> bool:
    """Whether numba compiles for a processor that converts float16 by itself (x86 since 2012)."""
    *_, features = cpu_target.target_context.codegen().magic_tuple()
    return {"+avx", "+f16c"} <= set(features.split(","))


if converts_halves():

    @intrinsic
    def _widened(typing_context, half):
        def generate(context, builder, signature, arguments):
            value = builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())
            return builder.bitcast(value, context.get_value_type(types.uint32))

        return types.uint32(types.uint16), generate

    @intrinsic
    def _narrowed(typing_context, bits):
        def generate(context, builder, signature, arguments):
            value = builder.fptrunc(builder.bitcast(arguments[0], ir.FloatType()), ir.HalfType())
            return builder.bitcast(value, context.get_value_type(types.uint16))

        return types.uint16(types.uint32), generate

else:

    @exact
    def _widened(half):
        magnitude = np.uint32(half & np.uint16(0x7FFF))
        shifted = np.uint32(np.uint32(magnitude << np.uint32(13)) + HALF_REBIAS)
        if magnitude >= HALF_INFINITY:
            shifted = np.uint32(shifted + HALF_REBIAS)
        if magnitude < HALF_SMALLEST_NORMAL:
            shifted = _as_bits(np.float32(np.float32(np.int32(magnitude)) * HALF_SUBNORMAL))
        return np.uint32(shifted | np.uint32(np.uint32(np.uint32(half) << np.uint32(16)) & SIGN))

    @exact
    def _narrowed(bits):
        magnitude = np.uint32(bits & MAGNITUDE)
        odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & ONE)
        rounded = np.uint32(np.uint32(magnitude - HALF_REBIAS) + np.uint32(np.uint32(0xFFF) + odd))
        half = np.uint32(rounded >> np.uint32(13))
        if magnitude < FLOAT32_HALF_NORMAL:
            subnormal = np.float32(_as_float(magnitude) + HALF_ULP_BELOW_ONE)
            half = np.uint32(_as_bits(subnormal) - _as_bits(HALF_ULP_BELOW_ONE))
        if magnitude >= FLOAT32_HALF_OVERFLOW:
            half = HALF_INFINITY
        if magnitude > EXPONENT:
            half = HALF_QUIET_NAN
        return np.uint16(half | np.uint32(np.uint32(bits & SIGN) >> np.uint32(16)))


@exact
def _widen(halves, bits):
    for i in range(halves.size):
        bits[i] = _widened(halves[i])


@exact
def _narrow(bits, halves):
    for i in range(bits.size):
        halves[i] = _narrowed(bits[i])


# ---- statistics: (sum, sum of squares, largest magnitude, 0 - smallest non-zero magnitude, zeros, nonfinite)


@summing
def _statistics_of_ordinary(bits):
    total, squares = np.float32(0), np.float32(0)
    largest, negated_smallest, zeros = ZERO, ZERO, ZERO
    for i in range(bits.size):
        value = _as_float(bits[i])
        magnitude = np.uint32(bits[i] & MAGNITUDE)
        largest = np.uint32(max(largest, magnitude))
        negated_smallest = np.uint32(max(negated_smallest, np.uint32(ZERO - magnitude)))  # zeros drop out
        zeros = np.uint32(zeros + np.uint32(magnitude == ZERO))
        total += value
        squares += value * value
    return total, squares, largest, negated_smallest, zeros


@summing
def _statistics_of_any(bits):
    total, squares = 0.0, 0.0
    largest, negated_smallest, zeros, nonfinite = ZERO, ZERO, 0, 0
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & MAGNITUDE)
        is_finite = magnitude < EXPONENT
        finite_magnitude = magnitude if is_finite else ZERO
        value = np.float64(_as_float(bits[i] if is_finite else ZERO))
        total += value
        squares += value * value
        largest = np.uint32(max(largest, finite_magnitude))
        negated_smallest = np.uint32(max(negated_smallest, np.uint32(ZERO - finite_magnitude)))
        zeros += magnitude == ZERO
        nonfinite += not is_finite
    return total, squares, largest, negated_smallest, zeros, nonfinite


@exact
def _largest(bits):
    largest = ZERO
    for i in range(bits.size):
        largest = np.uint32(max(largest, np.uint32(bits[i] & MAGNITUDE)))
    return largest


@exact
def _can_square(largest):
    return largest == ZERO or (SAFE_TO_SQUARE_FROM <= largest <= SAFE_TO_SQUARE_TO)


@exact
def _block_statistics(bits):
    if not _can_square(
        _largest(bits[:PEEK])
    ):  # squares that are subnormal cost a hundred times an ordinary one
        return _statistics_of_any(bits)
    total, squares, largest, negated_smallest, zeros = _statistics_of_ordinary(bits)
    if _can_square(largest):
        return np.float64(total), np.float64(squares), largest, negated_smallest, np.int64(zeros), 0
    return _statistics_of_any(bits)


@summing
def _statistics_of_ordinary_halves(halves):
    total, squares = np.float32(0), np.float32(0)
    largest, negated_smallest, zeros = np.uint16(0), np.uint16(0), np.uint16(0)
    for i in range(halves.size):
        magnitude = np.uint16(halves[i] & HALF_MAGNITUDE)
        value = _as_float(_widened(halves[i]))
        largest = np.uint16(max(largest, magnitude))
        negated_smallest = np.uint16(max(negated_smallest, np.uint16(np.uint16(0) - magnitude)))
        zeros = np.uint16(zeros + np.uint16(magnitude == np.uint16(0)))
        total += value
        squares += value * value
    return total, squares, largest, negated_smallest, zeros


@exact
def _block_statistics_of_halves(halves, buffer):
    total, squares, largest, negated_smallest, zeros = _statistics_of_ordinary_halves(halves)
    if largest >= HALF_INFINITY:
        block = buffer[: halves.size]
        _widen(halves, block)
        return _statistics_of_any(block)
    negated_smallest = np.uint32(ZERO - _widened(np.uint16(np.uint16(0) - negated_smallest)))
    return np.float64(total), np.float64(squares), _widened(largest), negated_smallest, np.int64(zeros), 0


@exact
def _magnitudes(largest, negated_smallest):
    smallest = np.uint32(ZERO - negated_smallest)
    return np.float64(_as_float(largest)), np.float64(_as_float(smallest))


@exact
def _count_exponents(bits, counts):
    for i in range(bits.size):
        counts[np.uint32(np.uint32(bits[i] & EXPONENT) >> np.uint32(23))] += 1


@compiled
def statistics(address, size, is_half, counts_address):
    """(sum, sum of squares, abs_max, abs_min, zeros, nonfinite).

    counts_address: 256 int64 to which the binary exponents are added, or 0.
    """
    halves = carray(_pointer(address), (size,), np.uint16)
    bits = carray(_pointer(address), (size,), np.uint32)
    counts = carray(_pointer(counts_address), (256,), np.int64)
    buffer = np.empty(BLOCK if is_half else 0, np.uint32)
    total, squares = 0.0, 0.0
    largest, negated_smallest, zeros, nonfinite = ZERO, ZERO, 0, 0
    for start in range(0, size, BLOCK):
        stop = min(start + BLOCK, size)
        if is_half:
            block_statistics = _block_statistics_of_halves(halves[start:stop], buffer)
        else:
            block_statistics = _block_statistics(bits[start:stop])
        total += block_statistics[0]
        squares += block_statistics[1]
        largest = max(largest, block_statistics[2])
        negated_smallest = max(negated_smallest, block_statistics[3])
        zeros += block_statistics[4]
        nonfinite += block_statistics[5]
        if counts_address != 0:
            if is_half:
                block = buffer[: stop - start]
                _widen(halves[start:stop], block)
            else:
                block = bits[start:stop]
            _count_exponents(block, counts)
    abs_max, abs_min = _magnitudes(largest, negated_smallest)
    return total, squares, abs_max, abs_min, zeros, nonfinite


# ---- scaling: each returns the largest magnitude that it computed, which shows infinities and NaNs


@exact
def _scale(bits, factor):
    largest = ZERO
    for i in range(bits.size):
        result = _as_bits(np.float32(_as_float(bits[i]) * factor))
        bits[i] = result
        largest = np.uint32(max(largest, np.uint32(result & MAGNITUDE)))
    return largest


@exact
def _scale_into(source, target, factor):
    largest = ZERO
    for i in range(source.size):
        result = _as_bits(np.float32(_as_float(source[i]) * factor))
        target[i] = result
        largest = np.uint32(max(largest, np.uint32(result & MAGNITUDE)))
    return largest


@exact
def _scale_add(source, target, factor):
    largest, largest_sum = ZERO, ZERO
    for i in range(source.size):
        product = np.float32(_as_float(source[i]) * factor)
        result = _as_bits(np.float32(_as_float(target[i]) + product))
        target[i] = result
        largest = np.uint32(max(largest, np.uint32(_as_bits(product) & MAGNITUDE)))
        largest_sum = np.uint32(max(largest_sum, np.uint32(result & MAGNITUDE)))
    return largest if largest_sum < EXPONENT else EXPONENT


@compiled
def scaled_copy(source, target, size, from_half, to_half, factor):
    """Write factor * source to target; of one type, both addresses may be the same. Halves become halves."""
    factor = np.float32(factor)
    source_halves = carray(_pointer(source), (size,), np.uint16)
    target_halves = carray(_pointer(target), (size,), np.uint16)
    source_bits = carray(_pointer(source), (size,), np.uint32)
    target_bits = carray(_pointer(target), (size,), np.uint32)
    if to_half:
        buffer = np.empty(BLOCK, np.uint32)
        for start in range(0, size, BLOCK):
            stop = min(start + BLOCK, size)
            block = buffer[: stop - start]
            if from_half:
                _widen(source_halves[start:stop], block)
                _scale(block, factor)
            else:
                _scale_into(source_bits[start:stop], block, factor)
            _narrow(block, target_halves[start:stop])
    elif source == target:  # one array, or the compiler must assume that a store changes the next load
        _scale(target_bits, factor)
    else:
        _scale_into(source_bits, target_bits, factor)


@compiled
def scaled_copies(table, factors):
    """`scaled_copy` for each row of `table`: its arguments but the factor."""
    for row in range(len(factors)):
        source, target, size, from_half, to_half = table[row]
        scaled_copy(source, target, size, from_half != 0, to_half != 0, factors[row])


@compiled
def unscale_add(source, master, size, is_half, factor, accumulate):
    """Write or add factor * source to master, in float32.

    Returns the largest magnitude of factor * source; infinity when that or a result is not finite.
    """
    factor = np.float32(factor)
    source_halves = carray(_pointer(source), (size,), np.uint16)
    source_bits = carray(_pointer(source), (size,), np.uint32)
    master_bits = carray(_pointer(master), (size,), np.uint32)
    buffer = np.empty(BLOCK if is_half else 0, np.uint32)
    largest = ZERO
    for start in range(0, size, BLOCK):
        stop = min(start + BLOCK, size)
        target = master_bits[start:stop]
        if is_half:
            block = buffer[: stop - start]
            _widen(source_halves[start:stop], block)
        else:
            block = source_bits[start:stop]
        if accumulate:
            largest = max(largest, _scale_add(block, target, factor))
        elif source == master:
            largest = max(largest, _scale(target, factor))
        else:
            largest = max(largest, _scale_into(block, target, factor))
    return np.float64(_as_float(min(largest, EXPONENT)))


@compiled
def unscale_adds(table, factors):
    """`unscale_add` for each row of `table`: its arguments but the factor; what it returns for each."""
    largest = np.empty(len(factors), np.float64)
    for row in range(len(factors)):
        source, master, size, is_half, accumulate = table[row]
        largest[row] = unscale_add(source, master, size, is_half != 0, factors[row], accumulate != 0)
    return largest


# ---- rounding to a storage format


@exact
def _round_to_multiple(magnitude, smallest_normal, dropped):
    # Adding 2^(e + dropped), e the exponent of the number or of the smallest normal one if that is larger,
    # leaves just the bits that the format keeps; the addition itself rounds half to even.
    exponent = np.uint32(max(np.uint32(magnitude & EXPONENT), smallest_normal))
    shifter = _as_float(np.uint32(exponent + np.uint32(dropped << np.uint32(23))))
    return _as_bits(np.float32(np.float32(_as_float(magnitude) + shifter) - shifter))


@exact
def _round_any(magnitude, smallest_normal, dropped, largest_kept, overflow, infinity):
    if magnitude > EXPONENT:
        return magnitude
    if magnitude == EXPONENT:
        return infinity
    if magnitude > largest_kept:
        return overflow
    if magnitude < smallest_normal:
        return _round_to_multiple(magnitude, smallest_normal, dropped)
    unit = np.uint32(ONE << dropped)
    odd = np.uint32(np.uint32(magnitude >> dropped) & ONE)
    rounded = np.uint32(np.uint32(magnitude + odd) + np.uint32(np.uint32(unit >> ONE) - ONE))
    return np.uint32(rounded & ~np.uint32(unit - ONE))


@summing
def _round_ordinary(bits, smallest_normal, dropped):
    total, squares = np.float32(0), np.float32(0)
    negated_smallest, zeros, zeros_before = ZERO, ZERO, ZERO
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & MAGNITUDE)
        rounded = _round_to_multiple(magnitude, smallest_normal, dropped)
        result = np.uint32(rounded | np.uint32(bits[i] & SIGN))
        bits[i] = result
        negated_smallest = np.uint32(max(negated_smallest, np.uint32(ZERO - rounded)))
        zeros = np.uint32(zeros + np.uint32(rounded == ZERO))
        zeros_before = np.uint32(zeros_before + np.uint32(magnitude == ZERO))
        value = _as_float(result)
        total += value
        squares += value * value
    return total, squares, negated_smallest, zeros, zeros_before


@exact
def _round_any_block(bits, smallest_normal, dropped, largest_kept, overflow, infinity):
    underflowed, overflowed = 0, 0
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & MAGNITUDE)
        rounded = _round_any(magnitude, smallest_normal, dropped, largest_kept, overflow, infinity)
        bits[i] = np.uint32(rounded | np.uint32(bits[i] & SIGN))
        underflowed += rounded == ZERO and magnitude != ZERO
        overflowed += magnitude > largest_kept and magnitude < EXPONENT
    return underflowed, overflowed


@exact
def _copy_and_largest(source, target):
    largest = ZERO
    for i in range(source.size):
        target[i] = source[i]
        largest = np.uint32(max(largest, np.uint32(source[i] & MAGNITUDE)))
    return largest


@exact
def _mixed(x):
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@exact
def _random_bits(index, key_low, key_high):
    return _mixed(np.uint32(_mixed(np.uint32(index ^ key_low)) + key_high))


@exact
def _round_subnormal_at_random(magnitude, random, smallest_normal, dropped):
    # In units of the smallest subnormal number: `whole` of them, and a fraction in 32 bits.
    field = np.uint32(magnitude >> np.uint32(23))
    implicit = np.uint32(np.uint32(min(field, ONE)) << np.uint32(23))
    significand = np.uint32(np.uint32(magnitude & np.uint32(0x7FFFFF)) | implicit)
    behind = np.uint32(np.uint32(dropped + np.uint32(smallest_normal >> np.uint32(23))) - max(field, ONE))
    left = np.uint32(np.uint32(32) - np.uint32(min(behind, np.uint32(32))))
    right = np.uint32(min(np.uint32(np.uint32(max(behind, np.uint32(32))) - np.uint32(32)), np.uint32(31)))
    whole = np.uint32(significand >> np.uint32(min(behind, np.uint32(31))))
    fraction = np.uint32(np.uint32(significand << left) >> right)
    units = np.float32(np.int32(np.uint32(whole + np.uint32(random < fraction))))
    # Two factors: what one unit is may be below float32's normal range.
    units = np.float32(units * _as_float(np.uint32(np.uint32(np.uint32(104) + dropped) << np.uint32(23))))
    return _as_bits(np.float32(units * _as_float(smallest_normal)))


@exact
def _round_inside_at_random(bits, start, key_low, key_high, smallest_normal, dropped):
    mask = np.uint32(np.uint32(ONE << dropped) - ONE)
    kept = np.uint32(~mask)
    shift = np.uint32(np.uint32(32) - dropped)
    underflowed = ZERO
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & MAGNITUDE)
        random = _random_bits(np.uint32(start + np.uint32(i)), key_low, key_high)
        # Up, if the bits that are dropped are more than the random number.
        normal = np.uint32(np.uint32(magnitude + np.uint32(mask - np.uint32(random >> shift))) & kept)
        subnormal = _round_subnormal_at_random(
            np.uint32(min(magnitude, smallest_normal)), random, smallest_normal, dropped
        )
        rounded = normal if magnitude >= smallest_normal else subnormal
        bits[i] = np.uint32(rounded | np.uint32(bits[i] & SIGN))
        underflowed = np.uint32(underflowed + np.uint32(rounded == ZERO and magnitude != ZERO))
    return np.int64(underflowed)


@exact
def _round_block_at_random(
    bits, start, key_low, key_high, smallest_normal, dropped, largest, largest_kept, overflow, infinity
):
    if _largest(bits) <= largest:
        return _round_inside_at_random(bits, start, key_low, key_high, smallest_normal, dropped), 0
    underflowed, overflowed = 0, 0
    one = np.empty(1, np.uint32)
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & MAGNITUDE)
        if magnitude <= largest:
            one[0] = bits[i]
            index = np.uint32(start + np.uint32(i))
            underflowed += _round_inside_at_random(one, index, key_low, key_high, smallest_normal, dropped)
            bits[i] = one[0]
        else:
            rounded = _round_any(magnitude, smallest_normal, dropped, largest_kept, overflow, infinity)
            bits[i] = np.uint32(rounded | np.uint32(bits[i] & SIGN))
            overflowed += magnitude > largest_kept and magnitude < EXPONENT
    return underflowed, overflowed


@exact
def _largest_finite(bits):
    largest = ZERO
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & MAGNITUDE)
        largest = np.uint32(max(largest, magnitude if magnitude < EXPONENT else ZERO))
    return largest


@exact
def _power_to_fit(bits, smallest_normal, max_bits, dropped):
    """The power of two of `Format.fitted_to`, as its exponent."""
    largest = ZERO
    for start in range(0, bits.size, BLOCK):
        block = bits[start : min(start + BLOCK, bits.size)]
        found = _largest(block)
        largest = max(largest, found if found < EXPONENT else _largest_finite(block))
    if largest == ZERO:
        return 0
    above = np.int64(largest) - np.int64(max_bits) + ((1 << 23) - 1)
    if largest < (1 << 23):  # bit patterns of float32's subnormal numbers do not count by exponents
        above = np.int64(-(1 << 40))
    power = min(above >> 23, 254 - np.int64(max_bits >> np.uint32(23)))
    power = min(power, 254 - np.int64(dropped) - np.int64(smallest_normal >> np.uint32(23)))
    return max(power, 1 - np.int64(smallest_normal >> np.uint32(23)))


@compiled
def round_to_format(
    source,
    target,
    size,
    mantissa_bits,
    smallest_normal,
    largest,
    beyond_max,
    fitted,
    at_random,
    key_low,
    key_high,
):
    """As `statistics` of the rounded values, then the counts of underflows and overflows; see `Kernels`."""
    smallest_normal, max_bits = _as_bits(np.float32(smallest_normal)), _as_bits(np.float32(largest))
    dropped = np.uint32(23 - mantissa_bits)  # at least 1
    overflow = infinity = _as_bits(np.float32(beyond_max))
    source_bits = carray(_pointer(source), (size,), np.uint32)
    target_bits = carray(_pointer(target), (size,), np.uint32)
    if fitted:
        power = _power_to_fit(source_bits, smallest_normal, max_bits, dropped)
        if overflow == max_bits:
            overflow = np.uint32(max_bits + (power << 23))
        smallest_normal = np.uint32(smallest_normal + (power << 23))
        max_bits = np.uint32(max_bits + (power << 23))
        infinity = EXPONENT
    halfway_to_overflow = np.uint32(max_bits + np.uint32(ONE << np.uint32(dropped - ONE)))
    # A tie goes to the even neighbour: to `largest` itself if its last bit is 0, else beyond it.
    largest_kept = np.uint32(halfway_to_overflow - np.uint32(np.uint32(max_bits >> dropped) & ONE))
    largest_shiftable = np.uint32(np.uint32(np.uint32(254) - dropped) << np.uint32(23))
    total, squares = 0.0, 0.0
    abs_largest, negated_smallest, zeros, nonfinite = ZERO, ZERO, 0, 0
    underflowed, overflowed = 0, 0
    for start in range(0, size, BLOCK):
        stop = min(start + BLOCK, size)
        block = target_bits[start:stop]
        if source == target:
            largest_before = _largest(block)
        else:
            largest_before = _copy_and_largest(source_bits[start:stop], block)
        rounded_largest = ZERO
        ordinary = not at_random
        if ordinary:
            ordinary = largest_before <= largest_kept and largest_before <= largest_shiftable
        if ordinary:
            rounded_largest = _round_to_multiple(largest_before, smallest_normal, dropped)
            ordinary = _can_square(rounded_largest)
        if ordinary:
            ordinary_block = _round_ordinary(block, smallest_normal, dropped)
            total += np.float64(ordinary_block[0])
            squares += np.float64(ordinary_block[1])
            abs_largest = max(abs_largest, rounded_largest)  # rounding is monotonic
            negated_smallest = max(negated_smallest, ordinary_block[2])
            zeros += np.int64(ordinary_block[3])
            underflowed += np.int64(ordinary_block[3]) - np.int64(ordinary_block[4])
        else:
            if at_random:
                flushed, lost = _round_block_at_random(
                    block,
                    np.uint32(start),
                    np.uint32(key_low),
                    np.uint32(key_high),
                    smallest_normal,
                    dropped,
                    max_bits,
                    largest_kept,
                    overflow,
                    infinity,
                )
            else:
                flushed, lost = _round_any_block(
                    block, smallest_normal, dropped, largest_kept, overflow, infinity
                )
            underflowed += flushed
            overflowed += lost
            block_statistics = _block_statistics(block)
            total += block_statistics[0]
            squares += block_statistics[1]
            abs_largest = max(abs_largest, block_statistics[2])
            negated_smallest = max(negated_smallest, block_statistics[3])
            zeros += block_statistics[4]
            nonfinite += block_statistics[5]
    abs_max, abs_min = _magnitudes(abs_largest, negated_smallest)
    return total, squares, abs_max, abs_min, zeros, nonfinite, underflowed, overflowed
