// SPDX-License-Identifier: Apache-2.0
// Statistics of one block: sums and extremes, in registers.
//
// Sums are float32 in a block and float64 beyond. Element i is added to sum i % ACROSS whatever the processor, so
// that the result is everywhere the same, and no more than 64 numbers are added in float32: 4e-6 at worst.
//
// Zeros cost time: they are counted, and excluded from the smallest magnitude. A block is expected to have zeros if
// the previous one had. If an unexpected zero is found, the block is processed again.
#ifndef ADALOSS_BLOCK_STATISTICS_H
#define ADALOSS_BLOCK_STATISTICS_H

#include "adaloss.h"
#include "lanes.h"

enum { ACROSS = 32, STRIPES = ACROSS / WIDTH, RUN = 64 * ACROSS };
enum { PEEK = 64 };  // number of elements of a block that are checked beforehand

// Between these a block's largest square and its sum of squares are far from float32's limits, so squares that
// underflow are too small to count beside it.
#define SAFE_TO_SQUARE_FROM ((127u - 50u) << EXPONENT_SHIFT)
#define SAFE_TO_SQUARE_TO ((127u + 50u) << EXPONENT_SHIFT)

static inline bool can_square(uint32_t largest) {
    return largest == 0 || (SAFE_TO_SQUARE_FROM <= largest && largest <= SAFE_TO_SQUARE_TO);
}

struct wide_sums {
    double sum[ACROSS], squares[ACROSS];
};

struct sums {
    floats sum[STRIPES], squares[STRIPES];
};

static inline void add(struct sums *sums, int stripe, lanes x) {
    floats value = (floats)x;
    sums->sum[stripe] += value;
    sums->squares[stripe] += value * value;
}

static inline void widen_sums(struct wide_sums *wide, const struct sums *sums) {
    float sum[ACROSS], squares[ACROSS];
    memcpy(sum, sums->sum, sizeof sum);
    memcpy(squares, sums->squares, sizeof squares);
    for (int i = 0; i < ACROSS; i++) wide->sum[i] += (double)sum[i];
    for (int i = 0; i < ACROSS; i++) wide->squares[i] += (double)squares[i];
}

static inline void add_wide(struct wide_sums *to, const struct wide_sums *more) {
    for (int i = 0; i < ACROSS; i++) to->sum[i] += more->sum[i];
    for (int i = 0; i < ACROSS; i++) to->squares[i] += more->squares[i];
}

static inline void finish_sums(struct tally *tally, struct wide_sums *sums) {
    for (int half = ACROSS / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) sums->sum[i] += sums->sum[i + half];
        for (int i = 0; i < half; i++) sums->squares[i] += sums->squares[i + half];
    }
    tally->sum = sums->sum[0];
    tally->sum_of_squares = sums->squares[0];
}

struct extremes {  // of magnitudes; and the number of zeros if they were searched for
    uint32_t largest, below_smallest, zeros;
};

static inline void add_extremes(struct tally *tally, struct extremes extremes) {
    tally->largest = larger(tally->largest, extremes.largest);
    tally->below_smallest = smaller(tally->below_smallest, extremes.below_smallest);
    tally->zeros += extremes.zeros;
}

// Any numbers, in float64; infinities and NaNs are only counted.
static inline void add_any(struct tally *tally, struct wide_sums *sums, const uint32_t *bits, int64_t size) {
    uint32_t largest = 0, below_smallest = UINT32_MAX, zeros = 0, nonfinite = 0;
    for (int64_t start = 0; start < size; start += ACROSS) {
        int64_t count = size - start < ACROSS ? size - start : ACROSS;
        for (int64_t i = 0; i < count; i++) {
            uint32_t magnitude = bits[start + i] & MAGNITUDE;
            bool is_finite = magnitude < INFINITE;
            uint32_t finite = is_finite ? magnitude : 0;
            double value = (double)as_float(is_finite ? bits[start + i] : 0);
            sums->sum[i] += value;
            sums->squares[i] += value * value;
            largest = larger(largest, finite);
            below_smallest = smaller(below_smallest, finite - 1);
            zeros += magnitude == 0;
            nonfinite += !is_finite;
        }
    }
    add_extremes(tally, (struct extremes){largest, below_smallest, zeros});
    tally->nonfinite += nonfinite;
}

// ---- float32; `size` is a multiple of ACROSS

static inline __attribute__((always_inline)) struct extremes add_floats(
    struct wide_sums *wide, const uint32_t *bits, int64_t size, bool with_zeros) {
    lanes largest = all(0), smallest = all(UINT32_MAX), zeros = all(0);
    for (int64_t start = 0; start < size; start += RUN) {
        int64_t stop = size - start < RUN ? size : start + RUN;
        struct sums sums = {{{0}}, {{0}}};
        for (int64_t i = start; i < stop; i += ACROSS) {
#pragma GCC unroll 8
            for (int stripe = 0; stripe < STRIPES; stripe++) {
                lanes x = load(bits + i + stripe * WIDTH);
                lanes magnitude = x & MAGNITUDE;
                add(&sums, stripe, x);
                largest = larger_of(largest, magnitude);
                smallest = smaller_of(smallest, with_zeros ? magnitude - 1 : magnitude);
                if (with_zeros) zeros = count_zeros(zeros, magnitude);
            }
        }
        widen_sums(wide, &sums);
    }
    uint32_t below = with_zeros ? smallest_lane(smallest) : smallest_lane(smallest) - 1;
    return (struct extremes){largest_lane(largest), below, sum_of_lanes(zeros)};
}

static inline void measure_whole(
    struct tally *tally, struct wide_sums *sums, const uint32_t *bits, int64_t size, bool zeros_expected) {
    if (can_square(largest_of(bits, PEEK < size ? PEEK : size))) {  // subnormal squares are slow ones
        struct wide_sums block = {{0}, {0}};
        struct extremes found;
        if (!zeros_expected) found = add_floats(&block, bits, size, false);
        if (zeros_expected || found.below_smallest == UINT32_MAX) {
            block = (struct wide_sums){{0}, {0}};
            found = add_floats(&block, bits, size, true);
        }
        if (can_square(found.largest)) {
            add_wide(sums, &block);
            add_extremes(tally, found);
            return;
        }
    }
    add_any(tally, sums, bits, size);
}

static inline void measure_block(
    struct tally *tally, struct wide_sums *sums, const uint32_t *bits, int64_t size, bool zeros_expected) {
    int64_t whole = size - size % ACROSS;
    if (whole) measure_whole(tally, sums, bits, whole, zeros_expected);
    add_any(tally, sums, bits + whole, size - whole);
}

// ---- float16: extremes and zeros two to a lane; squares of float16 are exact in float32

static inline __attribute__((always_inline)) struct extremes add_halves(
    struct wide_sums *wide, const uint16_t *x, int64_t size, bool with_zeros) {
    halves one = all_halves(1), mask = all_halves(HALF_MAGNITUDE);
    halves largest = all_halves(0), smallest = all_halves(UINT16_MAX), zeros = all_halves(0);
    for (int64_t start = 0; start < size; start += RUN) {
        int64_t stop = size - start < RUN ? size : start + RUN;
        struct sums sums = {{{0}}, {{0}}};
        for (int64_t i = start; i < stop; i += ACROSS) {
#pragma GCC unroll 8
            for (int stripe = 0; stripe < STRIPES; stripe++) {
                floats value = (floats)load_widened(x + i + stripe * WIDTH);
                sums.sum[stripe] += value;
                sums.squares[stripe] = plus_square(sums.squares[stripe], value);  // also rounded once
            }
#pragma GCC unroll 8
            for (int pair = 0; pair < STRIPES / 2; pair++) {
                halves magnitude = load_halves(x + i + pair * 2 * WIDTH) & mask;
                largest = larger_half_of(largest, magnitude);
                smallest = smaller_half_of(smallest, with_zeros ? magnitude - one : magnitude);
                if (with_zeros) zeros = count_zero_halves(zeros, magnitude);
            }
        }
        widen_sums(wide, &sums);
    }
    uint16_t below = (uint16_t)(with_zeros ? smallest_half(smallest) : smallest_half(smallest) - 1);
    return (struct extremes){largest_half(largest), below, sum_of_halves(zeros)};
}

// One element after another: the few at the end of an array, and blocks that hold infinities or NaNs.
static inline void measure_few_halves(struct tally *tally, struct wide_sums *sums, const uint16_t *x, int64_t size) {
    uint32_t bits[ACROSS];
    for (int64_t start = 0; start < size; start += ACROSS) {
        int64_t count = size - start < ACROSS ? size - start : ACROSS;
        for (int64_t i = 0; i < count; i++) bits[i] = widened(x[start + i]);
        add_any(tally, sums, bits, count);
    }
}

static inline void measure_halves(
    struct tally *tally, struct wide_sums *sums, const uint16_t *x, int64_t size, bool zeros_expected) {
    int64_t whole = size - size % ACROSS;
    if (whole) {
        struct wide_sums block = {{0}, {0}};
        struct extremes found;
        if (!zeros_expected) found = add_halves(&block, x, whole, false);
        if (zeros_expected || found.below_smallest == UINT16_MAX) {
            block = (struct wide_sums){{0}, {0}};
            found = add_halves(&block, x, whole, true);
        }
        if (found.largest < HALF_INFINITE) {
            add_wide(sums, &block);
            found.largest = widened((uint16_t)found.largest);
            found.below_smallest = widened((uint16_t)(found.below_smallest + 1)) - 1;
            add_extremes(tally, found);
        } else {
            measure_few_halves(tally, sums, x, whole);
        }
    }
    measure_few_halves(tally, sums, x + whole, size - whole);
}

#endif
