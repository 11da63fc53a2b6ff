/* The loops of blend.py and shuffle.py. Compiled when they are needed, with -ffp-contract=off: a fused multiply-subtract
   would round once instead of twice and break the ties of a blend differently. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Which part is each of the samples first to first + size - 1; `taken` counts those of each part before them, and is
   brought up to date. */
void blend_order(const double *weights, int64_t count, int64_t first, int64_t size, int64_t *taken, uint8_t *parts)
{
    for (int64_t i = 0; i < size; i++) {
        double reach = first + i > 1 ? (double)(first + i) : 1.0, most = -INFINITY;
        int64_t chosen = 0;
        for (int64_t part = 0; part < count; part++) {
            double product = weights[part] * reach;
            double lag = product - (double)taken[part];
            if (lag > most) {
                most = lag;
                chosen = part;
            }
        }
        parts[i] = (uint8_t)chosen;
        taken[chosen]++;
    }
}

#define AHEAD 256 /* numbers whose places are drawn before the first of them is moved */

/* Number i, from the last to the second, changes places with one of the numbers 0 to i: random bits under the smallest
   mask that covers i, drawn again while they exceed it. The places of many numbers are drawn first, so that the memory
   fetches them at the same time: a large array is not in the cache. size: of at most 2^32 numbers; width: bytes of one. */
static inline __attribute__((always_inline)) void shuffle(
    char *numbers, int64_t size, int64_t width, uint32_t (*draw)(void *), void *state)
{
    uint32_t places[AHEAD];
    for (int64_t i = size - 1; i > 0;) {
        int64_t count = i < AHEAD ? i : AHEAD;
        for (int64_t k = 0; k < count; k++) {
            uint32_t last = (uint32_t)(i - k), mask = UINT32_MAX >> __builtin_clz(last);
            do
                places[k] = draw(state) & mask;
            while (places[k] > last);
            __builtin_prefetch(numbers + places[k] * width, 1);
        }
        for (int64_t k = 0; k < count; k++, i--) {
            char *here = numbers + i * width, *there = numbers + places[k] * width;
            char moved[8], other[8];
            memcpy(moved, here, width);
            memcpy(other, there, width);
            memcpy(here, other, width);
            memcpy(there, moved, width);
        }
    }
}

void shuffle_32(void *numbers, int64_t size, uint32_t (*draw)(void *), void *state)
{
    shuffle(numbers, size, 4, draw, state);
}

void shuffle_64(void *numbers, int64_t size, uint32_t (*draw)(void *), void *state)
{
    shuffle(numbers, size, 8, draw, state);
}
