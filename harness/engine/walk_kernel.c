/* The walk of one block through one layer as one loop. A template: compiled.py puts a policy's expressions in.

   Tokens of a head lie oldest first, so that a token's place is its rank; evicting closes the gap. K and V lie with the slots
   as the last axis, so that everything is done for many slots at once.

   Axis letters: N rows (stream, KV head), G query heads of a KV head, T tokens, S slots, P pairs of dims, D head dim. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16

/* As CacheView.uniform. */
static inline float uniform(int64_t position, int64_t head, int64_t layer, int64_t seed) {
    uint64_t x = (uint64_t)position * (uint64_t)-7046029254386353131LL + (uint64_t)head * (uint64_t)-4658895280553007687LL;
    x += (uint64_t)layer * 6364136223846793005ULL + (uint64_t)seed;
    x = (x ^ (uint64_t)((int64_t)x >> 29)) * (uint64_t)-7046029254386353131LL;
    x = (x ^ (uint64_t)((int64_t)x >> 29)) * (uint64_t)-4658895280553007687LL;
    return (float)((x >> 40) & 0xFFFFFF) / 16777216.0f;
}

static inline float importance(float state, int64_t rank, int64_t position, int64_t step, int64_t layer, int64_t head, int64_t seed) {
    return (float)(IMPORTANCE);
}

static inline float update(float state, float mass, int64_t rank, int64_t position, int64_t step, int64_t layer, int64_t head,
                           int64_t seed) {
    return (float)(UPDATE);
}

static float largest(const float *restrict x, int64_t count) {
    float lane[LANES], most = x[0];
    int64_t s = 0;
    for (int j = 0; j < LANES; j++) lane[j] = x[0];
    for (; s + LANES <= count; s += LANES)
        for (int j = 0; j < LANES; j++) lane[j] = x[s + j] > lane[j] ? x[s + j] : lane[j];
    for (; s < count; s++) most = x[s] > most ? x[s] : most;
    for (int j = 0; j < LANES; j++) most = lane[j] > most ? lane[j] : most;
    return most;
}

/* x becomes exp(x - most), to float32's last digits; returns the sum. Cephes' expf: minimax polynomial on [-ln2/2, ln2/2]. */
static float exponentials(float *restrict x, float most, int64_t count) {
    float total = 0;
    for (int64_t s = 0; s < count; s++) {
        float y = x[s] - most;
        y = y < -87.0f ? -87.0f : y;
        float n = floorf(y * 1.44269504f + 0.5f);
        float f = (y - n * 0.693359375f) + n * 2.12194440e-4f;
        float p = 1.9875691500e-4f;
        p = p * f + 1.3981999507e-3f;
        p = p * f + 8.3334519073e-3f;
        p = p * f + 4.1665795894e-2f;
        p = p * f + 1.6666665459e-1f;
        p = p * f + 5.0000001201e-1f;
        union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
        x[s] = (p * f * f + f + 1.0f) * power.f;
        total += x[s];
    }
    return total;
}

/* Walk a block. Returns how many tokens are held, or -1 without memory.

   query: rotated and scaled, [N, T, 2, P, G], real parts and imaginary ones; key: unrotated, [N, T, 2, P]; value: [N, T, D].
   held_key: [N, 2, P, S]; held_value: [N, D, S]; position, state: [N, S]: of the `held` tokens, oldest first; changed.
   cosine, sine: of every rank, [P, S]. first: step of the first token. window: sliding window of the layer, 0 if none.
   out: [T, N, G, D], written. */
int64_t walk(const float *restrict query, const float *restrict key, const float *restrict value, float *restrict held_key,
             float *restrict held_value, int64_t *restrict position, float *restrict state, const float *restrict cosine,
             const float *restrict sine, float *restrict out, int64_t rows, int64_t group, int64_t tokens, int64_t pairs,
             int64_t slots, int64_t dims, int64_t held, int64_t first, int64_t capacity, int64_t window, float initial,
             int64_t layer, int64_t heads, int64_t seed, int64_t threads) {
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t n = 0; n < rows; n++) {
        float *scratch = malloc((group + 3) * slots * sizeof(float));
        if (!scratch) { failed = 1; continue; }
        float *restrict mass = scratch, *restrict turned_re = scratch + slots, *restrict turned_im = scratch + 2 * slots;
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
            for (int64_t p = 0; p < pairs; p++) {
                const float *restrict re = keys + p * slots, *restrict im = keys + (pairs + p) * slots;
                const float *restrict c = cosine + p * slots, *restrict i = sine + p * slots;
                for (int64_t s = 0; s < count; s++) {
                    turned_re[s] = re[s] * c[s] - im[s] * i[s];
                    turned_im[s] = re[s] * i[s] + im[s] * c[s];
                }
                for (int64_t g = 0; g < group; g++) {
                    const float a = q[p * group + g], b = q[(pairs + p) * group + g];
                    float *restrict row = scores + g * slots;
                    for (int64_t s = 0; s < count; s++) row[s] += a * turned_re[s] + b * turned_im[s];
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
    }
    const int64_t all = held + tokens;
    return failed ? -1 : all < capacity ? all : capacity;
}
