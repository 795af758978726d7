/* The walk of one block through one layer, as one loop. This is a template: compiler.py puts a policy's expressions in.

   At every step, keys are rotated by their rank or by their distance from the query, unless they are already rotated.

   A head's tokens are ordered oldest first, so that a token's index is its rank; evicting closes the gap. The slots are the last
   axis of K and V, so that the loops over slots vectorise.

   Axis letters: N rows (stream, KV head), G query heads of a KV head, T tokens, S slots, P pairs of dims, D head dim. */

#include "numbers.h"
#include "policy.h"
#include <stdlib.h>
#include <string.h>

enum { ALREADY_ROTATED, BY_RANK, BY_DISTANCE };

/* Walks a block. Returns the number of tokens held, or -1 if there is no memory.

   query: rotated and scaled, [N, T, 2, P, G], real parts, then imaginary parts. key: [N, T, 2, P]. value: [N, T, D].
   held_key: [N, 2, P, S], held_value: [N, D, S], position, state: [N, S]: of the `held` tokens, oldest first; changed.
   rotation: how keys are rotated, see above. cosine, sine: of every angle, [P, angles]; with BY_DISTANCE the query is at the
   last of them. first: step of the first token. window: sliding window of the layer, 0 if none.
   out: [T, N, G, D], written. */
int64_t walk(const float *restrict query, const float *restrict key, const float *restrict value, float *restrict held_key,
             float *restrict held_value, int64_t *restrict position, float *restrict state, const float *restrict cosine,
             const float *restrict sine, float *restrict out, int64_t rows, int64_t group, int64_t tokens, int64_t pairs,
             int64_t slots, int64_t dims, int64_t held, int64_t first, int64_t capacity, int64_t window, float initial,
             int64_t layer, int64_t heads, int64_t seed, int64_t rotation, int64_t angles, int64_t threads) {
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t n = 0; n < rows; n++) {
        float *scratch = malloc((group + 3) * slots * sizeof(float));
        int64_t *angle = malloc(slots * sizeof(int64_t));
        if (!scratch || !angle) { free(scratch); free(angle); failed = 1; continue; }
        float *restrict mass = scratch, *restrict rotated_re = scratch + slots, *restrict rotated_im = scratch + 2 * slots;
        float *restrict scores = scratch + 3 * slots;
        float *restrict keys = held_key + n * 2 * pairs * slots, *restrict values = held_value + n * dims * slots;
        int64_t *restrict at = position + n * slots, count = held, head = n % heads;
        float *restrict states = state + n * slots;
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t step = first + t;
            const float *restrict k = key + (n * tokens + t) * 2 * pairs, *restrict v = value + (n * tokens + t) * dims;
            const float *restrict q = query + (n * tokens + t) * 2 * pairs * group;
            for (int64_t p = 0; p < 2 * pairs; p++) keys[p * slots + count] = k[p];
            for (int64_t d = 0; d < dims; d++) values[d * slots + count] = v[d];
            at[count] = step;
            states[count] = initial;
            count++;
            memset(scores, 0, group * slots * sizeof(float));
            memset(mass, 0, count * sizeof(float));
            if (rotation == BY_DISTANCE)
                for (int64_t s = 0; s < count; s++) angle[s] = step - at[s] < angles ? angles - 1 - (step - at[s]) : 0;
            for (int64_t p = 0; p < pairs; p++) {
                const float *restrict re = keys + p * slots, *restrict im = keys + (pairs + p) * slots;
                const float *restrict c = cosine + p * angles, *restrict i = sine + p * angles;
                if (rotation == BY_RANK)
                    for (int64_t s = 0; s < count; s++) {
                        rotated_re[s] = re[s] * c[s] - im[s] * i[s];
                        rotated_im[s] = re[s] * i[s] + im[s] * c[s];
                    }
                else if (rotation == BY_DISTANCE)
                    for (int64_t s = 0; s < count; s++) {
                        const float x = c[angle[s]], y = i[angle[s]];
                        rotated_re[s] = re[s] * x - im[s] * y;
                        rotated_im[s] = re[s] * y + im[s] * x;
                    }
                const float *restrict real = rotation ? rotated_re : re, *restrict imaginary = rotation ? rotated_im : im;
                for (int64_t g = 0; g < group; g++) {
                    const float a = q[p * group + g], b = q[(pairs + p) * group + g];
                    float *restrict row = scores + g * slots;
                    for (int64_t s = 0; s < count; s++) row[s] += a * real[s] + b * imaginary[s];
                }
            }
            for (int64_t g = 0; g < group; g++) {
                float *restrict row = scores + g * slots, *restrict answer = out + ((t * rows + n) * group + g) * dims;
                const float inverse = 1.0f / exponentials(row, largest(row, count), count);
                for (int64_t s = 0; s < count; s++) {
                    row[s] *= inverse;
                    mass[s] += row[s];
                }
                for (int64_t d = 0; d < dims; d++) {
                    const float *restrict x = values + d * slots;
                    float total = 0;
                    for (int64_t s = 0; s < count; s++) total += row[s] * x[s];
                    answer[d] = total;
                }
            }
            for (int64_t s = 0; s < count; s++) states[s] = update(states[s], mass[s], s, at[s], step, layer, head, seed);
            if (step < capacity) continue;
            int64_t victim = 0;
            float least = INFINITY;
            for (int64_t s = 0; s < count; s++) mass[s] = importance(states[s], s, at[s], step, layer, head, seed);
            if (window)
                for (int64_t s = 0; s < count; s++) mass[s] = step - at[s] >= window - 1 ? -INFINITY : mass[s];
            for (int64_t s = 0; s < count; s++)
                if (mass[s] < least) { least = mass[s]; victim = s; }
            count--;
            const size_t moved = (size_t)(count - victim);
            for (int64_t p = 0; p < 2 * pairs; p++)
                memmove(keys + p * slots + victim, keys + p * slots + victim + 1, moved * sizeof(float));
            for (int64_t d = 0; d < dims; d++)
                memmove(values + d * slots + victim, values + d * slots + victim + 1, moved * sizeof(float));
            memmove(at + victim, at + victim + 1, moved * sizeof(int64_t));
            memmove(states + victim, states + victim + 1, moved * sizeof(float));
        }
        free(scratch);
        free(angle);
    }
    const int64_t all = held + tokens;
    return failed ? -1 : all < capacity ? all : capacity;
}
