/* Walk of one block through one layer, as one loop. This is a template: compiler.py inserts a policy's expressions, for one slot
   at a time, or its programs, for all slots of a head or of all heads of a layer at once.

   At every step, keys are rotated by their rank or by their distance from the query, unless they are stored rotated.

   The tokens of a head are ordered oldest first, so that a token's index is its rank; an eviction closes the gap. Slots are the last
   axis of K and V, so that the loops over slots vectorise.

   Axis letters: N rows (stream, KV head), H rows that a program computes together, G query heads of a KV head, T tokens, S slots, P
   pairs of dims, D head dim. */

#include "numbers.h"
#include "policy.h"
#include <stdlib.h>
#include <string.h>

enum { ALREADY_ROTATED, BY_RANK, BY_DISTANCE };

/* Returns the token of the lowest worth, and the oldest of equals, among tokens that are not gone. */
static inline int64_t lowest(const float *restrict worth, const char *restrict gone, int64_t count) {
    int64_t victim = -1;
    float least = INFINITY;
    for (int64_t s = 0; s < count; s++)
        if (worth[s] < least) { least = worth[s]; victim = s; }
    if (victim < 0)  /* all tokens have worth infinity */
        for (victim = 0; gone[victim];) victim++;
    return victim;
}

/* Adds a token to the `evicted` victims of a head, which are in ascending order, and marks it as gone. */
static inline void evict(int64_t victim, int64_t *victims, int64_t evicted, float *worth, char *gone) {
    for (; evicted > 0 && victims[evicted - 1] > victim; evicted--) victims[evicted] = victims[evicted - 1];
    victims[evicted] = victim;
    worth[victim] = NAN;  /* skipped by comparisons */
    gone[victim] = 1;
}

/* Closes the gaps of evicted tokens in an array of numbers of `size` bytes. victims: indices of the `evicted` tokens in ascending
   order, followed by the number of tokens. */
static inline void close_gaps(void *array, const int64_t *victims, int64_t evicted, size_t size) {
    for (int64_t i = 0; i < evicted; i++)
        memmove((char *)array + (size_t)(victims[i] - i) * size, (char *)array + (size_t)(victims[i] + 1) * size,
                (size_t)(victims[i + 1] - victims[i] - 1) * size);
}

#include "program.h"

/* Chooses `excess` tokens to evict from the heads of a layer, which compete: the lowest (worth, rank, head). Marks them as gone.
   Every head keeps `floor` tokens. evicted: room for `most` victims of each head; number: number of victims of each head. */
static inline void compete(float *worths, char *gone, const int64_t *counts, int64_t *evicted, int64_t *number, int64_t slots,
                           int64_t most, int64_t excess, int64_t floor) {
    int64_t next[TOGETHER];  /* candidate of each head; -1 if the head is at the floor */
    for (int64_t h = 0; h < TOGETHER; h++)
        next[h] = counts[h] > floor ? lowest(worths + h * slots, gone + h * slots, counts[h]) : -1;
    for (; excess > 0; excess--) {
        int64_t loser = -1;
        float least = INFINITY;
        for (int64_t h = 0; h < TOGETHER; h++) {
            if (next[h] < 0) continue;
            const float worth = worths[h * slots + next[h]];
            if (loser < 0 || worth < least || (worth == least && next[h] < next[loser])) { loser = h; least = worth; }
        }
        if (loser < 0) return;
        float *worth = worths + loser * slots;
        char *gone_here = gone + loser * slots;
        evict(next[loser], evicted + loser * most, number[loser]++, worth, gone_here);
        next[loser] = counts[loser] - number[loser] > floor ? lowest(worth, gone_here, counts[loser]) : -1;
    }
}

/* What all tokens of a walk share. cosine, sine: cosine and sine of every angle, [P, angles]. */
typedef struct {
    const float *cosine, *sine;
    int64_t group, pairs, slots, dims, rotation, angles;
} Shared;

/* Attends to the first `count` tokens of a row. query: rotated and scaled, [2, P, G]; with BY_DISTANCE, it has the last angle.
   first_angle: angle of rank 0. keys: [2, P, S]; values: [D, S]; at: positions, [S]. rotated: scratch, [2, S]; angle: scratch,
   [S]. scores: receives the softmax weights, 0 in empty slots, [G, S]. logits: receives the scores before the softmax, -inf in
   empty slots, [G, S]; null if they are not needed. answer: receives the output, [G, D]. */
static inline void attend(Shared of, const float *restrict query, const float *restrict keys, const float *restrict values,
                          const int64_t *restrict at, int64_t step, int64_t count, int64_t first_angle, float *restrict rotated,
                          int64_t *restrict angle, float *restrict scores, float *restrict logits, float *restrict answer) {
    const int64_t slots = of.slots, group = of.group, pairs = of.pairs;
    float *restrict rotated_re = rotated, *restrict rotated_im = rotated + slots;
    memset(scores, 0, group * slots * sizeof(float));
    if (of.rotation == BY_DISTANCE)
        for (int64_t s = 0; s < count; s++) angle[s] = step - at[s] < of.angles ? of.angles - 1 - (step - at[s]) : 0;
    for (int64_t p = 0; p < pairs; p++) {
        const float *restrict re = keys + p * slots, *restrict im = keys + (pairs + p) * slots;
        const float *restrict c = of.cosine + p * of.angles + first_angle, *restrict i = of.sine + p * of.angles + first_angle;
        if (of.rotation == BY_RANK)
            for (int64_t s = 0; s < count; s++) {
                rotated_re[s] = re[s] * c[s] - im[s] * i[s];
                rotated_im[s] = re[s] * i[s] + im[s] * c[s];
            }
        else if (of.rotation == BY_DISTANCE)
            for (int64_t s = 0; s < count; s++) {
                const float x = c[angle[s]], y = i[angle[s]];
                rotated_re[s] = re[s] * x - im[s] * y;
                rotated_im[s] = re[s] * y + im[s] * x;
            }
        const float *restrict real = of.rotation ? rotated_re : re, *restrict imaginary = of.rotation ? rotated_im : im;
        for (int64_t g = 0; g < group; g++) {
            const float a = query[p * group + g], b = query[(pairs + p) * group + g];
            float *restrict row = scores + g * slots;
            for (int64_t s = 0; s < count; s++) row[s] += a * real[s] + b * imaginary[s];
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float *restrict row = scores + g * slots;
        for (int64_t s = 0; s < slots && logits; s++) logits[g * slots + s] = s < count ? row[s] : -INFINITY;
        const float inverse = 1.0f / exponentials(row, largest(row, count), count);
        for (int64_t s = 0; s < count; s++) row[s] *= inverse;
        for (int64_t d = 0; d < of.dims; d++) {
            const float *restrict x = values + d * slots;
            float total = 0;
            for (int64_t s = 0; s < count; s++) total += row[s] * x[s];
            answer[g * of.dims + d] = total;
        }
    }
}

#if !PROGRAMS
/* Returns the numbers of the token in slot s. states: [NUMBERS, S]. */
static inline State loaded(const float *states, int64_t slots, int64_t s) {
    State state = {{0}};
    for (int i = 0; i < NUMBERS; i++) state.of[i] = states[i * slots + s];
    return state;
}

/* Updates the numbers of a row's tokens. weights: [G, S]; mass, most: scratch, [S]. */
static inline void update_row(float *restrict states, const float *restrict weights, float *restrict mass, float *restrict most,
                              const int64_t *restrict at, int64_t slots, Now now) {
    const int64_t count = now.count;
    memset(mass, 0, count * sizeof(float));
    if (MOST_IS_READ) memset(most, 0, count * sizeof(float));
    for (int64_t g = 0; g < now.group; g++)
        for (int64_t s = 0; s < count; s++) {
            const float weight = weights[g * slots + s];
            mass[s] += weight;
            if (MOST_IS_READ) most[s] = weight > most[s] ? weight : most[s];
        }
    for (int64_t s = 0; s < count; s++) {
        const State after = updated(loaded(states, slots, s), mass[s], MOST_IS_READ ? most[s] : 0, s, at[s], now);
        for (int i = 0; i < NUMBERS; i++) states[i * slots + s] = after.of[i];
    }
}
#endif

/* Walks a block. Returns 0, or -1 if there is no memory.

   query: rotated and scaled, [N, T, 2, P, G], real parts, then imaginary parts. key: [N, T, 2, P]. value: [N, T, D]. held_key:
   [N, 2, P, S], held_value: [N, D, S], position: [N, S], state: [N, NUMBERS, S]: entries of the tokens held, oldest first, which
   are changed. held: number of tokens of each row, which is changed, [N]. written: first values of a token's numbers, [N, T,
   NUMBERS] with any strides. head: index of the head in the model's layer, [N]. prompt: prompt length, [N / heads]. rotation:
   rotation of keys, see above. cosine, sine: see `Shared`. first: step of the first token. When `full` tokens are held, `every`
   of them are evicted. floor: if the heads of a layer compete, the number of tokens that each keeps; otherwise -1. Then `full`
   and `every` are means over heads, and queries have the last angle BY_RANK, too. window: sliding window of the layer; 0 if none.
   out: receives the output, [T, N, G, D]. Of programs: queries: unrotated, [T, N, G, 2 * P]; null if not read; sums: numbers per
   head, [N, SUMS]; kept: keys, rotated keys and terms of the sums of the tokens held, [N, S, width] each; fresh: those of the
   block, [N, T, width] each. */
int64_t walk(const float *restrict query, const float *restrict key, const float *restrict value, float *restrict held_key,
             float *restrict held_value, int64_t *restrict position, float *restrict state, int64_t *restrict held,
             const float *restrict written, const int64_t *restrict head, const int64_t *restrict prompt, const float *restrict cosine,
             const float *restrict sine, float *restrict out, const float *queries, double *restrict sums, float *const *kept,
             const float *const *fresh, int64_t written_row, int64_t written_token, int64_t rows,
             int64_t group, int64_t tokens, int64_t pairs, int64_t slots, int64_t dims, int64_t first, int64_t full,
             int64_t every, int64_t floor, int64_t window, int64_t layer, int64_t num_layers, int64_t heads, int64_t seed, int64_t rotation,
             int64_t angles, int64_t threads) {
    const Shared shared = {cosine, sine, group, pairs, slots, dims, rotation, angles};
    const int64_t room = floor < 0 ? every : TOGETHER * every;  /* for victims of a head */
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t n0 = 0; n0 < rows; n0 += TOGETHER) {
        float *scratch = malloc((TOGETHER * ((1 + LOGITS_ARE_READ) * group + 2 + MERGED_WIDTH) + 3) * slots * sizeof(float));
        int64_t *angle = malloc(((1 + TOGETHER) * slots + TOGETHER * room + 1) * sizeof(int64_t)), *ranks = angle + slots;
        int64_t *evicted = ranks + TOGETHER * slots;  /* one more, for the number of tokens after the last head's */
        char *gone = calloc(TOGETHER * slots, 1), *of_programs = aligned_alloc(64, SCRATCH + 64);
        if (!scratch || !angle || !gone || !of_programs) {
            free(scratch); free(angle); free(gone); free(of_programs);
            failed = 1;
            continue;
        }
        float *restrict rotated = scratch, *restrict most = scratch + 2 * slots, *restrict worths = scratch + 3 * slots;
        float *restrict weights = worths + TOGETHER * slots, *logits = LOGITS_ARE_READ ? weights + TOGETHER * group * slots : NULL;
        float *merged = weights + TOGETHER * (1 + LOGITS_ARE_READ) * group * slots;
        int64_t *counts = held + n0;
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t step = first + t;
            int64_t total = 0, number[TOGETHER];
            for (int64_t h = 0; h < TOGETHER; h++) {
                const int64_t n = n0 + h, count = counts[h]++;
                float *restrict keys = held_key + n * 2 * pairs * slots, *restrict values = held_value + n * dims * slots;
                const float *restrict k = key + (n * tokens + t) * 2 * pairs, *restrict v = value + (n * tokens + t) * dims;
                for (int64_t p = 0; p < 2 * pairs; p++) keys[p * slots + count] = k[p];
                for (int64_t d = 0; d < dims; d++) values[d * slots + count] = v[d];
                position[n * slots + count] = step;
                for (int i = 0; i < NUMBERS; i++)
                    state[(n * NUMBERS + i) * slots + count] = written[n * written_row + t * written_token + i];
                keep(kept, fresh, sums, n, n * tokens + t, slots, count);
                attend(shared, query + (n * tokens + t) * 2 * pairs * group, keys, values, position + n * slots, step, count + 1,
                       floor < 0 || rotation != BY_RANK ? 0 : angles - 1 - count, rotated, angle, weights + h * group * slots,
                       logits ? logits + h * group * slots : NULL,
                       out + (t * rows + n) * group * dims);
                total += count + 1, number[h] = 0;
            }
            const int due = total >= TOGETHER * full;
#if PROGRAMS
            if (RANKS_ARE_READ)
                for (int64_t s = 0; s < TOGETHER * slots; s++) ranks[s] = s % slots < counts[s / slots] ? s % slots : slots;
            const Arrays arrays = {
                position + n0 * slots, ranks, &step, &layer, head + n0, prompt + n0 / heads,
                kept[0] + n0 * slots * KEYS_WIDTH, kept[1] + n0 * slots * ROTATED_WIDTH,
                held_value + n0 * dims * slots, state + n0 * NUMBERS * slots, sums + n0 * SUMS, weights, logits,
                out + (t * rows + n0) * group * dims,
                queries ? queries + (t * rows + n0) * group * 2 * pairs : NULL, worths, evicted, merged,
            };
            update_program(arrays, of_programs);
            if (due) importance_program(arrays, of_programs);
#else
            const int64_t count = counts[0];
            const Now now = {step, layer, head[n0], count, prompt[n0 / heads], group, num_layers, seed};
            const int64_t *restrict at = position + n0 * slots;
            float *restrict states = state + n0 * NUMBERS * slots;
            update_row(states, weights, worths, most, at, slots, now);
            for (int64_t s = 0; s < count && due; s++) worths[s] = importance(loaded(states, slots, s), s, at[s], now);
#endif
            if (!due) continue;
            for (int64_t h = 0; h < TOGETHER; h++) {
                const int64_t *restrict at_h = position + (n0 + h) * slots, count = counts[h];
                float *restrict worth = worths + h * slots;
                if (window)
                    for (int64_t s = 0; s < count; s++) worth[s] = step - at_h[s] >= window - 1 ? -INFINITY : worth[s];
                for (; floor < 0 && number[h] < every; number[h]++)
                    evict(lowest(worth, gone + h * slots, count), evicted + h * room, number[h], worth, gone + h * slots);
            }
            if (floor >= 0) compete(worths, gone, counts, evicted, number, slots, room, total - TOGETHER * (full - every), floor);
#if PROGRAMS
            if (MERGES) merge_program(arrays, of_programs);
            for (int64_t n = n0; n < n0 + TOGETHER && MERGED_WIDTH; n++)
                put_merged(merged + (n - n0) * slots * MERGED_WIDTH, kept, held_key + n * 2 * pairs * slots, position + n * slots, n,
                           slots, counts[n - n0]);
#endif
            for (int64_t h = TOGETHER - 1; h >= 0; h--) {  /* last head first: a head's end mark overwrites the next head's victim */
                const int64_t n = n0 + h, *victims = evicted + h * room;
                for (int64_t i = 0; i < number[h]; i++) gone[h * slots + victims[i]] = 0;
                evicted[h * room + number[h]] = counts[h];
                for (int64_t p = 0; p < 2 * pairs; p++)
                    close_gaps(held_key + (n * 2 * pairs + p) * slots, victims, number[h], sizeof(float));
                for (int64_t d = 0; d < dims; d++) close_gaps(held_value + (n * dims + d) * slots, victims, number[h], sizeof(float));
                for (int i = 0; i < NUMBERS; i++) close_gaps(state + (n * NUMBERS + i) * slots, victims, number[h], sizeof(float));
                close_gaps(position + n * slots, victims, number[h], sizeof(int64_t));
                forget(kept, sums, n, slots, victims, number[h]);
                counts[h] -= number[h];
            }
        }
        free(scratch);
        free(angle);
        free(gone);
        free(of_programs);
    }
    return failed ? -1 : 0;
}
