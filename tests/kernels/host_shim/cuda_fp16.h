// SPDX-License-Identifier: Apache-2.0
// Enough of CUDA to run kernels on the CPU, one block after another. The threads of a block are fibers, which take turns
// where they wait for each other, or real threads, which cost a hundred times as much but get in each other's way.
// Memory is the host's, 16-byte accesses must be aligned as on a GPU, warps run in no particular order.
#pragma once

#include <pthread.h>
#include <setjmp.h>
#include <ucontext.h>
#include <xmmintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
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

inline bool threads_are_real;

// One of the threads of a block that take turns. makecontext gives it a stack, setjmp and longjmp switch to it and back:
// swapcontext would ask the kernel for the signal mask each time, which takes longer than all the rest.
struct Fiber {
    std::vector<char> stack = std::vector<char>(1 << 16);
    jmp_buf state;
    const unsigned* waits_for = nullptr;  // to differ from `passed`: how often a barrier has opened
    unsigned passed = 0;
    bool started = false, ended = false;

    bool can_go_on() const { return !ended && !(waits_for && *waits_for == passed); }
};

inline std::vector<Fiber> fibers(THREADS_PER_BLOCK);
inline Fiber* running;
inline jmp_buf scheduler;
inline std::function<void()> fiber_body;

inline void run_fiber() {
    fiber_body();
    running->ended = true;
    _longjmp(scheduler, 1);
}

inline void resume(Fiber& fiber) {
    running = &fiber;
    if (_setjmp(scheduler)) {
        return;
    }
    if (fiber.started) {
        _longjmp(fiber.state, 1);
    }
    fiber.started = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = fiber.stack.data();
    start.uc_stack.ss_size = fiber.stack.size();
    start.uc_link = nullptr;
    makecontext(&start, run_fiber, 0);
    setcontext(&start);
}

class Barrier {
  public:
    explicit Barrier(unsigned threads) : threads_(threads) { pthread_barrier_init(&barrier_, nullptr, threads); }
    ~Barrier() { pthread_barrier_destroy(&barrier_); }

    void reset() { waiting_ = 0; }
    unsigned waiting() const { return waiting_; }

    void wait() {
        if (threads_are_real) {
            pthread_barrier_wait(&barrier_);
        } else if (++waiting_ == threads_) {
            waiting_ = 0;
            ++opened_;
        } else {
            running->waits_for = &opened_;
            running->passed = opened_;
            if (!_setjmp(running->state)) {
                _longjmp(scheduler, 1);
            }
        }
    }

  private:
    pthread_barrier_t barrier_;
    const unsigned threads_;
    unsigned waiting_ = 0, opened_ = 0;
};

inline Barrier block_barrier(THREADS_PER_BLOCK);
inline Barrier warp_barriers[SHIM_WARPS] = {Barrier(SHIM_WARP), Barrier(SHIM_WARP)};
static_assert(SHIM_WARPS == 2);
inline char exchanged[SHIM_WARPS][SHIM_WARP][SHIM_LARGEST_VALUE];

inline void __syncthreads() { block_barrier.wait(); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

template <typename Value>
Value __shfl_down_sync(unsigned, Value value, unsigned distance) {
    static_assert(sizeof(Value) <= SHIM_LARGEST_VALUE);
    const unsigned warp = threadIdx.x / SHIM_WARP, lane = threadIdx.x % SHIM_WARP;
    std::memcpy(exchanged[warp][lane], &value, sizeof(Value));
    warp_barriers[warp].wait();
    if (lane + distance < SHIM_WARP) {
        std::memcpy(&value, exchanged[warp][lane + distance], sizeof(Value));
    }
    warp_barriers[warp].wait();
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

// Runs the threads of one block in turns until all have ended. Which goes first changes from turn to turn, so that no
// kernel passes that relies on an order.
inline const char* run_fibers(unsigned& turn) {
    for (Fiber& fiber : fibers) {
        fiber.waits_for = nullptr;
        fiber.started = fiber.ended = false;
    }
    for (bool goes_on = true; goes_on;) {
        goes_on = false;
        turn = turn * 1664525u + 1013904223u;
        const unsigned first = turn >> 24, step = turn >> 16 | 1u;  // every thread comes once: their number is 2^n
        for (unsigned i = 0; i < THREADS_PER_BLOCK; ++i) {
            threadIdx.x = (first + i * step) % THREADS_PER_BLOCK;
            if (fibers[threadIdx.x].can_go_on()) {
                goes_on = true;
                resume(fibers[threadIdx.x]);
            }
        }
    }
    unsigned in_shuffles = 0;
    for (Barrier& barrier : warp_barriers) {
        in_shuffles += barrier.waiting();
        barrier.reset();
    }
    const unsigned at_barrier = block_barrier.waiting();
    block_barrier.reset();
    if (at_barrier + in_shuffles == 0) {
        return nullptr;
    }
    static char message[200];
    std::snprintf(message, sizeof message,
                  "block %u hangs: of %u threads, %u wait in __syncthreads, %u in a shuffle, and the rest have ended",
                  blockIdx.x, THREADS_PER_BLOCK, at_barrier, in_shuffles);
    return message;
}

inline void run_threads(const std::function<void()>& body) {
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < THREADS_PER_BLOCK; ++thread) {
        threads.emplace_back([&body, thread, block = blockIdx, grid = gridDim] {
            _mm_setcsr(FLUSHING);
            threadIdx.x = thread;
            blockIdx = block;
            gridDim = grid;
            body();
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
}

// What went wrong, or null.
template <typename... Arguments>
const char* run_on_host(void (*kernel)(Arguments...), unsigned grid, unsigned count, unsigned* blocks, void** arguments,
                        bool in_real_threads) {
    const unsigned before = _mm_getcsr();
    const char* error = nullptr;
    unsigned turn = grid;
    threads_are_real = in_real_threads;
    gridDim.x = grid;
    fiber_body = [=] { call(kernel, arguments, std::index_sequence_for<Arguments...>()); };
    for (unsigned i = 0; i < count && !error; ++i) {
        blockIdx.x = blocks[i];
        if (in_real_threads) {
            run_threads(fiber_body);
        } else {
            _mm_setcsr(FLUSHING);
            error = run_fibers(turn);
            _mm_setcsr(before);
        }
    }
    return error;
}
