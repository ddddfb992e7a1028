// SPDX-License-Identifier: Apache-2.0
// Public functions. They are stateless: callers provide the level, the number of threads and memory for the results.
#include <stddef.h>

#include "adaloss.h"
#include "bits.h"
#include "threads.h"

#ifdef __x86_64__
#include "processor.h"
#endif

// ---- levels

extern const struct level adaloss_level_baseline, adaloss_level_avx2, adaloss_level_avx512;

// The level number `place` of those that this processor can run, the fastest first; NULL beyond the last.
PUBLIC const struct level *adaloss_level(int place) {
    const struct level *runnable[4] = {NULL};
    int count = 0;
#ifdef __x86_64__
    struct processor processor = this_processor();
    if (processor.avx512) runnable[count++] = &adaloss_level_avx512;
    if (processor.avx2) runnable[count++] = &adaloss_level_avx2;
#endif
    runnable[count++] = &adaloss_level_baseline;
    return 0 <= place && place < count ? runnable[place] : NULL;
}

PUBLIC const char *adaloss_level_name(const struct level *level) { return level->name; }

// SOURCES is the digest of the compiled sources, see __init__.py.
PUBLIC const char *adaloss_sources(void) { return SOURCES; }

// ---- results of the parts of an array, put together in the order of the parts

static struct statistics together(const struct tally *tallies, int parts) {
    struct statistics all = {0};
    uint32_t largest = 0, below_smallest = UINT32_MAX;
    for (int part = 0; part < parts; part++) {
        const struct tally *tally = &tallies[part];
        all.sum += tally->sum;
        all.sum_of_squares += tally->sum_of_squares;
        all.zeros += tally->zeros;
        all.nonfinite += tally->nonfinite;
        all.underflowed += tally->underflowed;
        all.overflowed += tally->overflowed;
        largest = larger(largest, tally->largest);
        below_smallest = smaller(below_smallest, tally->below_smallest);
    }
    all.abs_max = (double)as_float(largest);
    all.abs_min = (double)as_float(below_smallest + 1);
    return all;
}

static uint32_t largest_of(const uint32_t *found, int parts) {
    uint32_t largest = 0;
    for (int part = 0; part < parts; part++) largest = larger(largest, found[part]);
    return largest;
}

// ---- statistics

struct measuring {
    const struct level *level;
    const struct statistics_task *task;
    struct tally tallies[MOST_PARTS];
};

static void measure_part(void *context, int part, int64_t start, int64_t stop) {
    struct measuring *measuring = context;
    measuring->tallies[part] = measuring->level->measure(measuring->task, start, stop);
}

PUBLIC void adaloss_statistics(
    const struct level *level, int threads, const struct statistics_task *tasks, int64_t count,
    struct statistics *results) {
    for (int64_t i = 0; i < count; i++) {
        struct measuring measuring;
        measuring.level = level;
        measuring.task = &tasks[i];
        adaloss_in_parts(tasks[i].size, threads, measure_part, &measuring);
        results[i] = together(measuring.tallies, adaloss_parts(tasks[i].size));
    }
}

// ---- scaling

struct scaling {
    const struct level *level;
    const struct scale_task *task;
    uint32_t largest[MOST_PARTS];
};

static void scale_part(void *context, int part, int64_t start, int64_t stop) {
    struct scaling *scaling = context;
    scaling->largest[part] = scaling->level->scale(scaling->task, start, stop);
}

// `results`: for each task the largest magnitude of factor * source; infinity when that or a result is not finite.
PUBLIC void adaloss_scale(
    const struct level *level, int threads, const struct scale_task *tasks, int64_t count, double *results) {
    for (int64_t i = 0; i < count; i++) {
        struct scaling scaling;
        scaling.level = level;
        scaling.task = &tasks[i];
        adaloss_in_parts(tasks[i].size, threads, scale_part, &scaling);
        uint32_t largest = largest_of(scaling.largest, adaloss_parts(tasks[i].size));
        results[i] = (double)as_float(smaller(largest, INFINITE));
    }
}

// ---- rounding

struct rounding {
    const struct level *level;
    const struct rounding_task *task;
    struct grid grid;
    uint32_t largest[MOST_PARTS];
    struct tally tallies[MOST_PARTS];
};

static void look_for_largest(void *context, int part, int64_t start, int64_t stop) {
    struct rounding *rounding = context;
    rounding->largest[part] = rounding->level->largest_finite(rounding->task->source, start, stop);
}

static void round_part(void *context, int part, int64_t start, int64_t stop) {
    struct rounding *rounding = context;
    rounding->tallies[part] = rounding->level->round(rounding->task, &rounding->grid, start, stop);
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The power of two of `Format.fitted_to` in ../../core/formats.py, as its exponent.
static int64_t power_to_fit(uint32_t largest, const struct grid *grid) {
    if (largest == 0) return 0;
    int64_t normal_exponent = grid->smallest_normal >> EXPONENT_SHIFT;
    int64_t above = (int64_t)largest - grid->largest + ((1 << EXPONENT_SHIFT) - 1);
    if (largest < 1 << EXPONENT_SHIFT) above = -((int64_t)1 << 40);  // subnormal bits do not count by exponents
    int64_t power = least(above >> EXPONENT_SHIFT, 254 - (grid->largest >> EXPONENT_SHIFT));
    power = least(power, 254 - (int64_t)grid->dropped - normal_exponent);
    return power > 1 - normal_exponent ? power : 1 - normal_exponent;
}

static void fit(struct grid *grid, uint32_t largest_found) {
    uint32_t shift = (uint32_t)power_to_fit(largest_found, grid) << EXPONENT_SHIFT;
    if (grid->overflow == grid->largest) grid->overflow += shift;
    grid->smallest_normal += shift;
    grid->largest += shift;
    grid->infinity = INFINITE;
}

PUBLIC void adaloss_round(
    const struct level *level, int threads, const struct rounding_task *task, struct statistics *result) {
    uint32_t beyond = as_bits((float)task->beyond_largest);
    struct rounding rounding;
    rounding.level = level;
    rounding.task = task;
    struct grid *grid = &rounding.grid;
    grid->smallest_normal = as_bits((float)task->smallest_normal);
    grid->dropped = (uint32_t)(EXPONENT_SHIFT - task->mantissa_bits);
    grid->largest = as_bits((float)task->largest);
    grid->overflow = grid->infinity = beyond;
    int parts = adaloss_parts(task->size);
    if (task->fitted) {
        adaloss_in_parts(task->size, threads, look_for_largest, &rounding);
        fit(grid, largest_of(rounding.largest, parts));
    }
    // A tie goes to the even neighbour: to `largest` itself if its last bit is 0, else beyond it.
    uint32_t odd = grid->largest >> grid->dropped & 1;
    grid->largest_kept = grid->largest + (1u << (grid->dropped - 1)) - odd;
    adaloss_in_parts(task->size, threads, round_part, &rounding);
    *result = together(rounding.tallies, parts);
}
