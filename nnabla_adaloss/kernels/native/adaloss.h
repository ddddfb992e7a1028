// SPDX-License-Identifier: Apache-2.0
// Interface of the library, and of a level: the kernels compiled for one kind of processor.
#ifndef ADALOSS_H
#define ADALOSS_H

#include <stdbool.h>
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))

// ---- Arguments and results: rows of numbers of eight bytes, also defined in ../cpu.py.

struct statistics_task {
    const void *x;
    int64_t size;
    int64_t is_half;
    int64_t *counts;  // 256 counters of elements by binary exponent; or NULL
};

struct scale_task {  // target = factor * source; with `accumulate`, target += factor * source
    const void *source;
    void *target;  // may be source
    int64_t size;
    int64_t source_is_half;
    int64_t target_is_half;
    int64_t accumulate;
    double factor;
};

struct rounding_task {
    const uint32_t *source;  // float32
    uint32_t *target;        // may be source
    int64_t size;
    int64_t mantissa_bits;   // at most 22
    double smallest_normal;
    double largest;
    double beyond_largest;  // an infinity, NaN or `largest`
    int64_t fitted;
    int64_t at_random;
    uint64_t key;
};

struct statistics {
    double sum, sum_of_squares, abs_max, abs_min;
    int64_t zeros, nonfinite, underflowed, overflowed;  // the last two: by rounding
};

// ---- Inside.

// Elements per block. Starting a block costs a wait for memory, so long ones are faster; short ones stay in the
// first-level cache for a second pass. Arrays are divided at multiples of it.
enum { BLOCK = 4096 };

struct tally {  // statistics of a part of an array
    double sum, sum_of_squares;
    uint32_t largest;         // magnitude, as bits
    uint32_t below_smallest;  // smallest nonzero magnitude, less one; UINT32_MAX for none
    int64_t zeros, nonfinite, underflowed, overflowed;
};

struct grid {  // the numbers of a storage format; magnitudes as bits
    uint32_t smallest_normal;
    uint32_t dropped;       // mantissa bits of float32 that the format lacks, at least 1
    uint32_t largest;
    uint32_t largest_kept;  // the largest that is rounded to `largest`
    uint32_t overflow;      // result of larger ones
    uint32_t infinity;      // result of infinities
};

struct level {
    const char *name;
    struct tally (*measure)(const struct statistics_task *task, int64_t start, int64_t stop);
    uint32_t (*scale)(const struct scale_task *task, int64_t start, int64_t stop);
    uint32_t (*largest_finite)(const uint32_t *x, int64_t start, int64_t stop);
    struct tally (*round)(const struct rounding_task *task, const struct grid *grid, int64_t start, int64_t stop);
};

#ifdef LEVEL  // The sources of a level are compiled once for each, with LEVEL its name.
#define ADALOSS_JOINED(name, level) adaloss_##name##_##level
#define ADALOSS_NAMED(name, level) ADALOSS_JOINED(name, level)
#define OF_LEVEL(name) ADALOSS_NAMED(name, LEVEL)

struct tally OF_LEVEL(measure)(const struct statistics_task *task, int64_t start, int64_t stop);
uint32_t OF_LEVEL(scale)(const struct scale_task *task, int64_t start, int64_t stop);
uint32_t OF_LEVEL(largest_finite)(const uint32_t *x, int64_t start, int64_t stop);
struct tally OF_LEVEL(round)(
    const struct rounding_task *task, const struct grid *grid, int64_t start, int64_t stop);
#endif

#endif
