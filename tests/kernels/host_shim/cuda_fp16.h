// SPDX-License-Identifier: Apache-2.0
// Enough of CUDA to run kernels on the CPU: a real thread for every thread of a block, one block after another.
// Memory is the host's, 16-byte accesses must be aligned as on a GPU, warps run in no particular order.
#pragma once

#include <pthread.h>
#include <xmmintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static  // one block runs at a time

using std::max;
using std::min;

struct Index {
    unsigned x;
};

inline thread_local Index threadIdx, blockIdx, gridDim;

// ---- vectors and bit patterns

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }

// ---- arithmetic. Kernels run with subnormal floats flushed to zero, as -ftz=true makes a GPU do, but for what they ask
// these functions. (Doubles are flushed, too, which a GPU does not; they never get that small.)

#define IEEE_ARITHMETIC
constexpr unsigned IEEE = 0x1f80, FLUSHING = 0x9fc0;  // of the control and status register: FZ and DAZ are set or not

// An operation of volatile operands stays between two writes to the register.
template <typename Result, typename Operation>
Result without_flushing(Operation operation, float a, float b = 0.0f, float c = 0.0f) {
    volatile float x = a, y = b, z = c;
    volatile Result result;
    _mm_setcsr(IEEE);
    result = operation(x, y, z);
    _mm_setcsr(FLUSHING);
    return result;
}

inline float multiply(float a, float b) {
    return without_flushing<float>([](float x, float y, float) { return x * y; }, a, b);
}
inline float add(float a, float b) {
    return without_flushing<float>([](float x, float y, float) { return x + y; }, a, b);
}
inline float subtract(float a, float b) {
    return without_flushing<float>([](float x, float y, float) { return x - y; }, a, b);
}
inline float multiply_add(float a, float b, float c) {
    return without_flushing<float>([](float x, float y, float z) { return std::fma(x, y, z); }, a, b, c);
}
inline double widen(float value) {
    return without_flushing<double>([](float x, float, float) { return static_cast<double>(x); }, value);
}

inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return max(a & 0xffff0000u, b & 0xffff0000u) | max(a & 0xffffu, b & 0xffffu);
}

using __half = _Float16;
inline float __half2float(__half value) { return static_cast<float>(value); }
inline __half __float2half_rn(float value) { return static_cast<__half>(value); }
inline __half __ushort_as_half(unsigned short bits) { return std::bit_cast<__half>(bits); }
inline unsigned short __half_as_ushort(__half value) { return std::bit_cast<unsigned short>(value); }

// ---- threads

constexpr unsigned SHIM_WARP = 32;
constexpr unsigned SHIM_WARPS = THREADS_PER_BLOCK / SHIM_WARP;
constexpr std::size_t SHIM_LARGEST_VALUE = 8;

class Barrier {
  public:
    explicit Barrier(unsigned threads) { pthread_barrier_init(&barrier_, nullptr, threads); }
    ~Barrier() { pthread_barrier_destroy(&barrier_); }
    void wait() { pthread_barrier_wait(&barrier_); }

  private:
    pthread_barrier_t barrier_;
};

inline std::unique_ptr<Barrier> block_barrier;
inline std::unique_ptr<Barrier> warp_barriers[SHIM_WARPS];
inline char exchanged[SHIM_WARPS][SHIM_WARP][SHIM_LARGEST_VALUE];

inline void __syncthreads() { block_barrier->wait(); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

template <typename Value>
Value __shfl_down_sync(unsigned, Value value, unsigned distance) {
    static_assert(sizeof(Value) <= SHIM_LARGEST_VALUE);
    const unsigned warp = threadIdx.x / SHIM_WARP, lane = threadIdx.x % SHIM_WARP;
    std::memcpy(exchanged[warp][lane], &value, sizeof(Value));
    warp_barriers[warp]->wait();
    if (lane + distance < SHIM_WARP) {
        std::memcpy(&value, exchanged[warp][lane + distance], sizeof(Value));
    }
    warp_barriers[warp]->wait();
    return value;
}

template <typename Value>
Value atomicAdd(Value* address, Value value) {
    return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}

inline unsigned atomicMax(unsigned* address, unsigned value) {
    unsigned old = __atomic_load_n(address, __ATOMIC_SEQ_CST);
    while (old < value && !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return old;
}

// ---- launching some blocks of a grid: arguments[i] points to the kernel's i-th argument, as for cuLaunchKernel

template <typename... Arguments, std::size_t... I>
void call(void (*kernel)(Arguments...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<Arguments>*>(arguments[I])...);
}

template <typename... Arguments>
void run_on_host(void (*kernel)(Arguments...), unsigned grid, unsigned count, unsigned* blocks, void** arguments) {
    block_barrier = std::make_unique<Barrier>(THREADS_PER_BLOCK);
    for (auto& barrier : warp_barriers) {
        barrier = std::make_unique<Barrier>(SHIM_WARP);
    }
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < THREADS_PER_BLOCK; ++thread) {
        threads.emplace_back([=] {
            _mm_setcsr(FLUSHING);
            threadIdx.x = thread;
            gridDim.x = grid;
            for (unsigned i = 0; i < count; ++i) {
                blockIdx.x = blocks[i];
                call(kernel, arguments, std::index_sequence_for<Arguments...>());
                block_barrier->wait();
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
}
