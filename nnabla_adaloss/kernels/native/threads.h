// SPDX-License-Identifier: Apache-2.0
// Processing of a large array in parts by several threads.
#ifndef ADALOSS_THREADS_H
#define ADALOSS_THREADS_H

#include <stdint.h>

enum { MOST_PARTS = 64 };

// How many parts an array of this size has; independent of the number of threads.
int adaloss_parts(int64_t size);

// How many of `threads` threads are worth their start for an array of this size.
int adaloss_useful_threads(int64_t size, int threads);

// Call `work` for each part of an array, in no order, by up to `threads` threads; return when all are done.
void adaloss_in_parts(
    int64_t size, int threads, void (*work)(void *context, int part, int64_t start, int64_t stop), void *context);

#endif
