// SPDX-License-Identifier: Apache-2.0
// Sums and extremes of the numbers of a block, in registers.
//
// Sums are float32 in a block and float64 beyond. Element i is added to sum i % ACROSS whatever the processor, so
// that the result is everywhere the same, and no more than 64 numbers are added in float32: 4e-6 at worst.
#ifndef ADALOSS_SUMS_H
#define ADALOSS_SUMS_H

#include "adaloss.h"
#include "lanes.h"

enum { ACROSS = 32, STRIPES = ACROSS / WIDTH, RUN = 64 * ACROSS };

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

// Magnitudes of a block. Most blocks have no zeros; only others are searched for their number, and for the smallest
// nonzero magnitude.
struct extremes {
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

#endif
