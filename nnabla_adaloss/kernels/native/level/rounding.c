// SPDX-License-Identifier: Apache-2.0
// Rounding of float32 to the numbers of a storage format, and statistics of the results.
#include "block_statistics.h"

static inline struct extremes extremes_of(const uint32_t *bits, int64_t size) {
    uint32_t largest = 0, smallest = UINT32_MAX;
#pragma omp simd reduction(max : largest) reduction(min : smallest)
    for (int64_t i = 0; i < size; i++) {
        uint32_t magnitude = bits[i] & MAGNITUDE;
        largest = larger(largest, magnitude);
        smallest = smaller(smallest, magnitude);
    }
    return (struct extremes){largest, smallest - 1, 0};
}

// ---- half to even, for a block inside the format's range

// Adding 2^(e + dropped), e the exponent of the number or of the smallest normal one if that is larger, leaves just
// the bits that the format keeps; the addition itself rounds half to even.
static inline uint32_t round_to_multiple(uint32_t magnitude, const struct grid *grid) {
    uint32_t exponent = larger(magnitude & INFINITE, grid->smallest_normal);
    float shifter = as_float(exponent + (grid->dropped << EXPONENT_SHIFT));
    return as_bits((as_float(magnitude) + shifter) - shifter);
}

static inline lanes round_lanes(lanes magnitude, const struct grid *grid) {
    lanes exponent = larger_of(magnitude & INFINITE, all(grid->smallest_normal));
    floats shifter = (floats)(exponent + (grid->dropped << EXPONENT_SHIFT));
    return (lanes)(((floats)magnitude + shifter) - shifter);
}

struct zeros {  // numbers of zeros before and after; smallest nonzero result, less one
    lanes before, after, below_smallest;
};

static inline __attribute__((always_inline)) struct zeros round_floats(
    struct wide_sums *wide, const uint32_t *source, uint32_t *target, int64_t size, struct grid grid, bool with_zeros) {
    struct zeros zeros = {all(0), all(0), all(UINT32_MAX)};
    for (int64_t start = 0; start < size; start += RUN) {
        int64_t stop = size - start < RUN ? size : start + RUN;
        struct sums sums = {{{0}}, {{0}}};
        for (int64_t i = start; i < stop; i += ACROSS) {
#pragma GCC unroll 8
            for (int stripe = 0; stripe < STRIPES; stripe++) {
                lanes x = load(source + i + stripe * WIDTH), magnitude = x & MAGNITUDE;
                lanes rounded = round_lanes(magnitude, &grid);
                lanes result = rounded | (x & SIGN);
                store(target + i + stripe * WIDTH, result);
                add(&sums, stripe, result);
                if (with_zeros) {
                    zeros.before = count_zeros(zeros.before, magnitude);
                    zeros.after = count_zeros(zeros.after, rounded);
                    zeros.below_smallest = smaller_of(zeros.below_smallest, rounded - 1);
                }
            }
        }
        widen_sums(wide, &sums);
    }
    return zeros;
}

static inline void round_ordinary(
    struct tally *tally, struct wide_sums *sums, const uint32_t *source, uint32_t *target, int64_t size,
    struct grid grid, uint32_t largest, uint32_t smallest) {
    // Rounding is monotonic.
    largest = round_to_multiple(largest, &grid);
    smallest = round_to_multiple(smallest, &grid);
    if (smallest > 0) {
        round_floats(sums, source, target, size, grid, false);
        add_extremes(tally, (struct extremes){largest, smallest - 1, 0});
    } else {
        struct zeros found = round_floats(sums, source, target, size, grid, true);
        uint32_t zeros = sum_of_lanes(found.after);
        add_extremes(tally, (struct extremes){largest, smallest_lane(found.below_smallest), zeros});
        tally->underflowed += zeros - sum_of_lanes(found.before);
    }
}

// ---- any block

static inline uint32_t round_any(uint32_t magnitude, const struct grid *grid) {
    if (magnitude > INFINITE) return magnitude;
    if (magnitude == INFINITE) return grid->infinity;
    if (magnitude > grid->largest_kept) return grid->overflow;
    if (magnitude < grid->smallest_normal) return round_to_multiple(magnitude, grid);
    uint32_t unit = 1u << grid->dropped, odd = magnitude >> grid->dropped & 1;
    return (magnitude + odd + (unit >> 1) - 1) & ~(unit - 1);
}

static void round_block(struct tally *tally, const uint32_t *source, uint32_t *target, int64_t size, struct grid grid) {
    uint32_t underflowed = 0, overflowed = 0;
    for (int64_t i = 0; i < size; i++) {
        uint32_t sign = source[i] & SIGN, magnitude = source[i] & MAGNITUDE;
        uint32_t rounded = round_any(magnitude, &grid);
        target[i] = rounded | sign;
        underflowed += rounded == 0 && magnitude != 0;
        overflowed += magnitude > grid.largest_kept && magnitude < INFINITE;
    }
    tally->underflowed += underflowed;
    tally->overflowed += overflowed;
}

// ---- at random: to one of the two neighbours, with the distance from the lower one as the probability of the upper
// one. A key of 64 bits and the index of an element determine the choice, as in ../../adaloss.cu.

enum { STRETCH = 256 };  // elements that are rounded in one way

static inline uint32_t mixed(uint32_t x) {  // "lowbias32": every bit of the result depends on every bit of x
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

static inline uint32_t random_bits(uint32_t index, uint64_t key) {
    return mixed(mixed(index ^ (uint32_t)key) + (uint32_t)(key >> 32));
}

static inline uint32_t normal_at_random(uint32_t magnitude, uint32_t random, const struct grid *grid) {
    // Up, if the bits that are dropped are more than the random number.
    uint32_t mask = (1u << grid->dropped) - 1;
    return (magnitude + (mask - (random >> (32 - grid->dropped)))) & ~mask;
}

static inline uint32_t subnormal_at_random(uint32_t magnitude, uint32_t random, const struct grid *grid) {
    // In units of the smallest subnormal number: `whole` of them, and a fraction in 32 bits.
    uint32_t field = magnitude >> EXPONENT_SHIFT;
    uint32_t significand = (magnitude & 0x7FFFFFu) | smaller(field, 1) << EXPONENT_SHIFT;
    uint32_t behind = grid->dropped + (grid->smallest_normal >> EXPONENT_SHIFT) - larger(field, 1);
    uint32_t whole = significand >> smaller(behind, 31);
    uint32_t fraction = significand << (32 - smaller(behind, 32)) >> smaller(larger(behind, 32) - 32, 31);
    float units = (float)(int32_t)(whole + (random < fraction));
    // Two factors: one unit may be below float32's normal range.
    units *= as_float((104 + grid->dropped) << EXPONENT_SHIFT);
    return as_bits(units * as_float(grid->smallest_normal));
}

// Round a magnitude that is no larger than the format's largest number.
static inline uint32_t any_at_random(uint32_t magnitude, uint32_t random, const struct grid *grid) {
    uint32_t normal = normal_at_random(magnitude, random, grid);
    uint32_t subnormal = subnormal_at_random(smaller(magnitude, grid->smallest_normal), random, grid);
    return magnitude >= grid->smallest_normal ? normal : subnormal;
}

// Round numbers inside the format's range; return how many underflow. With `all_normal`, which is four times as fast,
// none is below the normal range.
static inline __attribute__((always_inline)) uint32_t round_at_random(
    const uint32_t *source, uint32_t *target, int64_t size, struct grid grid, uint32_t index, uint64_t key,
    bool all_normal) {
    uint32_t underflowed = 0;
#pragma omp simd reduction(+ : underflowed)
    for (int64_t i = 0; i < size; i++) {
        uint32_t sign = source[i] & SIGN, magnitude = source[i] & MAGNITUDE;
        uint32_t random = random_bits(index + (uint32_t)i, key);
        uint32_t rounded =
            all_normal ? normal_at_random(magnitude, random, &grid) : any_at_random(magnitude, random, &grid);
        target[i] = rounded | sign;
        if (!all_normal) underflowed += (rounded == 0) & (magnitude != 0);
    }
    return underflowed;
}

static void round_block_at_random(
    struct tally *tally, const uint32_t *source, uint32_t *target, int64_t size, struct grid grid, uint32_t index,
    uint64_t key) {
    for (int64_t at = 0; at < size; at += STRETCH) {
        int64_t end = size - at < STRETCH ? size : at + STRETCH;
        struct extremes found = extremes_of(source + at, end - at);
        if (found.largest > grid.largest) {
            for (int64_t i = at; i < end; i++) {
                if ((source[i] & MAGNITUDE) <= grid.largest)
                    tally->underflowed +=
                        round_at_random(source + i, target + i, 1, grid, index + (uint32_t)i, key, false);
                else
                    round_block(tally, source + i, target + i, 1, grid);
            }
        } else if (found.below_smallest + 1 < grid.smallest_normal) {
            tally->underflowed +=
                round_at_random(source + at, target + at, end - at, grid, index + (uint32_t)at, key, false);
        } else {
            round_at_random(source + at, target + at, end - at, grid, index + (uint32_t)at, key, true);
        }
    }
}

// ---- an array

struct tally OF_LEVEL(round)(const struct rounding_task *task, const struct grid *grid, int64_t start, int64_t stop) {
    struct tally tally = {.below_smallest = UINT32_MAX};
    struct wide_sums sums = {{0}, {0}};
    uint32_t largest_shiftable = (254 - grid->dropped) << EXPONENT_SHIFT;
    for (int64_t at = start; at < stop; at += BLOCK) {
        const uint32_t *source = task->source + at;
        uint32_t *target = task->target + at;
        int64_t size = stop - at < BLOCK ? stop - at : BLOCK, whole = 0;
        if (task->at_random) {
            round_block_at_random(&tally, source, target, size, *grid, (uint32_t)at, task->key);
            measure_block(&tally, &sums, target, size, tally.zeros > 0);
            continue;
        }
        struct extremes found = extremes_of(source, size);
        if (found.largest <= smaller(grid->largest_kept, largest_shiftable) &&
            can_square(round_to_multiple(found.largest, grid))) {
            whole = size - size % ACROSS;
            round_ordinary(&tally, &sums, source, target, whole, *grid, found.largest, found.below_smallest + 1);
        }
        round_block(&tally, source + whole, target + whole, size - whole, *grid);
        if (whole)
            add_any(&tally, &sums, target + whole, size - whole);
        else
            measure_block(&tally, &sums, target, size, tally.zeros > 0);
    }
    finish_sums(&tally, &sums);
    return tally;
}

uint32_t OF_LEVEL(largest_finite)(const uint32_t *x, int64_t start, int64_t stop) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = start; i < stop; i++) {
        uint32_t magnitude = x[i] & MAGNITUDE;
        largest = larger(largest, magnitude < INFINITE ? magnitude : 0);
    }
    return largest;
}
