// SPDX-License-Identifier: Apache-2.0
// Rounding to one of two neighbours, up with the distance from the lower one as probability. A key of 64 bits and
// the index of an element decide: the same bits as in ../random_rounding.py and in ../adaloss.cu.
#ifndef ADALOSS_RANDOM_ROUNDING_H
#define ADALOSS_RANDOM_ROUNDING_H

#include "adaloss.h"
#include "bits.h"

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

// Of a magnitude that is no larger than the format's largest number.
static inline uint32_t round_at_random(uint32_t magnitude, uint32_t random, const struct grid *grid) {
    uint32_t normal = normal_at_random(magnitude, random, grid);
    uint32_t subnormal = subnormal_at_random(smaller(magnitude, grid->smallest_normal), random, grid);
    return magnitude >= grid->smallest_normal ? normal : subnormal;
}

#endif
