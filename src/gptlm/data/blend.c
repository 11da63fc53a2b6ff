/* The loop of blend.py: which part is each sample of a blend. Compiled when it is needed, with -ffp-contract=off: a fused
   multiply-subtract would round once instead of twice and break ties differently. */

#include <math.h>
#include <stdint.h>

/* Samples first to first + size - 1; `taken` counts those of each part before them, and is brought up to date. */
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
