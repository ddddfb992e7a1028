// SPDX-License-Identifier: Apache-2.0
// The table of a level's functions.
#include "adaloss.h"

#define AS_TEXT(name) #name
#define TEXT(name) AS_TEXT(name)

const struct level OF_LEVEL(level) = {
    TEXT(LEVEL), OF_LEVEL(measure), OF_LEVEL(scale), OF_LEVEL(largest_finite), OF_LEVEL(round)};
