// SPDX-License-Identifier: Apache-2.0
// Features of this x86 processor that the operating system supports. (`__builtin_cpu_supports` of `zig cc` is always
// false.)
#ifndef ADALOSS_PROCESSOR_H
#define ADALOSS_PROCESSOR_H

#include <cpuid.h>
#include <stdbool.h>
#include <stdint.h>

enum { SAVES_REGISTERS = 1 << 27 };                       // leaf 1, ecx: xgetbv may be called
enum { SAVES_AVX = 0x6, SAVES_AVX512 = 0xE6 };            // XCR0
enum { FMA = 1 << 12, AVX = 1 << 28, F16C = 1 << 29 };    // leaf 1, ecx
enum { AVX2 = 1 << 5, AVX512F = 1 << 16, AVX512DQ = 1 << 17, AVX512BW = 1 << 30 };  // leaf 7, ebx
#define AVX512VL (1u << 31)

struct processor {
    bool avx2, avx512;  // with all features of the level of this name
};

static inline bool has(uint32_t features, uint32_t wanted) { return (features & wanted) == wanted; }

static inline struct processor this_processor(void) {
    uint32_t eax, ebx, ecx, edx, saved, leaf1, leaf7;
    if (!__get_cpuid(1, &eax, &ebx, &leaf1, &edx) || !has(leaf1, SAVES_REGISTERS)) return (struct processor){0};
    if (!__get_cpuid_count(7, 0, &eax, &leaf7, &ecx, &edx)) return (struct processor){0};
    __asm__("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0));
    bool avx2 = has(saved, SAVES_AVX) && has(leaf1, AVX | FMA | F16C) && has(leaf7, AVX2);
    bool avx512 = has(saved, SAVES_AVX512) && has(leaf7, AVX512F | AVX512DQ | AVX512BW | AVX512VL);
    return (struct processor){avx2, avx2 && avx512};
}

#endif
