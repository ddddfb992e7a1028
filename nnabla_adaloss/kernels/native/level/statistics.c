// SPDX-License-Identifier: Apache-2.0
// Statistics of an array: sums, extremes, counts, and how many elements have each binary exponent.
//
// A block goes through a fast pass that assumes ordinary numbers; if its largest magnitude contradicts that, it goes
// through a careful one.
#include "block_statistics.h"

enum { TABLES = 4, EXPONENTS = 256 };

static inline uint32_t exponent_at(const struct statistics_task *task, int64_t i) {
    uint32_t bits = task->is_half ? widened(((const uint16_t *)task->x)[i]) : ((const uint32_t *)task->x)[i];
    return bits >> EXPONENT_SHIFT & 0xFF;
}

static void count_exponents(const struct statistics_task *task, int64_t start, int64_t stop) {
    // Neighbours often have the same exponent; with one counter, each would wait for the previous count.
    uint32_t counts[TABLES][EXPONENTS] = {{0}};
    int64_t i = start;
    for (; i + TABLES <= stop; i += TABLES) {
#pragma GCC unroll 4
        for (int table = 0; table < TABLES; table++) counts[table][exponent_at(task, i + table)]++;
    }
    for (; i < stop; i++) counts[0][exponent_at(task, i)]++;
    for (int e = 0; e < EXPONENTS; e++) {
        int64_t count = 0;
        for (int table = 0; table < TABLES; table++) count += counts[table][e];
        if (count) __atomic_fetch_add(&task->counts[e], count, __ATOMIC_RELAXED);  // other threads add theirs
    }
}

struct tally OF_LEVEL(measure)(const struct statistics_task *task, int64_t start, int64_t stop) {
    struct tally tally = {.below_smallest = UINT32_MAX};
    struct wide_sums sums = {{0}, {0}};
    bool zeros_expected = false;
    for (int64_t at = start; at < stop; at += BLOCK) {
        int64_t size = stop - at < BLOCK ? stop - at : BLOCK;
        int64_t zeros = tally.zeros;
        if (task->is_half)
            measure_halves(&tally, &sums, (const uint16_t *)task->x + at, size, zeros_expected);
        else
            measure_block(&tally, &sums, (const uint32_t *)task->x + at, size, zeros_expected);
        zeros_expected = tally.zeros > zeros;
    }
    finish_sums(&tally, &sums);
    if (task->counts) count_exponents(task, start, stop);
    return tally;
}
