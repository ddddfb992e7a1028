// SPDX-License-Identifier: Apache-2.0
// Threads live as long as one call: there is no pool that a fork would leave without its threads, and nothing to
// shut down. Starting one takes about 20 µs, so each must have more to do than that.
#define _POSIX_C_SOURCE 200809L  // sigset_t

#include "threads.h"

#include <pthread.h>
#include <signal.h>

#include "adaloss.h"

enum { LEAST_FOR_PARTS = 1 << 18, LEAST_PER_THREAD = 1 << 20 };  // elements

struct job {
    void (*work)(void *context, int part, int64_t start, int64_t stop);
    void *context;
    int64_t blocks, size;
    int parts, next;
};

int adaloss_parts(int64_t size) { return size < LEAST_FOR_PARTS ? 1 : MOST_PARTS; }

PUBLIC int adaloss_useful_threads(int64_t size, int threads) {
    int64_t most = size / LEAST_PER_THREAD < MOST_PARTS ? size / LEAST_PER_THREAD : MOST_PARTS;
    if (most > threads) most = threads;
    return most > 1 ? (int)most : 1;
}

static void *take_parts(void *of_job) {
    struct job *job = of_job;
    int part;
    while ((part = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->parts) {
        int64_t start = job->blocks * part / job->parts * BLOCK, stop = job->blocks * (part + 1) / job->parts * BLOCK;
        job->work(job->context, part, start, stop < job->size ? stop : job->size);
    }
    return NULL;
}

void adaloss_in_parts(
    int64_t size, int threads, void (*work)(void *context, int part, int64_t start, int64_t stop), void *context) {
    struct job job = {work, context, (size + BLOCK - 1) / BLOCK, size, adaloss_parts(size), 0};
    int wanted = adaloss_useful_threads(size, threads), started = 0;
    pthread_t helpers[MOST_PARTS];
    if (wanted > 1) {
        sigset_t every, before;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);  // signals are for the caller's threads
        while (started < wanted - 1 && pthread_create(&helpers[started], NULL, take_parts, &job) == 0) started++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    take_parts(&job);  // all that no helper takes, if none could be started
    while (started > 0) pthread_join(helpers[--started], NULL);
}
