// SPDX-License-Identifier: Apache-2.0
// Multiplication by a factor, in float32 whatever the storage; the largest magnitude that it computed shows
// infinities and NaNs.
#include "adaloss.h"
#include "lanes.h"

// Types of source and target are constants where this is inlined.
struct shape {
    bool from_half, to_half, accumulate;
};

struct largest {
    lanes product, result;
};

static inline __attribute__((always_inline)) void scale_lanes(
    const void *source, void *target, int64_t i, floats factor, struct shape shape, struct largest *largest) {
    lanes x = shape.from_half ? load_widened((const uint16_t *)source + i) : load((const uint32_t *)source + i);
    floats product = (floats)x * factor;
    floats result = shape.accumulate ? (floats)load((uint32_t *)target + i) + product : product;
    if (shape.to_half)
        store_narrowed((uint16_t *)target + i, (lanes)result);
    else
        store((uint32_t *)target + i, (lanes)result);
    largest->product = larger_of(largest->product, (lanes)product & MAGNITUDE);
    if (shape.accumulate) largest->result = larger_of(largest->result, (lanes)result & MAGNITUDE);
}

static inline __attribute__((always_inline)) uint32_t scale_as(
    const struct scale_task *task, int64_t start, int64_t stop, struct shape shape) {
    size_t in = shape.from_half ? 2 : 4, out = shape.to_half ? 2 : 4;
    const char *source = (const char *)task->source + start * in;
    char *target = (char *)task->target + start * out;
    int64_t size = stop - start, whole = size - size % WIDTH, rest = size - whole;
    floats factor = (float)task->factor - (floats){0};
    struct largest largest = {all(0), all(0)};
    for (int64_t i = 0; i < whole; i += WIDTH) scale_lanes(source, target, i, factor, shape, &largest);
    if (rest) {  // in registers of its own, filled up with zeros
        uint32_t last[WIDTH] = {0}, scaled[WIDTH] = {0};
        memcpy(last, source + whole * in, rest * in);
        if (shape.accumulate) memcpy(scaled, target + whole * out, rest * out);
        scale_lanes(last, scaled, 0, factor, shape, &largest);
        memcpy(target + whole * out, scaled, rest * out);
    }
    return largest_lane(largest.result) < INFINITE ? largest_lane(largest.product) : INFINITE;
}

// The largest magnitude of factor * source; an infinity's or more if that or a result is not finite.
uint32_t OF_LEVEL(scale)(const struct scale_task *task, int64_t start, int64_t stop) {
    if (task->target_is_half) {
        if (task->source_is_half) return scale_as(task, start, stop, (struct shape){true, true, false});
        return scale_as(task, start, stop, (struct shape){false, true, false});
    }
    if (task->accumulate) {
        if (task->source_is_half) return scale_as(task, start, stop, (struct shape){true, false, true});
        return scale_as(task, start, stop, (struct shape){false, false, true});
    }
    if (task->source_is_half) return scale_as(task, start, stop, (struct shape){true, false, false});
    return scale_as(task, start, stop, (struct shape){false, false, false});
}
