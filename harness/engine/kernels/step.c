/* One token through one layer: written to its slot, then attending to all that is held. A template: step_cpu.py puts the dims in.

   Keys lie unrotated and are turned as they are read, each once for all query heads of its KV head. The query stands where
   the new token's key stands. Slots are in no order.

   Axis letters: N rows (stream, KV head), G query heads of a KV head, S slots, P pairs of dims, D key dim, E value dim. */

#include "numbers.h"
#include <stddef.h>
#include <stdlib.h>

enum { G = GROUP, D = KEY_DIM, E = VALUE_DIM };
enum { BY_RANK, BY_POSITION, CLAMPED };

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define WIDE 8
typedef float wide __attribute__((vector_size(4 * WIDE), aligned(4)));
static const wide SIGNS = {-1, 1, -1, 1, -1, 1, -1, 1};

/* Complex numbers side by side, multiplied. */
static inline wide product(wide a, wide b) {
    const wide re = __builtin_shufflevector(b, b, 0, 0, 2, 2, 4, 4, 6, 6), im = __builtin_shufflevector(b, b, 1, 1, 3, 3, 5, 5, 7, 7);
    return a * re + __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6) * (im * SIGNS);
}
#endif
#endif
#ifndef WIDE
#define WIDE 1
#endif

/* One vector turned by complex numbers [D]; `further`, if any, turns it on. */
static inline void turned(float *restrict out, const float *restrict x, const float *restrict by, const float *restrict further) {
    int d = 0;
#if WIDE > 1
    for (; d + WIDE <= D; d += WIDE) {
        wide turn = *(const wide *)(by + d);
        if (further) turn = product(turn, *(const wide *)(further + d));
        *(wide *)(out + d) = product(*(const wide *)(x + d), turn);
    }
#endif
    for (; d < D - 1; d += 2) {
        const float re = further ? by[d] * further[d] - by[d + 1] * further[d + 1] : by[d];
        const float im = further ? by[d] * further[d + 1] + by[d + 1] * further[d] : by[d + 1];
        out[d] = x[d] * re - x[d + 1] * im;
        out[d + 1] = x[d] * im + x[d + 1] * re;
    }
}

/* Sum of products of two vectors [D]. */
static inline float dot(const float *restrict a, const float *restrict b) {
    float total = 0;
    int d = 0;
#if WIDE > 1
    wide sums = {0};
    for (; d + WIDE <= D; d += WIDE) sums += *(const wide *)(a + d) * *(const wide *)(b + d);
    for (int j = 0; j < WIDE; j++) total += sums[j];
#endif
    for (; d < D; d++) total += a[d] * b[d];
    return total;
}

/* Where RoPE puts the token of a slot. */
static inline int64_t angle(int64_t mode, int64_t rank, int64_t position, int64_t step, int64_t limit) {
    if (mode == BY_RANK) return rank;
    if (mode == BY_POSITION) return position;
    const int64_t distance = step - position;
    return limit - (distance < 0 ? 0 : distance < limit ? distance : limit);
}

/* Take a token in. Returns 0, or -1 without memory.

   query: [N, G, D], key: [N, D], in the model's order of dims, unrotated; value: [N, E]. order: the model's dim at each place.
   keys: [N, slots, D]; values: [N, slots, E]; rank, position: [N, slots], of which `attended` are looked at. free: the new
   token's slot, in a count that goes on from row to row and begins at `first`. low: turns of the angles 0, 1, ... [level, P]
   complex, null if nothing is rotated; high: those of 0, level, 2 * level, ..., null if one level will do.
   out: [N, G, E]; mass: the softmax weights [N, G, attended], null if they are not asked for. Both are written. */
int64_t step(const float *query, const float *key, const float *value, const int64_t *order, float *keys, float *values,
             const int64_t *rank, const int64_t *position, const int64_t *free_slots, const float *low, const float *high,
             float *out, float *mass, int64_t rows, int64_t first, int64_t slots, int64_t attended, int64_t mode, int64_t limit,
             int64_t level, int64_t threads, float scaling) {
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1)
    for (int64_t n = 0; n < rows; n++) {
        float *scratch = mass ? NULL : malloc(G * attended * sizeof(float));
        if (!mass && !scratch) { failed = 1; continue; }
        float *restrict scores = mass ? mass + n * G * attended : scratch;
        const int64_t at = free_slots[n] - first - n * slots;
        const int64_t *ranks = rank + n * slots, *positions = position + n * slots, now = positions[at];
        float *restrict k = keys + n * slots * D, *restrict v = values + n * slots * E;
        float asked[G][D], plain[D], *new_key = k + at * D, *new_value = v + at * E;
        for (int d = 0; d < D; d++) new_key[d] = key[n * D + order[d]];
        for (int e = 0; e < E; e++) new_value[e] = value[n * E + e];
        for (int g = 0; g < G; g++) {
            for (int d = 0; d < D; d++) plain[d] = asked[g][d] = query[(n * G + g) * D + order[d]] * scaling;
            if (low) {
                const int64_t stands = angle(mode, ranks[at], now, now, limit);
                turned(asked[g], plain, low + (stands % level) * D, high ? high + (stands / level) * D : NULL);
            }
        }
        for (int64_t s = 0; s < attended; s++) {
            float there[D];
            const float *seen = k + s * D;
            if (low && ranks[s] < slots) {
                const int64_t stands = angle(mode, ranks[s], positions[s], now, limit);
                if (high) turned(there, seen, low + (stands % level) * D, high + (stands / level) * D);
                else turned(there, seen, low + stands * D, NULL);
                seen = there;
            }
            for (int g = 0; g < G; g++) {
                scores[g * attended + s] = ranks[s] < slots ? dot(asked[g], seen) : -INFINITY;
            }
        }
        for (int g = 0; g < G; g++) {
            float *restrict row = scores + g * attended, sum[E] = {0};
            const float inverse = 1.0f / exponentials(row, largest(row, attended), attended);
            for (int64_t s = 0; s < attended; s++) {
                row[s] = ranks[s] < slots ? row[s] * inverse : 0.0f;
                for (int e = 0; e < E; e++) sum[e] += row[s] * v[s * E + e];
            }
            for (int e = 0; e < E; e++) out[(n * G + g) * E + e] = sum[e];
        }
        free(scratch);
    }
    return failed ? -1 : 0;
}
