// SPDX-License-Identifier: Apache-2.0
// One register's worth of numbers: 8 with AVX2, else 4, which every 64-bit processor has. The vector types of GCC and
// clang bring the operators. Wider registers gain nothing: float16 is converted more slowly, the rest waits for memory.
#ifndef ADALOSS_LANES_H
#define ADALOSS_LANES_H

#include "bits.h"

#ifdef __AVX2__
#include <immintrin.h>
enum { WIDTH = 8 };
#else
enum { WIDTH = 4 };
#endif

typedef uint32_t lanes __attribute__((vector_size(4 * WIDTH)));
typedef int32_t integers __attribute__((vector_size(4 * WIDTH)));
typedef float floats __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t halves __attribute__((vector_size(4 * WIDTH)));  // twice as many
typedef uint16_t few_halves __attribute__((vector_size(2 * WIDTH)));

// ---- float16

#define HALF_REBIAS ((127u - 15u) << EXPONENT_SHIFT)
#define HALF_SMALLEST_NORMAL 0x0400u
#define HALF_QUIET_NAN 0x7E00u
#define FLOAT32_HALF_NORMAL ((127u - 14u) << EXPONENT_SHIFT)  // 2^-14
#define FLOAT32_HALF_OVERFLOW 0x477FF000u                     // 65520, halfway to where the next number would be

static inline uint32_t widened(uint16_t half) {
    uint32_t magnitude = half & HALF_MAGNITUDE;
    uint32_t bits = (magnitude << 13) + HALF_REBIAS;
    if (magnitude >= HALF_INFINITE) bits += HALF_REBIAS;
    if (magnitude < HALF_SMALLEST_NORMAL) bits = as_bits((float)(int32_t)magnitude * 0x1p-24f);
    return bits | (uint32_t)(half & 0x8000u) << 16;
}

// ---- registers

static inline lanes load(const uint32_t *from) {
    lanes value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline halves load_halves(const uint16_t *from) {
    halves value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline void store(uint32_t *to, lanes value) { memcpy(to, &value, sizeof value); }

static inline lanes all(uint32_t value) { return value - (lanes){0}; }
static inline halves all_halves(uint16_t value) { return value - (halves){0}; }

static inline lanes count_zeros(lanes count, lanes x) { return count - (lanes)(x == 0); }
static inline halves count_zero_halves(halves count, halves x) { return count - (halves)(x == 0); }

#ifdef __AVX2__

static inline lanes larger_of(lanes a, lanes b) { return (lanes)_mm256_max_epu32((__m256i)a, (__m256i)b); }
static inline lanes smaller_of(lanes a, lanes b) { return (lanes)_mm256_min_epu32((__m256i)a, (__m256i)b); }
static inline halves larger_half_of(halves a, halves b) { return (halves)_mm256_max_epu16((__m256i)a, (__m256i)b); }
static inline halves smaller_half_of(halves a, halves b) { return (halves)_mm256_min_epu16((__m256i)a, (__m256i)b); }

static inline floats plus_square(floats sum, floats x) {
    return (floats)_mm256_fmadd_ps((__m256)x, (__m256)x, (__m256)sum);
}

static inline lanes load_widened(const uint16_t *from) {
    return (lanes)_mm256_cvtph_ps(_mm_loadu_si128((const void *)from));
}

static inline void store_narrowed(uint16_t *to, lanes value) {
    _mm_storeu_si128((void *)to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
}

#else

static inline lanes chosen(lanes condition, lanes yes, lanes no) { return (yes & condition) | (no & ~condition); }

static inline halves chosen_halves(halves condition, halves yes, halves no) {
    return (yes & condition) | (no & ~condition);
}

static inline lanes larger_of(lanes a, lanes b) { return chosen((lanes)(a > b), a, b); }
static inline lanes smaller_of(lanes a, lanes b) { return chosen((lanes)(a < b), a, b); }
static inline halves larger_half_of(halves a, halves b) { return chosen_halves((halves)(a > b), a, b); }
static inline halves smaller_half_of(halves a, halves b) { return chosen_halves((halves)(a < b), a, b); }

static inline floats plus_square(floats sum, floats x) { return sum + x * x; }

static inline lanes load_widened(const uint16_t *from) {
    few_halves x;
    memcpy(&x, from, sizeof x);
    lanes half = __builtin_convertvector(x, lanes), magnitude = half & HALF_MAGNITUDE;
    lanes normal = (magnitude << 13) + HALF_REBIAS;
    lanes infinite = (lanes)(magnitude >= HALF_INFINITE) & HALF_REBIAS;
    lanes subnormal = (lanes)(__builtin_convertvector((integers)magnitude, floats) * 0x1p-24f);
    lanes is_subnormal = (lanes)(magnitude < HALF_SMALLEST_NORMAL);
    return chosen(is_subnormal, subnormal, normal + infinite) | (half & 0x8000u) << 16;
}

static inline void store_narrowed(uint16_t *to, lanes value) {
    lanes magnitude = value & MAGNITUDE;
    lanes odd = magnitude >> 13 & 1;
    lanes half = (magnitude - HALF_REBIAS + 0xFFF + odd) >> 13;
    // In [0.5, 1) float32 numbers are multiples of 2^-24, float16's smallest subnormal.
    lanes subnormal = (lanes)((floats)magnitude + 0.5f) - as_bits(0.5f);
    half = chosen((lanes)(magnitude < FLOAT32_HALF_NORMAL), subnormal, half);
    half = chosen((lanes)(magnitude >= FLOAT32_HALF_OVERFLOW), all(HALF_INFINITE), half);
    half = chosen((lanes)(magnitude > INFINITE), all(HALF_QUIET_NAN), half);
    few_halves narrow = __builtin_convertvector(half | (value & SIGN) >> 16, few_halves);
    memcpy(to, &narrow, sizeof narrow);
}

#endif

// ---- across a register, once per block

static inline uint32_t largest_lane(lanes x) {
    uint32_t largest = 0;
    for (int i = 0; i < WIDTH; i++) largest = larger(largest, x[i]);
    return largest;
}

static inline uint32_t smallest_lane(lanes x) {
    uint32_t smallest = UINT32_MAX;
    for (int i = 0; i < WIDTH; i++) smallest = smaller(smallest, x[i]);
    return smallest;
}

static inline uint32_t sum_of_lanes(lanes x) {
    uint32_t sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += x[i];
    return sum;
}

static inline lanes even_halves(halves x) { return (lanes)x & 0xFFFFu; }
static inline lanes odd_halves(halves x) { return (lanes)x >> 16; }

static inline uint32_t largest_half(halves x) { return largest_lane(larger_of(even_halves(x), odd_halves(x))); }
static inline uint32_t smallest_half(halves x) { return smallest_lane(smaller_of(even_halves(x), odd_halves(x))); }
static inline uint32_t sum_of_halves(halves x) { return sum_of_lanes(even_halves(x) + odd_halves(x)); }

#endif
