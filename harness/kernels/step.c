/* One token in one layer: writes the token to its slot, then attends to all tokens held. This is a template: compiler.py inserts the
   dims.

   Keys are stored unrotated, and each key is rotated when it is read, once for all query heads of its KV head. In mode ROTATED, a key
   is rotated when it is stored. The query has the position of the new token's key. Slots have no order. The slots of a row are
   contiguous, or in pages of a pool, where the new token has the last used slot.

   Axis letters: N rows (stream, KV head), G query heads of a KV head, S slots, W pages of a row, P pairs of dims, D key dim, E value
   dim. */

#include "numbers.h"
#include "vectors.h"
#include <stdlib.h>

/* Reads a token. Returns 0, or -1 if there is no memory.

   query: [N, G, D], key: [N, D], unrotated, in the model's order of dims. value: [N, E]. order: the model's index of each dim.
   keys: [N, slots, D]. values: [N, slots, E]. table: pages of each row, numbered over the whole pool, [N, width]; keys and values are
   then [pages, page, D] and [pages, page, E]; null if a row's slots are contiguous. rank, position: [N, slots], of which the first
   `attended` slots are used. free_slots: slot of the new token, counted over all rows from `first`. low: RoPE factors of the positions
   0, 1, ..., [level, P] complex; null without RoPE. high: RoPE factors of the positions 0, level, 2 * level, ...; null if one level
   suffices. out: receives the output, [N, G, E]. mass: receives the softmax weights, [N, G, attended]; null if they are not needed.
   logits: receives the scores before the softmax, -inf in empty slots, [N, G, attended]; null if they are not needed. */
int64_t step(const float *query, const float *key, const float *value, const int64_t *order, float *keys, float *values,
             const int64_t *table, const int64_t *rank, const int64_t *position, const int64_t *free_slots, const float *low, const float *high,
             float *out, float *mass, float *logits, int64_t rows, int64_t first, int64_t slots, int64_t attended, int64_t mode, int64_t limit,
             int64_t level, int64_t threads, int64_t width, int64_t page, float scaling) {
    const int64_t together = table ? page : slots; /* contiguous slots */
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1)
    for (int64_t n = 0; n < rows; n++) {
        float *scratch = mass ? NULL : malloc(G * attended * sizeof(float));
        if (!mass && !scratch) { failed = 1; continue; }
        float *restrict scores = mass ? mass + n * G * attended : scratch;
        const int64_t at = free_slots[n] - first - n * slots, used = table ? at + 1 : attended;
        const int64_t *ranks = rank + n * slots, *positions = position + n * slots, now = positions[at];
        const int64_t *pages = table ? table + n * width : &n, place = pages[at / together] * together + at % together;
        float rotated[G][D], plain[D], *new_key = keys + place * D, *new_value = values + place * E;
        const int64_t here = angle(mode, ranks[at], now, now, limit);
        const float *near = low ? low + (here % level) * D : NULL, *far = high ? high + (here / level) * D : NULL;
        for (int d = 0; d < D; d++) plain[d] = new_key[d] = key[n * D + order[d]];
        if (low && mode == ROTATED) rotate(new_key, plain, near, far);
        for (int e = 0; e < E; e++) new_value[e] = value[n * E + e];
        for (int g = 0; g < G; g++) {
            for (int d = 0; d < D; d++) plain[d] = rotated[g][d] = query[(n * G + g) * D + order[d]] * scaling;
            if (low) rotate(rotated[g], plain, near, far);
        }
        for (int64_t begin = 0, s = 0; begin < used; begin += together) {
            const float *restrict k = keys + (pages[begin / together] * together - begin) * D;
            for (const int64_t end = begin + together < used ? begin + together : used; s < end; s++) {
                float rotated_key[D];
                const float *held = k + s * D;
                if (low && mode != ROTATED && ranks[s] < slots) {
                    const int64_t angle_of = angle(mode, ranks[s], positions[s], now, limit);
                    if (high) rotate(rotated_key, held, low + (angle_of % level) * D, high + (angle_of / level) * D);
                    else rotate(rotated_key, held, low + angle_of * D, NULL);
                    held = rotated_key;
                }
                for (int g = 0; g < G; g++) {
                    scores[g * attended + s] = ranks[s] < slots ? dot(rotated[g], held) : -INFINITY;
                }
            }
        }
        for (int g = 0; g < G; g++) {
            float *restrict row = scores + g * attended, sum[E] = {0};
            if (logits) {
                float *restrict copy = logits + (n * G + g) * attended;
                for (int64_t s = 0; s < attended; s++) copy[s] = s < used ? row[s] : -INFINITY;
            }
            const float inverse = 1.0f / exponentials(row, largest(row, used), used);
            for (int64_t begin = 0, s = 0; begin < used; begin += together) {
                const float *restrict v = values + (pages[begin / together] * together - begin) * E;
                for (const int64_t end = begin + together < used ? begin + together : used; s < end; s++) {
                    row[s] = ranks[s] < slots ? row[s] * inverse : 0.0f;
                    for (int e = 0; e < E; e++) sum[e] += row[s] * v[s * E + e];
                }
            }
            for (int64_t s = used; s < attended; s++) row[s] = 0.0f;
            for (int e = 0; e < E; e++) out[(n * G + g) * E + e] = sum[e];
        }
        free(scratch);
    }
    return failed ? -1 : 0;
}
