// SPDX-License-Identifier: Apache-2.0
// Addresses of many nnabla arrays in one call. ../addresses.py looks the method up, and decides when it may be called.
#include <stddef.h>

#include "adaloss.h"

// nbla::NdArray::data_ptr(nbla::dtypes, const nbla::Context &, bool); numbers of dtypes are NumPy's.
typedef const void *(*data_ptr)(void *array, int dtype, const void *context, bool write_only);
enum { FLOAT = 11, HALF = 23 };

// Replace each of `arrays` by where its memory is: float16 where `halves` says so, else float32; NULL: nowhere.
PUBLIC void adaloss_addresses(data_ptr address_of, const void *context, int64_t *arrays, int64_t count,
                              const bool *halves, bool write_only) {
    for (int64_t i = 0; i < count; i++) {
        int dtype = halves != NULL && halves[i] ? HALF : FLOAT;
        arrays[i] = (int64_t)address_of((void *)arrays[i], dtype, context, write_only);
    }
}
