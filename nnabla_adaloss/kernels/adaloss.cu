// SPDX-License-Identifier: Apache-2.0
//
// One pass over memory each: statistics, histogram of exponents, scaling, unscaling, rounding to a storage format.
//
// Every kernel takes a list of tasks, one per array, and distributes its blocks among them in proportion to size.
// Numbers are float or half in memory and float in registers. As unsigned integers, their bit patterns without the
// sign are in the order of their magnitudes: an integer maximum sees infinities and NaNs, fmaxf does not.
//
// Reductions are reproducible bit for bit: threads, then warps, then blocks are added in a fixed order, the blocks
// by whichever of them happens to finish last.
//
// The host code reads the structs and constants from this file.

#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef THREADS_PER_BLOCK
#define THREADS_PER_BLOCK 256
#endif

constexpr u32 THREADS = THREADS_PER_BLOCK;
constexpr u32 RESIDENT_THREADS = 1536;  // per multiprocessor: limits registers so that they fit
constexpr u32 WARP = 32;
constexpr u32 WARPS = THREADS / WARP;

constexpr u32 MAX_TASKS = 96;  // they are a kernel argument, which may have 4096 bytes
constexpr u32 EXPONENT_BINS = 256;

constexpr u32 SOURCE_IS_HALF = 1;  // flags of a task
constexpr u32 ACCUMULATE = 2;
constexpr u32 TARGET_IS_HALF = 4;

struct Task {
    u64 source;
    u64 target;
    u64 size;
    u32 row;          // row of its results
    u32 first_block;  // its blocks end at the next task's first
    float factor;
    u32 flags;
};

struct Tasks {
    Task task[MAX_TASKS];
    u32 count;
};

struct Row {
    u64 count;
    double sum;
    double sum_of_squares;
    u64 zeros;
    u64 nonfinite;
    u64 underflowed;
    u64 overflowed;
    u32 largest;           // bit pattern of the largest finite magnitude
    u32 negated_smallest;  // 0 - that of the smallest non-zero one: a maximum that ignores zeros
};

struct Format {
    u32 mantissa_bits;
    float smallest_normal;
    float max;
    float beyond_max;  // result of larger numbers: infinity, NaN, or max
    u32 fitted;        // true: scale by the power of two that fits the largest of the array
    u32 at_random;     // true: round to either neighbour, with this key of the random bits
    u32 key_low;
    u32 key_high;
};

constexpr u32 SIGN = 0x80000000u;
constexpr u32 MAGNITUDE = 0x7fffffffu;
constexpr u32 EXPONENT = 0x7f800000u;  // also the bit pattern of infinity

// Squares of numbers between these neither overflow nor underflow, nor do sums of a few of them.
constexpr u32 SAFE_TO_SQUARE_FROM = (127 - 50) << 23;
constexpr u32 SAFE_TO_SQUARE_TO = (127 + 50) << 23;

// ---- IEEE 754 floats. CuPy compiles with -ftz=true, which cannot be overridden: subnormal numbers become zeros in
// every operation on floats, __fmul_rn and conversions to double included. Inline PTX is not affected.

#ifndef IEEE_ARITHMETIC  // a host that runs these kernels brings its own
__device__ inline float multiply(float a, float b) {
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}

__device__ inline float add(float a, float b) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}

__device__ inline float subtract(float a, float b) {
    float difference;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
    return difference;
}

// a * b + c, rounded once.
__device__ inline float multiply_add(float a, float b, float c) {
    float result;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
}

__device__ inline double widen(float value) {
    double wide;
    asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(value));
    return wide;
}
#endif

// ---- memory: N elements at an index that is a multiple of N, as floats. 16 bytes at a time when N > 1, 8 for halves
// that become floats.

// Elements of a type in 16 bytes.
template <typename T>
constexpr int PACK = 16 / sizeof(T);

template <int N>
struct alignas(N % 4 == 0 ? 16 : 4) Values {
    float of[N];
};

// Halves as they are in memory: two to a word, and a zero beside a single one.
template <int N>
struct alignas(N == 1 ? 4 : 2 * N) Halves {
    u32 pair[(N + 1) / 2];
};

__device__ inline float float_of_half(u32 bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

template <int N>
__device__ inline float float_at(const Halves<N>& halves, int i) {
    return float_of_half(halves.pair[i / 2] >> (i % 2 * 16) & 0xffffu);
}

__device__ inline void load(const __half* source, Halves<1>& halves) {
    halves.pair[0] = *reinterpret_cast<const unsigned short*>(source);
}

// For targets of floats: each thread stores 16 bytes, adjacent to those of the previous thread.
__device__ inline void load(const __half* source, Halves<4>& halves) {
    *reinterpret_cast<uint2*>(halves.pair) = *reinterpret_cast<const uint2*>(source);
}

__device__ inline void load(const __half* source, Halves<8>& halves) {
    *reinterpret_cast<uint4*>(halves.pair) = *reinterpret_cast<const uint4*>(source);
}

template <int N>
__device__ inline void load(const __half* source, Values<N>& values) {
    Halves<N> halves;
    load(source, halves);
    for (int i = 0; i < N; ++i) {
        values.of[i] = float_at(halves, i);
    }
}

__device__ inline void load(const float* source, Values<1>& values) { values.of[0] = *source; }

template <int N>
__device__ inline void load(const float* source, Values<N>& values) {
    for (int i = 0; i < N; i += 4) {
        *reinterpret_cast<float4*>(values.of + i) = *reinterpret_cast<const float4*>(source + i);
    }
}

// The source of a task, of type T; its elements as floats, or with Kind = Halves as they are.
template <typename T, template <int> class Kind = Values>
struct Source {
    const T* start;

    explicit __device__ inline Source(const Task& task) : start(reinterpret_cast<const T*>(task.source)) {}

    template <int N>
    __device__ inline Kind<N> fetch(u64 i) const {
        Kind<N> elements;
        load(start + i, elements);
        return elements;
    }
};

__device__ inline void store(float* target, const Values<1>& values) { *target = values.of[0]; }

__device__ inline void store(__half* target, const Values<1>& values) { *target = __float2half_rn(values.of[0]); }

template <int N>
__device__ inline void store(float* target, const Values<N>& values) {
    for (int i = 0; i < N; i += 4) {
        *reinterpret_cast<float4*>(target + i) = *reinterpret_cast<const float4*>(values.of + i);
    }
}

__device__ inline void store(__half* target, const Values<8>& values) {
    Halves<8> halves;
    for (int i = 0; i < 4; ++i) {
        const u32 low = __half_as_ushort(__float2half_rn(values.of[2 * i]));
        const u32 high = __half_as_ushort(__float2half_rn(values.of[2 * i + 1]));
        halves.pair[i] = low | high << 16;
    }
    *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(halves.pair);
}

// ---- distribution of work among threads

// The part of a task that one block works on: every `blocks`-th stretch of THREADS packs.
struct Part {
    const Task& task;
    u32 index;  // of the task
    u32 block;
    u32 blocks;
};

__device__ inline Part part_of_block(const Tasks& tasks) {
    u32 low = 0, high = tasks.count;  // `low` becomes the last task whose first block is not beyond this one
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (tasks.task[middle].first_block <= blockIdx.x) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const u32 first = tasks.task[low].first_block;
    const u32 end = low + 1 < tasks.count ? tasks.task[low + 1].first_block : gridDim.x;
    return Part{tasks.task[low], low, blockIdx.x - first, end - first};
}

// For packs of N = WIDTH elements at i calls `body.use(i, source.fetch<N>(i))`, and the same with N = 1 for what is
// left over at the end, or for every element when an address is not a multiple of 16. Two packs are fetched before
// the first is used, to have more reads under way. Indices are 64 bits wide: arrays may have 2^31 elements.
template <int WIDTH, typename From, typename Body>
__device__ inline void for_each_element(const Part& part, const From& source, Body& body) {
    const Task& task = part.task;
    const bool aligned = ((task.source | task.target) & 15) == 0;
    const u64 first = static_cast<u64>(part.block) * THREADS + threadIdx.x;
    const u64 stride = static_cast<u64>(part.blocks) * THREADS;
    const u64 packs = aligned ? task.size / WIDTH : 0;
    u64 pack = first;
    for (; pack + stride < packs; pack += 2 * stride) {
        const auto one = source.template fetch<WIDTH>(pack * WIDTH);
        const auto other = source.template fetch<WIDTH>((pack + stride) * WIDTH);
        body.use(pack * WIDTH, one);
        body.use((pack + stride) * WIDTH, other);
    }
    if (pack < packs) {
        body.use(pack * WIDTH, source.template fetch<WIDTH>(pack * WIDTH));
    }
    for (u64 i = packs * WIDTH + first; i < task.size; i += stride) {
        body.use(i, source.template fetch<1>(i));
    }
}

// ---- statistics

__device__ inline u32 magnitude_of(float value) { return __float_as_uint(value) & MAGNITUDE; }

__device__ inline bool can_square(u32 largest) {
    return largest == 0 || (largest >= SAFE_TO_SQUARE_FROM && largest <= SAFE_TO_SQUARE_TO);
}

__device__ inline void add_row(Row& row, const Row& other) {
    row.sum += other.sum;
    row.sum_of_squares += other.sum_of_squares;
    row.zeros += other.zeros;
    row.nonfinite += other.nonfinite;
    row.underflowed += other.underflowed;
    row.overflowed += other.overflowed;
    row.largest = max(row.largest, other.largest);
    row.negated_smallest = max(row.negated_smallest, other.negated_smallest);
}

// Statistics of one thread: a row in fewer registers.
struct Tally {
    double sum;
    double sum_of_squares;
    u32 zeros;
    u32 nonfinite;
    u32 underflowed;
    u32 overflowed;
    u32 largest;
    u32 negated_smallest;
};

// Adds a number that may be large, tiny or not finite; the caller counts zeros.
__device__ inline void add_in_double(Tally& tally, float number) {
    const u32 magnitude = magnitude_of(number);
    if (magnitude >= EXPONENT) {
        tally.nonfinite += 1;
        return;
    }
    const double value = widen(number);
    tally.sum += value;
    tally.sum_of_squares += value * value;
    tally.largest = max(tally.largest, magnitude);
    tally.negated_smallest = max(tally.negated_smallest, 0u - magnitude);
}

// Adds a few numbers up in float, and the sum to the tally in double: on most devices doubles are slow.
template <int N>
__device__ inline void add_values(Tally& tally, const Values<N>& values) {
    float sum = 0.0f, squares = 0.0f;
    u32 largest = 0, negated_smallest = 0;
    for (int i = 0; i < N; ++i) {
        const u32 magnitude = magnitude_of(values.of[i]);
        largest = max(largest, magnitude);
        negated_smallest = max(negated_smallest, 0u - magnitude);
        tally.zeros += magnitude == 0;
        sum = add(sum, values.of[i]);
        squares = multiply_add(values.of[i], values.of[i], squares);
    }
    if (can_square(largest)) {
        tally.sum += widen(sum);
        tally.sum_of_squares += widen(squares);
        tally.largest = max(tally.largest, largest);
        tally.negated_smallest = max(tally.negated_smallest, negated_smallest);
        return;
    }
    for (int i = 0; i < N; ++i) {
        add_in_double(tally, values.of[i]);
    }
}

template <typename Value>
__device__ inline Value from_lane_above(Value value, u32 distance) {
    return __shfl_down_sync(0xffffffffu, value, distance);
}

// The sum of the rows of all threads of the block, in thread 0.
__device__ inline Row add_up_block(Row row) {
    __shared__ Row of_warp[WARPS];
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) {
        Row other;
        other.sum = from_lane_above(row.sum, distance);
        other.sum_of_squares = from_lane_above(row.sum_of_squares, distance);
        other.zeros = from_lane_above(row.zeros, distance);
        other.nonfinite = from_lane_above(row.nonfinite, distance);
        other.underflowed = from_lane_above(row.underflowed, distance);
        other.overflowed = from_lane_above(row.overflowed, distance);
        other.largest = from_lane_above(row.largest, distance);
        other.negated_smallest = from_lane_above(row.negated_smallest, distance);
        add_row(row, other);
    }
    __syncthreads();  // of_warp may still be read from a previous call
    if (threadIdx.x % WARP == 0) {
        of_warp[threadIdx.x / WARP] = row;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 warp = 1; warp < WARPS; ++warp) {
            add_row(row, of_warp[warp]);
        }
    }
    return row;
}

// Writes the sum of what all threads of all blocks of a task have seen to its row. Blocks hand over through `partial`,
// a row per block of the grid; `finished` counts those of each task that have, and is left at zero.
__device__ inline void add_up_task(const Tally& tally, const Part& part, Row* rows, Row* partial, u32* finished) {
    __shared__ bool is_last;
    partial += part.task.first_block;
    finished += part.index;
    Row row = {0, tally.sum, tally.sum_of_squares, tally.zeros, tally.nonfinite, tally.underflowed, tally.overflowed,
               tally.largest, tally.negated_smallest};
    row = add_up_block(row);
    if (part.blocks > 1) {
        if (threadIdx.x == 0) {
            partial[part.block] = row;
            __threadfence();  // first the row, then the news of it
            is_last = atomicAdd(finished, 1u) == part.blocks - 1;
            __threadfence();  // first the news of all rows, then the rows
        }
        __syncthreads();
        if (!is_last) {
            return;
        }
        __threadfence();  // this multiprocessor's cache of other rows may be stale
        row = Row();
        for (u32 block = threadIdx.x; block < part.blocks; block += THREADS) {
            add_row(row, partial[block]);
        }
        row = add_up_block(row);
    }
    if (threadIdx.x == 0) {
        row.count = part.task.size;
        rows[part.task.row] = row;
        *finished = 0;
    }
}

template <bool COUNT_EXPONENTS>
struct Measure {
    Tally tally;
    u32* counts;  // of elements with each exponent, if COUNT_EXPONENTS

    template <int N>
    __device__ inline void use(u64, const Values<N>& values) {
        add_values(tally, values);
        if (COUNT_EXPONENTS) {
            for (int k = 0; k < N; ++k) {
                atomicAdd(counts + (magnitude_of(values.of[k]) >> 23), 1u);
            }
        }
    }
};

template <typename T, bool COUNT_EXPONENTS>
__device__ inline Tally measured(const Part& part, u32* counts = nullptr) {
    Measure<COUNT_EXPONENTS> body = {Tally(), counts};
    for_each_element<PACK<T>>(part, Source<T>(part.task), body);
    return body.tally;
}

constexpr u32 HALF_SIGNS = 0x80008000u;  // of two halves in one word
constexpr u32 HALF_MAGNITUDES = 0x7fff7fffu;
constexpr u32 HALF_INFINITY = 0x7c00u;

__device__ inline u32 larger_half(u32 pair) { return max(pair & 0xffffu, pair >> 16); }

// Measures two halves with one integer instruction where it can: element by element, these and not memory would be what
// takes the time. Squares of finite halves, and sums of eight, stay in the normal range of floats.
struct MeasureHalves {
    Tally tally;
    u32 largest;           // of each of both halves of the words, the largest finite magnitude
    u32 negated_smallest;  // and 0x8000 - the smallest non-zero one

    template <int N>
    __device__ inline void use(u64, const Halves<N>& halves) {
        u32 here = 0, negated = 0, zeros = 0;
        float values[N], sum = 0.0f, squares = 0.0f;
        for (int i = 0; i < (N + 1) / 2; ++i) {
            const u32 magnitudes = halves.pair[i] & HALF_MAGNITUDES;
            const u32 differences = HALF_SIGNS - magnitudes;  // nothing is borrowed from the half above
            here = __vmaxu2(here, magnitudes);
            negated = __vmaxu2(negated, differences & HALF_MAGNITUDES);  // of a zero: 0
            zeros += (differences & HALF_SIGNS) >> 15;
        }
        for (int i = 0; i < N; ++i) {
            values[i] = float_at(halves, i);
            sum = add(sum, values[i]);
            squares = multiply_add(values[i], values[i], squares);
        }
        tally.zeros += N == 1 ? zeros & 1u : (zeros & 0xffffu) + (zeros >> 16);
        if (larger_half(here) < HALF_INFINITY) {
            tally.sum += widen(sum);
            tally.sum_of_squares += widen(squares);
            largest = __vmaxu2(largest, here);
            negated_smallest = __vmaxu2(negated_smallest, negated);
            return;
        }
        for (int i = 0; i < N; ++i) {
            add_in_double(tally, values[i]);
        }
    }
};

__device__ inline Tally measured_halves(const Part& part) {
    MeasureHalves body = {Tally(), 0, 0};
    for_each_element<PACK<__half>>(part, Source<__half, Halves>(part.task), body);
    const u32 negated = larger_half(body.negated_smallest);
    Tally tally = body.tally;
    tally.largest = max(tally.largest, __float_as_uint(float_of_half(larger_half(body.largest))));
    if (negated != 0) {
        tally.negated_smallest = max(tally.negated_smallest, 0u - __float_as_uint(float_of_half(0x8000u - negated)));
    }
    return tally;
}

// Statistics of every source, in rows[task.row].
extern "C" __global__ __launch_bounds__(THREADS, RESIDENT_THREADS / THREADS) void statistics(const Tasks tasks, Row* rows, Row* partial, u32* finished) {
    const Part part = part_of_block(tasks);
    const Tally tally = part.task.flags & SOURCE_IS_HALF ? measured_halves(part) : measured<float, false>(part);
    add_up_task(tally, part, rows, partial, finished);
}

// As statistics, and adds the number of elements with each exponent to counts[task.row * EXPONENT_BINS...]. A warp
// counts in a table of its own: the exponents of a gradient are few, so warps would wait for each other.
extern "C" __global__ __launch_bounds__(THREADS, RESIDENT_THREADS / THREADS) void exponent_histogram(const Tasks tasks, Row* rows, Row* partial, u32* finished, u64* counts) {
    __shared__ u32 of_warp[WARPS][EXPONENT_BINS];
    for (u32 i = threadIdx.x; i < WARPS * EXPONENT_BINS; i += THREADS) {
        of_warp[i / EXPONENT_BINS][i % EXPONENT_BINS] = 0;
    }
    __syncthreads();
    const Part part = part_of_block(tasks);
    u32* mine = of_warp[threadIdx.x / WARP];
    const Tally tally = part.task.flags & SOURCE_IS_HALF ? measured<__half, true>(part, mine)
                                                         : measured<float, true>(part, mine);
    __syncthreads();
    for (u32 bin = threadIdx.x; bin < EXPONENT_BINS; bin += THREADS) {
        u64 count = 0;
        for (u32 warp = 0; warp < WARPS; ++warp) {
            count += of_warp[warp][bin];
        }
        if (count > 0) {
            atomicAdd(counts + static_cast<u64>(part.task.row) * EXPONENT_BINS + bin, count);
        }
    }
    add_up_task(tally, part, rows, partial, finished);
}

// ---- scaling. Products are rounded on their own: a fused multiply-add would not give what other devices compute.

template <typename To>
struct Scale {
    To* target;
    float factor;

    template <int N>
    __device__ inline void use(u64 i, Values<N> values) {
        for (int k = 0; k < N; ++k) {
            values.of[k] = multiply(values.of[k], factor);
        }
        store(target + i, values);
    }
};

template <typename From, typename To>
__device__ inline void scale_task(const Part& part) {
    Scale<To> body = {reinterpret_cast<To*>(part.task.target), part.task.factor};
    for_each_element<PACK<To>>(part, Source<From>(part.task), body);
}

// target = factor * source, rounded to the target's type; of one type target may be source.
extern "C" __global__ __launch_bounds__(THREADS, RESIDENT_THREADS / THREADS) void scaled_copy(const Tasks tasks) {
    const Part part = part_of_block(tasks);
    if (part.task.flags & SOURCE_IS_HALF) {
        scale_task<__half, __half>(part);
    } else if (part.task.flags & TARGET_IS_HALF) {
        scale_task<float, __half>(part);
    } else {
        scale_task<float, float>(part);
    }
}

template <int N>
struct ValuesAndOld {
    Values<N> values;
    Values<N> old;
};

template <typename T>
struct Unscale {
    const T* source;
    float* master;
    float factor;
    bool accumulate;
    u32 largest;      // of factor * source
    u32 largest_sum;  // of the results

    template <int N>
    __device__ inline ValuesAndOld<N> fetch(u64 i) const {
        ValuesAndOld<N> both;
        load(source + i, both.values);
        if (accumulate) {
            load(master + i, both.old);
        }
        return both;
    }

    template <int N>
    __device__ inline void use(u64 i, ValuesAndOld<N> both) {
        for (int k = 0; k < N; ++k) {
            float& value = both.values.of[k];
            value = multiply(value, factor);
            largest = max(largest, magnitude_of(value));
            if (accumulate) {
                value = add(both.old.of[k], value);
                largest_sum = max(largest_sum, magnitude_of(value));
            }
        }
        store(master + i, both.values);
    }
};

// Raises what is at `place` to the largest number of all threads of the block: once for all of them, since blocks wait
// for each other there.
__device__ inline void raise_to_largest(u32* place, u32 largest) {
    __shared__ u32 of_warp[WARPS];
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) {
        largest = max(largest, from_lane_above(largest, distance));
    }
    if (threadIdx.x % WARP == 0) {
        of_warp[threadIdx.x / WARP] = largest;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 warp = 1; warp < WARPS; ++warp) {
            largest = max(largest, of_warp[warp]);
        }
        atomicMax(place, largest);
    }
}

template <typename T>
__device__ inline u32 unscale_task(const Part& part) {
    const Task& task = part.task;
    Unscale<T> body = {reinterpret_cast<const T*>(task.source), reinterpret_cast<float*>(task.target), task.factor,
                       (task.flags & ACCUMULATE) != 0, 0, 0};
    // As many as 16 bytes of floats, for any source: otherwise threads would leave gaps.
    for_each_element<PACK<float>>(part, body, body);
    return max(body.largest, body.largest_sum) < EXPONENT ? body.largest : EXPONENT;
}

// target (float) = or += factor * source; target may be source. largest[task.row] becomes the bit pattern of the
// largest magnitude of factor * source, if it is larger than what is there; of infinity if a result is not finite.
extern "C" __global__ __launch_bounds__(THREADS, RESIDENT_THREADS / THREADS) void unscale_add(const Tasks tasks, u32* largest) {
    const Part part = part_of_block(tasks);
    const u32 mine = part.task.flags & SOURCE_IS_HALF ? unscale_task<__half>(part) : unscale_task<float>(part);
    raise_to_largest(largest + part.task.row, mine);
}

struct Largest {
    u32 largest;

    template <int N>
    __device__ inline void use(u64, const Values<N>& values) {
        for (int k = 0; k < N; ++k) {
            largest = max(largest, magnitude_of(values.of[k]));
        }
    }
};

template <typename T>
__device__ inline u32 largest_of_task(const Part& part) {
    Largest body = {0};
    for_each_element<PACK<T>>(part, Source<T>(part.task), body);
    return body.largest;
}

// largest[task.row] becomes the bit pattern of the largest magnitude of the source, if it is larger than what is there:
// that of infinity or above if one is not finite.
extern "C" __global__ __launch_bounds__(THREADS, RESIDENT_THREADS / THREADS) void largest_magnitude(const Tasks tasks, u32* largest) {
    const Part part = part_of_block(tasks);
    const u32 mine =
        part.task.flags & SOURCE_IS_HALF ? largest_of_task<__half>(part) : largest_of_task<float>(part);
    raise_to_largest(largest + part.task.row, mine);
}

// ---- rounding to a storage format

struct Rounding {
    u32 dropped;          // mantissa bits that the format lacks, 1 or more
    u32 smallest_normal;  // bit patterns
    u32 largest;
    u32 largest_kept;     // the largest magnitude that does not overflow
    u32 overflow;         // result of larger ones
    u32 infinity;         // and result of infinity
    u32 at_random;
    u32 key_low;
    u32 key_high;
};

__device__ inline Rounding rounding_to(const Format& format, const Row* measured) {
    const u32 dropped = 23 - format.mantissa_bits;
    u32 smallest_normal = __float_as_uint(format.smallest_normal), max_bits = __float_as_uint(format.max);
    u32 overflow = __float_as_uint(format.beyond_max), infinity = overflow;
    if (format.fitted) {
        // Multiply the format's numbers by the smallest power of two with which they reach the largest magnitude, as
        // far as float holds the products.
        const u32 largest = measured->largest;
        int power = 0;
        if (largest != 0) {
            const int normal_exponent = smallest_normal >> 23, max_exponent = max_bits >> 23;
            // Subnormal bit patterns do not grow by 1 << 23 per power of two: less than any exponent.
            const int above = largest < 1u << 23 ? -512 : (static_cast<int>(largest - max_bits) + (1 << 23) - 1) >> 23;
            const int at_most = min(254 - max_exponent, 254 - static_cast<int>(dropped) - normal_exponent);
            power = max(min(above, at_most), 1 - normal_exponent);
        }
        const u32 shift = static_cast<u32>(power) << 23;
        overflow = overflow == max_bits ? max_bits + shift : overflow;
        smallest_normal += shift;
        max_bits += shift;
        infinity = EXPONENT;
    }
    // Halfway to overflow, a tie goes to the even neighbour: to max itself if its last bit is 0, else beyond it.
    const u32 largest_kept = max_bits + (1u << (dropped - 1)) - (max_bits >> dropped & 1u);
    return Rounding{dropped,  smallest_normal,  max_bits,       largest_kept,   overflow,
                    infinity, format.at_random, format.key_low, format.key_high};
}

// "lowbias32": every bit of the result depends on every bit of x.
__device__ inline u32 mixed(u32 x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

__device__ inline u32 rounded_at_random(u32 magnitude, u32 random, const Rounding& to) {
    if (magnitude >= to.smallest_normal) {
        // Up, if the bits that are dropped are more than the random number.
        const u32 mask = (1u << to.dropped) - 1;
        return (magnitude + (mask - (random >> (32 - to.dropped)))) & ~mask;
    }
    // In units of the smallest subnormal number: `whole` of them, and a fraction in 32 bits.
    const u32 exponent = max(magnitude >> 23, 1u);
    const u32 significand = (magnitude & 0x7fffffu) | (magnitude >> 23 ? 0x800000u : 0u);
    const u32 behind = to.dropped + (to.smallest_normal >> 23) - exponent;
    const u32 whole = significand >> min(behind, 31u);
    const u32 fraction = behind <= 32 ? significand << (32 - behind) : significand >> min(behind - 32, 31u);
    const float units = static_cast<float>(whole + (random < fraction ? 1u : 0u));
    // Two factors: one unit may be below float's normal range.
    const float unit = __uint_as_float((104 + to.dropped) << 23);
    return __float_as_uint(multiply(multiply(units, unit), __uint_as_float(to.smallest_normal)));
}

__device__ inline u32 rounded(u32 magnitude, const Rounding& to) {
    if (magnitude > EXPONENT) {
        return magnitude;
    }
    if (magnitude == EXPONENT) {
        return to.infinity;
    }
    if (magnitude > to.largest_kept) {
        return to.overflow;
    }
    if (magnitude < to.smallest_normal) {
        // At this power of two, float numbers are as far apart as the format's subnormal ones.
        const float shifter = __uint_as_float(to.smallest_normal + (to.dropped << 23));
        return __float_as_uint(subtract(add(__uint_as_float(magnitude), shifter), shifter));
    }
    const u32 odd = magnitude >> to.dropped & 1u;
    const u32 just_below_half = (1u << (to.dropped - 1)) - 1;
    return (magnitude + just_below_half + odd) & ~((1u << to.dropped) - 1);
}

struct Round {
    float* target;
    Rounding to;
    Tally tally;

    template <int N>
    __device__ inline void use(u64 i, Values<N> values) {
        for (int k = 0; k < N; ++k) {
            const u32 bits = __float_as_uint(values.of[k]);
            const u32 before = bits & MAGNITUDE;
            u32 after;
            if (to.at_random && before <= to.largest) {
                const u32 random = mixed(mixed(static_cast<u32>(i + k) ^ to.key_low) + to.key_high);
                after = rounded_at_random(before, random, to);
            } else {
                after = rounded(before, to);
            }
            tally.underflowed += after == 0 && before != 0;
            tally.overflowed += before > to.largest_kept && before < EXPONENT;
            values.of[k] = __uint_as_float(after | (bits & SIGN));
        }
        store(target + i, values);
        add_values(tally, values);
    }
};

// target = source, both float, rounded half to even or at random; its statistics in rows[task.row]. target may be
// source. `measured` are the source's own statistics, for a format that is fitted.
extern "C" __global__ __launch_bounds__(THREADS, RESIDENT_THREADS / THREADS) void round_to_format(const Tasks tasks, const Format format, const Row* measured, Row* rows,
                                           Row* partial, u32* finished) {
    const Part part = part_of_block(tasks);
    Round body = {reinterpret_cast<float*>(part.task.target), rounding_to(format, measured), Tally()};
    for_each_element<PACK<float>>(part, Source<float>(part.task), body);
    add_up_task(body.tally, part, rows, partial, finished);
}
