// SPDX-License-Identifier: Apache-2.0
// What goes in and out of the library, and what a level of it does: the kernels compiled for one kind of processor.
#ifndef ADALOSS_H
#define ADALOSS_H

#include <stdbool.h>
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))

// ---- What callers hand over and get back: rows of numbers of eight bytes. ../cpu_library.py knows them, too.

struct statistics_task {
    const void *x;
    int64_t size;
    int64_t is_half;
    int64_t *counts;  // 256 numbers to which how many elements have each binary exponent is added; or NULL
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

// Elements that are gone through at a time. Starting a block costs a wait for memory, so long ones are faster;
// short ones stay in the first-level cache while they are gone through twice. Arrays are cut at multiples of it.
enum { BLOCK = 4096 };

struct tally {  // statistics of a part of an array
    double sum, sum_of_squares;
    uint32_t largest;         // magnitude, as bits
    uint32_t below_smallest;  // smallest magnitude but zero, less one; UINT32_MAX when there is none
    int64_t zeros, nonfinite, underflowed, overflowed;
};

struct grid {  // the numbers of a storage format; magnitudes as bits
    uint32_t smallest_normal;
    uint32_t dropped;       // bits of float32's mantissa that the format does not have, at least 1
    uint32_t largest;
    uint32_t largest_kept;  // the largest that is rounded to `largest`
    uint32_t overflow;      // what those beyond become
    uint32_t infinity;      // what infinities become
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
