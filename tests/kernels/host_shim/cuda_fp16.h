// SPDX-License-Identifier: Apache-2.0
// Enough of CUDA to run kernels on the CPU: a real thread for every thread of a block, one block after another.
// Memory is the host's, 16-byte accesses must be aligned as on a GPU, warps run in no particular order.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <bit>
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
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }

// ---- arithmetic rounded operation by operation (compile with -ffp-contract=off), half to even

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }

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
