// SPDX-License-Identifier: Apache-2.0
// Numbers as bit patterns, whose unsigned order is the order of magnitudes: an integer maximum sees infinities
// and NaNs, a floating point one may not.
#ifndef ADALOSS_BITS_H
#define ADALOSS_BITS_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define SIGN 0x80000000u
#define MAGNITUDE 0x7FFFFFFFu
#define INFINITE 0x7F800000u  // float32's infinity, and the mask of its exponent
#define EXPONENT_SHIFT 23
#define HALF_MAGNITUDE 0x7FFFu
#define HALF_INFINITE 0x7C00u

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
static inline uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

static inline uint32_t largest_of(const uint32_t *bits, int64_t size) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < size; i++) largest = larger(largest, bits[i] & MAGNITUDE);
    return largest;
}

#endif
