/* One token in one layer, as in `step.c`, where K and V are stored as packed integers, which are unpacked in registers: no float of
   the cache is written. This is a template: compiler.py puts in the dims, the bits of a code, and the channels that share a scale.

   A number is code * scale + zero. The first `sinks` tokens of a stream and the `recent` newest are read from where they lie beside
   the codes, as they were. The code of a new token is that of `store.encoded`, digit for digit.

   Axis letters: N rows (stream, KV head), G query heads of a KV head, S slots, P pairs of dims, D key dim, E value dim, X exempt
   tokens, g groups of channels. */

#include "numbers.h"
#include "vectors.h"
#include <float.h>
#include <stdlib.h>
#include <string.h>

enum { BITS = CODE_BITS, KC = KEY_CHANNELS, EC = VALUE_CHANNELS };  /* channels of a group */

#if STORED_IN_16_BITS  /* bfloat16: the upper half of a float */
typedef uint16_t stored;
static inline float loaded(stored x) {
    const uint32_t bits = (uint32_t)x << 16;
    float wide_x;
    memcpy(&wide_x, &bits, 4);
    return wide_x;
}
static inline stored rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (stored)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#else
typedef float stored;
static inline float loaded(stored x) { return x; }
static inline stored rounded(float x) { return x; }
#endif

/* Where a token is held if it is exempt; -1 if it is not. */
static inline int64_t place_of(int64_t position, int64_t now, int64_t sinks, int64_t recent) {
    if (position < sinks) return position;
    return now - position < recent ? sinks + position % recent : -1;
}

#if WIDE > 1
typedef int32_t whole __attribute__((vector_size(4 * WIDE)));

/* The next WIDE codes, of which the first is at a byte's beginning. */
static inline wide unpacked_wide(const uint8_t *codes) {
    if (BITS == 8) {
        typedef uint8_t bytes __attribute__((vector_size(8), aligned(1)));
        return __builtin_convertvector(__builtin_convertvector(*(const bytes *)codes, whole), wide);
    }
    uint32_t word = 0;
    memcpy(&word, codes, BITS);  /* WIDE codes of BITS bits are BITS bytes */
    const whole shifts = {0, BITS, 2 * BITS, 3 * BITS, 4 * BITS, 5 * BITS, 6 * BITS, 7 * BITS};
    return __builtin_convertvector((whole){word, word, word, word, word, word, word, word} >> shifts & ((1 << BITS) - 1), wide);
}
#endif

/* A stored vector of `dims` numbers, of which `channels` share a scale. */
static inline __attribute__((always_inline)) void unpack(float *restrict out, const uint8_t *restrict codes,
                                                         const stored *restrict scale, const stored *restrict zero, int dims,
                                                         int channels) {
    int d = 0;
#if WIDE > 1
    if (channels % WIDE == 0) {
#pragma GCC unroll 32
        for (; d < dims; d += WIDE)
            *(wide *)(out + d) = unpacked_wide(codes + d * BITS / 8) * loaded(scale[d / channels]) + loaded(zero[d / channels]);
    }
#endif
    for (; d < dims; d++) {
        const int code = codes[d * BITS / 8] >> (d * BITS % 8) & ((1 << BITS) - 1);
        out[d] = (float)code * loaded(scale[d / channels]) + loaded(zero[d / channels]);
    }
}

/* Stores a vector as codes. */
static inline void pack(const float *restrict x, uint8_t *restrict codes, stored *restrict scale, stored *restrict zero, int dims,
                        int channels) {
    const float levels = (1 << BITS) - 1;
    memset(codes, 0, dims * BITS / 8);
    for (int first = 0; first < dims; first += channels) {
        float least = x[first], most = x[first];
        for (int d = first; d < first + channels; d++) {
            least = x[d] < least ? x[d] : least;
            most = x[d] > most ? x[d] : most;
        }
        scale[first / channels] = rounded((most - least) / levels);
        zero[first / channels] = rounded(least);
        const float width = loaded(scale[first / channels]), step = width < FLT_MIN ? FLT_MIN : width;
        for (int d = first; d < first + channels; d++) {
            float code = rintf((x[d] - loaded(zero[first / channels])) / step);
            code = code < 0 ? 0 : code > levels ? levels : code;
            codes[d * BITS / 8] |= (uint8_t)((int)code << (d * BITS % 8));
        }
    }
}

/* Reads a token. Returns 0, or -1 if there is no memory.

   key_codes: [N, slots, D * BITS / 8], key_scale, key_zero: [N, slots, g], key_exact: [N, X, D]; the same of values. The other
   arguments are those of `step`. */
int64_t coded_step(const float *query, const float *key, const float *value, const int64_t *order, uint8_t *key_codes,
                   stored *key_scale, stored *key_zero, stored *key_exact, uint8_t *value_codes, stored *value_scale,
                   stored *value_zero, stored *value_exact, const int64_t *rank, const int64_t *position,
                   const int64_t *free_slots, const float *low, const float *high, float *out, float *mass, int64_t rows,
                   int64_t first, int64_t slots, int64_t attended, int64_t mode, int64_t limit, int64_t level, int64_t threads,
                   int64_t sinks, int64_t recent, float scaling) {
    enum { KB = D * BITS / 8, EB = E * BITS / 8, KG = D / KC, EG = E / EC };
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1)
    for (int64_t n = 0; n < rows; n++) {
        float *scratch = mass ? NULL : malloc(G * attended * sizeof(float));
        if (!mass && !scratch) { failed = 1; continue; }
        float *restrict scores = mass ? mass + n * G * attended : scratch;
        const int64_t at = free_slots[n] - first - n * slots, exempt = sinks + recent;
        const int64_t *ranks = rank + n * slots, *positions = position + n * slots, now = positions[at];
        const int64_t own = place_of(now, now, sinks, recent);
        uint8_t *kc = key_codes + n * slots * KB, *ec = value_codes + n * slots * EB;
        stored *ks = key_scale + n * slots * KG, *kz = key_zero + n * slots * KG, *kx = key_exact + n * exempt * D;
        stored *es = value_scale + n * slots * EG, *ez = value_zero + n * slots * EG, *ex = value_exact + n * exempt * E;
        float rotated[G][D], plain[D], new_key[D];
        const int64_t here = angle(mode, ranks[at], now, now, limit);
        const float *near = low ? low + (here % level) * D : NULL, *far = high ? high + (here / level) * D : NULL;
        for (int d = 0; d < D; d++) plain[d] = new_key[d] = key[n * D + order[d]];
        if (low && mode == ROTATED) rotate(new_key, plain, near, far);
        for (int d = 0; d < D; d++) new_key[d] = loaded(rounded(new_key[d]));
        pack(new_key, kc + at * KB, ks + at * KG, kz + at * KG, D, KC);
        pack(value + n * E, ec + at * EB, es + at * EG, ez + at * EG, E, EC);
        for (int d = 0; own >= 0 && d < D; d++) kx[own * D + d] = rounded(new_key[d]);
        for (int e = 0; own >= 0 && e < E; e++) ex[own * E + e] = rounded(value[n * E + e]);
        for (int g = 0; g < G; g++) {
            for (int d = 0; d < D; d++) plain[d] = rotated[g][d] = query[(n * G + g) * D + order[d]] * scaling;
            if (low) rotate(rotated[g], plain, near, far);
        }
        for (int64_t s = 0; s < attended; s++) {
            float held[D], turned[D];
            if (ranks[s] >= slots) {
                for (int g = 0; g < G; g++) scores[g * attended + s] = -INFINITY;
                continue;
            }
            const int64_t place = exempt ? place_of(positions[s], now, sinks, recent) : -1;
            if (place < 0) unpack(held, kc + s * KB, ks + s * KG, kz + s * KG, D, KC);
            else for (int d = 0; d < D; d++) held[d] = loaded(kx[place * D + d]);
            const int turns = low && mode != ROTATED;
            if (turns) {
                const int64_t angle_of = angle(mode, ranks[s], positions[s], now, limit);
                if (high) rotate(turned, held, low + (angle_of % level) * D, high + (angle_of / level) * D);
                else rotate(turned, held, low + angle_of * D, NULL);
            }
            for (int g = 0; g < G; g++) scores[g * attended + s] = dot(rotated[g], turns ? turned : held);
        }
        float sum[G][E] = {{0}};
        for (int g = 0; g < G; g++) {
            float *restrict row = scores + g * attended;
            const float inverse = 1.0f / exponentials(row, largest(row, attended), attended);
            for (int64_t s = 0; s < attended; s++) row[s] = ranks[s] < slots ? row[s] * inverse : 0.0f;
        }
        for (int64_t s = 0; s < attended; s++) {
            float held[E];
            if (ranks[s] >= slots) continue;
            const int64_t place = exempt ? place_of(positions[s], now, sinks, recent) : -1;
            if (place < 0) unpack(held, ec + s * EB, es + s * EG, ez + s * EG, E, EC);
            else for (int e = 0; e < E; e++) held[e] = loaded(ex[place * E + e]);
            for (int g = 0; g < G; g++)
                for (int e = 0; e < E; e++) sum[g][e] += scores[g * attended + s] * held[e];
        }
        memcpy(out + n * G * E, sum, sizeof sum);
        free(scratch);
    }
    return failed ? -1 : 0;
}
