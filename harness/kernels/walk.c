/* Walk of one block through one layer, as one loop. This is a template: compiler.py inserts a policy's expressions.

   At every step, keys are rotated by their rank or by their distance from the query, unless they are stored rotated.

   The tokens of a head are ordered oldest first, so that a token's index is its rank; an eviction closes the gap. Slots are the last
   axis of K and V, so that the loops over slots vectorise.

   Axis letters: N rows (stream, KV head), G query heads of a KV head, T tokens, S slots, P pairs of dims, D head dim. */

#include "numbers.h"
#include "policy.h"
#include <stdlib.h>
#include <string.h>

enum { ALREADY_ROTATED, BY_RANK, BY_DISTANCE };

/* Returns the numbers of the token in slot s. states: [NUMBERS, S]. */
static inline State loaded(const float *states, int64_t slots, int64_t s) {
    State state = {{0}};
    for (int i = 0; i < NUMBERS; i++) state.of[i] = states[i * slots + s];
    return state;
}

/* Chooses the token of the lowest worth, and the oldest of equals, among tokens that are not gone. Marks the token as gone. */
static inline int64_t evict(float *restrict worth, char *restrict gone, int64_t count) {
    int64_t victim = -1;
    float least = INFINITY;
    for (int64_t s = 0; s < count; s++)
        if (worth[s] < least) { least = worth[s]; victim = s; }
    if (victim < 0)  /* all tokens have worth infinity */
        for (victim = 0; gone[victim];) victim++;
    worth[victim] = NAN;  /* skipped by comparisons */
    gone[victim] = 1;
    return victim;
}

/* Closes the gaps of evicted tokens in an array of numbers of `size` bytes. victims: indices of the `evicted` tokens in ascending
   order, followed by the number of tokens. */
static inline void close_gaps(void *array, const int64_t *victims, int64_t evicted, size_t size) {
    for (int64_t i = 0; i < evicted; i++)
        memmove((char *)array + (size_t)(victims[i] - i) * size, (char *)array + (size_t)(victims[i] + 1) * size,
                (size_t)(victims[i + 1] - victims[i] - 1) * size);
}

/* Walks a block. Returns 0, or -1 if there is no memory.

   query: rotated and scaled, [N, T, 2, P, G], real parts, then imaginary parts. key: [N, T, 2, P]. value: [N, T, D].
   held_key: [N, 2, P, S], held_value: [N, D, S], position: [N, S], state: [N, NUMBERS, S]: entries of the `held` tokens, oldest first,
   which are changed. written: first values of a token's numbers, [N, T, NUMBERS] with any strides. head: index of the head in the
   model's layer, [N]. prompt: prompt length, [N / heads]. rotation: rotation of keys, see above. cosine, sine: cosine and sine of every
   angle, [P, angles]; with BY_DISTANCE, the query has the last angle. first: step of the first token. When `full` tokens are held,
   `every` of them are evicted. window: sliding window of the layer; 0 if none. out: receives the output, [T, N, G, D]. */
int64_t walk(const float *restrict query, const float *restrict key, const float *restrict value, float *restrict held_key,
             float *restrict held_value, int64_t *restrict position, float *restrict state, const float *restrict written,
             const int64_t *restrict head, const int64_t *restrict prompt, const float *restrict cosine,
             const float *restrict sine, float *restrict out, int64_t written_row, int64_t written_token, int64_t rows,
             int64_t group, int64_t tokens, int64_t pairs, int64_t slots, int64_t dims, int64_t held, int64_t first,
             int64_t full, int64_t every, int64_t window, int64_t layer, int64_t num_layers, int64_t heads, int64_t seed, int64_t rotation,
             int64_t angles, int64_t threads) {
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t n = 0; n < rows; n++) {
        float *scratch = malloc((group + 4) * slots * sizeof(float));
        int64_t *angle = malloc((slots + every + 1) * sizeof(int64_t)), *victims = angle + slots;
        char *gone = calloc(slots, 1);
        if (!scratch || !angle || !gone) { free(scratch); free(angle); free(gone); failed = 1; continue; }
        float *restrict mass = scratch, *restrict rotated_re = scratch + slots, *restrict rotated_im = scratch + 2 * slots;
        float *restrict most = scratch + 3 * slots, *restrict scores = scratch + 4 * slots;
        float *restrict keys = held_key + n * 2 * pairs * slots, *restrict values = held_value + n * dims * slots;
        int64_t *restrict at = position + n * slots, count = held;
        float *restrict states = state + n * NUMBERS * slots;
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t step = first + t;
            const float *restrict k = key + (n * tokens + t) * 2 * pairs, *restrict v = value + (n * tokens + t) * dims;
            const float *restrict q = query + (n * tokens + t) * 2 * pairs * group;
            for (int64_t p = 0; p < 2 * pairs; p++) keys[p * slots + count] = k[p];
            for (int64_t d = 0; d < dims; d++) values[d * slots + count] = v[d];
            at[count] = step;
            for (int i = 0; i < NUMBERS; i++) states[i * slots + count] = written[n * written_row + t * written_token + i];
            count++;
            const Now now = {step, layer, head[n], count, prompt[n / heads], group, num_layers, seed};
            memset(scores, 0, group * slots * sizeof(float));
            memset(mass, 0, count * sizeof(float));
            if (MOST_IS_READ) memset(most, 0, count * sizeof(float));
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
                    if (MOST_IS_READ) most[s] = row[s] > most[s] ? row[s] : most[s];
                }
                for (int64_t d = 0; d < dims; d++) {
                    const float *restrict x = values + d * slots;
                    float total = 0;
                    for (int64_t s = 0; s < count; s++) total += row[s] * x[s];
                    answer[d] = total;
                }
            }
            for (int64_t s = 0; s < count; s++) {
                const State after = updated(loaded(states, slots, s), mass[s], MOST_IS_READ ? most[s] : 0, s, at[s], now);
                for (int i = 0; i < NUMBERS; i++) states[i * slots + s] = after.of[i];
            }
            if (count < full) continue;
            float *restrict worth = mass;
            for (int64_t s = 0; s < count; s++) worth[s] = importance(loaded(states, slots, s), s, at[s], now);
            if (window)
                for (int64_t s = 0; s < count; s++) worth[s] = step - at[s] >= window - 1 ? -INFINITY : worth[s];
            int64_t evicted = 0;
            for (; evicted < every; evicted++) {
                int64_t place = evicted;
                const int64_t victim = evict(worth, gone, count);
                for (; place > 0 && victims[place - 1] > victim; place--) victims[place] = victims[place - 1];
                victims[place] = victim;
            }
            victims[evicted] = count;
            for (int64_t i = 0; i < evicted; i++) gone[victims[i]] = 0;
            for (int64_t p = 0; p < 2 * pairs; p++) close_gaps(keys + p * slots, victims, evicted, sizeof(float));
            for (int64_t d = 0; d < dims; d++) close_gaps(values + d * slots, victims, evicted, sizeof(float));
            for (int i = 0; i < NUMBERS; i++) close_gaps(states + i * slots, victims, evicted, sizeof(float));
            close_gaps(at, victims, evicted, sizeof(int64_t));
            count -= evicted;
        }
        free(scratch);
        free(angle);
        free(gone);
    }
    return failed ? -1 : 0;
}
