// SPDX-License-Identifier: Apache-2.0
// float16 as float32 sees it, and one number from float16 to float32.
#ifndef ADALOSS_HALVES_H
#define ADALOSS_HALVES_H

#include "bits.h"

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

#endif
