// SPDX-License-Identifier: Apache-2.0
// Public functions. They are stateless: callers provide the level, the number of threads and memory for the results.
#define _POSIX_C_SOURCE 200809L  // sigset_t

#include <pthread.h>
#include <signal.h>
#include <stddef.h>

#include "adaloss.h"
#include "bits.h"

// ---- levels

extern const struct level adaloss_level_baseline, adaloss_level_avx2, adaloss_level_avx512;

#ifdef __x86_64__
#include <cpuid.h>

// Features that this processor has and the operating system supports. (`__builtin_cpu_supports` of `zig cc` is always
// false.)
enum { SAVES_REGISTERS = 1 << 27 };                       // leaf 1, ecx: xgetbv may be called
enum { SAVES_AVX = 0x6, SAVES_AVX512 = 0xE6 };            // XCR0
enum { FMA = 1 << 12, AVX = 1 << 28, F16C = 1 << 29 };    // leaf 1, ecx
enum { AVX2 = 1 << 5, AVX512F = 1 << 16, AVX512DQ = 1 << 17, AVX512BW = 1 << 30 };  // leaf 7, ebx
#define AVX512VL (1u << 31)

static bool has(uint32_t features, uint32_t wanted) { return (features & wanted) == wanted; }

// Write the levels beyond the baseline that this processor can run, the fastest first; return their number.
static int faster_levels(const struct level **levels) {
    uint32_t eax, ebx, ecx, edx, saved, leaf1, leaf7;
    if (!__get_cpuid(1, &eax, &ebx, &leaf1, &edx) || !has(leaf1, SAVES_REGISTERS)) return 0;
    if (!__get_cpuid_count(7, 0, &eax, &leaf7, &ecx, &edx)) return 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0));
    if (!has(saved, SAVES_AVX) || !has(leaf1, AVX | FMA | F16C) || !has(leaf7, AVX2)) return 0;
    int count = 0;
    if (has(saved, SAVES_AVX512) && has(leaf7, AVX512F | AVX512DQ | AVX512BW | AVX512VL))
        levels[count++] = &adaloss_level_avx512;
    levels[count++] = &adaloss_level_avx2;
    return count;
}
#else
static int faster_levels(const struct level **levels) {
    (void)levels;
    return 0;
}
#endif

// The level number `place` of those that this processor can run, the fastest first; NULL beyond the last.
PUBLIC const struct level *adaloss_level(int place) {
    const struct level *runnable[3];
    int count = faster_levels(runnable);
    runnable[count++] = &adaloss_level_baseline;
    return 0 <= place && place < count ? runnable[place] : NULL;
}

PUBLIC const char *adaloss_level_name(const struct level *level) { return level->name; }

// SOURCES is the digest of the compiled sources, see __init__.py.
PUBLIC const char *adaloss_sources(void) { return SOURCES; }

// ---- threads: each part of a large array is processed by one of them. They live as long as one call: there is no pool
// that a fork would leave without its threads, and nothing to shut down. Starting one takes about 20 µs, so each must
// have more to do than that.

enum { LEAST_FOR_PARTS = 1 << 18, LEAST_PER_THREAD = 1 << 20, MOST_PARTS = 64 };  // the first two: elements

struct work {  // on one array
    const struct level *level;
    const void *task;
    int64_t size;
    void (*do_part)(struct work *work, int part, int64_t start, int64_t stop);
    int parts, next;   // the number of parts does not depend on that of threads
    struct grid grid;  // for rounding
    // Results of the parts.
    uint32_t largest[MOST_PARTS];
    struct tally tallies[MOST_PARTS];
};

// How many of `threads` threads are worth their start for an array of this size.
PUBLIC int adaloss_useful_threads(int64_t size, int threads) {
    int64_t most = size / LEAST_PER_THREAD < MOST_PARTS ? size / LEAST_PER_THREAD : MOST_PARTS;
    if (most > threads) most = threads;
    return most > 1 ? (int)most : 1;
}

static void *take_parts(void *of_work) {
    struct work *work = of_work;
    int64_t blocks = (work->size + BLOCK - 1) / BLOCK;
    int part;
    while ((part = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->parts) {
        int64_t start = blocks * part / work->parts * BLOCK, stop = blocks * (part + 1) / work->parts * BLOCK;
        work->do_part(work, part, start, stop < work->size ? stop : work->size);
    }
    return NULL;
}

// Call `do_part` for each part, in no order, by up to `threads` threads; return when all are done.
static void do_parts(
    struct work *work, int64_t size, int threads, void (*do_part)(struct work *, int, int64_t, int64_t)) {
    work->size = size;
    work->do_part = do_part;
    work->parts = size < LEAST_FOR_PARTS ? 1 : MOST_PARTS;
    work->next = 0;
    int wanted = adaloss_useful_threads(size, threads), started = 0;
    pthread_t helpers[MOST_PARTS];
    if (wanted > 1) {
        sigset_t every, before;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);  // signals are for the caller's threads
        while (started < wanted - 1 && pthread_create(&helpers[started], NULL, take_parts, work) == 0) started++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    take_parts(work);  // all that no helper takes, if none could be started
    while (started > 0) pthread_join(helpers[--started], NULL);
}

// ---- statistics

static void measure_part(struct work *work, int part, int64_t start, int64_t stop) {
    work->tallies[part] = work->level->measure(work->task, start, stop);
}

// Statistics of an array from those of its parts, added in their order.
static struct statistics statistics_of(const struct work *work) {
    struct statistics all = {0};
    uint32_t largest = 0, below_smallest = UINT32_MAX;
    for (int part = 0; part < work->parts; part++) {
        const struct tally *tally = &work->tallies[part];
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

PUBLIC void adaloss_statistics(
    const struct level *level, int threads, const struct statistics_task *tasks, int64_t count,
    struct statistics *results) {
    struct work work;
    work.level = level;
    for (int64_t i = 0; i < count; i++) {
        work.task = &tasks[i];
        do_parts(&work, tasks[i].size, threads, measure_part);
        results[i] = statistics_of(&work);
    }
}

// ---- scaling

static void scale_part(struct work *work, int part, int64_t start, int64_t stop) {
    work->largest[part] = work->level->scale(work->task, start, stop);
}

// `results`: for each task the largest magnitude of factor * source; infinity when that or a result is not finite.
PUBLIC void adaloss_scale(
    const struct level *level, int threads, const struct scale_task *tasks, int64_t count, double *results) {
    struct work work;
    work.level = level;
    for (int64_t i = 0; i < count; i++) {
        work.task = &tasks[i];
        do_parts(&work, tasks[i].size, threads, scale_part);
        uint32_t largest = largest_of(work.largest, work.parts);
        results[i] = (double)as_float(smaller(largest, INFINITE));
    }
}

// ---- rounding

static void largest_of_part(struct work *work, int part, int64_t start, int64_t stop) {
    const struct rounding_task *task = work->task;
    work->largest[part] = work->level->largest_finite(task->source, start, stop);
}

static void round_part(struct work *work, int part, int64_t start, int64_t stop) {
    work->tallies[part] = work->level->round(work->task, &work->grid, start, stop);
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Multiply the format's numbers by the smallest power of two with which they reach `largest`, as far as float32 holds
// the products.
static void fit(struct grid *grid, uint32_t largest) {
    int64_t normal_exponent = grid->smallest_normal >> EXPONENT_SHIFT, power = 0;
    if (largest > 0) {
        power = ((int64_t)largest - grid->largest + ((1 << EXPONENT_SHIFT) - 1)) >> EXPONENT_SHIFT;
        // Subnormal bit patterns do not grow by 1 << EXPONENT_SHIFT per power of two: less than any exponent.
        if (largest < 1 << EXPONENT_SHIFT) power = -512;
        power = least(power, 254 - (grid->largest >> EXPONENT_SHIFT));
        power = least(power, 254 - (int64_t)grid->dropped - normal_exponent);
        if (power < 1 - normal_exponent) power = 1 - normal_exponent;
    }
    uint32_t shift = (uint32_t)power << EXPONENT_SHIFT;
    if (grid->overflow == grid->largest) grid->overflow += shift;
    grid->smallest_normal += shift;
    grid->largest += shift;
    grid->infinity = INFINITE;
}

PUBLIC void adaloss_round(
    const struct level *level, int threads, const struct rounding_task *task, struct statistics *result) {
    struct work work;
    work.level = level;
    work.task = task;
    struct grid *grid = &work.grid;
    grid->smallest_normal = as_bits((float)task->smallest_normal);
    grid->dropped = (uint32_t)(EXPONENT_SHIFT - task->mantissa_bits);
    grid->largest = as_bits((float)task->largest);
    grid->overflow = grid->infinity = as_bits((float)task->beyond_largest);
    if (task->fitted) {
        do_parts(&work, task->size, threads, largest_of_part);
        fit(grid, largest_of(work.largest, work.parts));
    }
    // A tie goes to the even neighbour: to `largest` itself if its last bit is 0, else beyond it.
    uint32_t odd = grid->largest >> grid->dropped & 1;
    grid->largest_kept = grid->largest + (1u << (grid->dropped - 1)) - odd;
    do_parts(&work, task->size, threads, round_part);
    *result = statistics_of(&work);
}

// ---- addresses of nnabla arrays: ../addresses.py looks the method up, and decides when it may be called

// nbla::NdArray::data_ptr(nbla::dtypes, const nbla::Context &, bool); numbers of dtypes are NumPy's.
typedef const void *(*data_ptr)(void *array, int dtype, const void *context, bool write_only);
enum { FLOAT = 11, HALF = 23 };

// Replace the addresses of the C++ objects `arrays` by those of their memory: float16 where `halves`, which may be
// NULL, is true, else float32.
PUBLIC void adaloss_addresses(data_ptr address_of, const void *context, int64_t *arrays, int64_t count,
                              const bool *halves, bool write_only) {
    for (int64_t i = 0; i < count; i++) {
        int dtype = halves != NULL && halves[i] ? HALF : FLOAT;
        arrays[i] = (int64_t)address_of((void *)arrays[i], dtype, context, write_only);
    }
}
