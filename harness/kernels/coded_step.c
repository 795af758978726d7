/* One token in one layer, as in `step.c`, with K and V stored as packed integers. They are decoded in registers, and no decoded K or
   V is written to memory. This is a template: compiler.py inserts the dims, the bits of a code, and the channels that share a scale.

   A number is code * scale + zero. The first `sinks` tokens of a stream and the `recent` newest tokens are exempt, and read from the
   exact vectors beside the codes. Codes of a new token equal those of `slot_stores.encoded` exactly.

   Axis letters: N rows (stream, KV head), G query heads of a KV head, S slots, P pairs of dims, D key dim, E value dim, X exempt
   tokens, g groups of channels. */

#include "numbers.h"
#include <float.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#pragma GCC optimize("no-associative-math")  /* associative math splits fused multiply-adds, to add products in pairs */
#include "vectors.h"

enum { BITS = CODE_BITS, KC = KEY_CHANNELS, EC = VALUE_CHANNELS };  /* channels of a group */
enum { BLOCK = 8 };  /* slots that are unpacked at once */

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

/* Place of dim d in a vector whose even dims come first. */
static inline int split(int d, int dims) { return dims % 2 ? d : d / 2 + d % 2 * (dims / 2); }

/* Place of a token among the exempt tokens; -1 for coded tokens. */
static inline int64_t place_of(int64_t position, int64_t now, int64_t sinks, int64_t recent) {
    if (position < sinks) return position;
    return now - position < recent ? sinks + position % recent : -1;
}

#if WIDE > 1
typedef uint32_t whole __attribute__((vector_size(4 * WIDE)));
typedef int32_t positive __attribute__((vector_size(4 * WIDE)));

/* Loads WIDE pairs of codes, 2 * BITS bytes. The first code of a pair is in the lowest bits of a lane, the second code above. */
static inline __attribute__((always_inline)) whole pairs(const uint8_t *codes) {
    if (BITS == 2) {
        uint32_t word;
        memcpy(&word, codes, 4);
        return (whole){word, word, word, word, word, word, word, word} >> (whole){0, 4, 8, 12, 16, 20, 24, 28};
    }
#ifdef __AVX2__
    return BITS == 4 ? (whole)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes))
                     : (whole)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)codes));
#else
    typedef uint8_t single __attribute__((vector_size(8), aligned(1)));
    typedef uint16_t twice __attribute__((vector_size(16), aligned(1)));
    return BITS == 4 ? __builtin_convertvector(*(const single *)codes, whole) : __builtin_convertvector(*(const twice *)codes, whole);
#endif
}
#endif

/* Unpacks a stored vector of `dims` numbers, of which `channels` share a scale: first even channels, then odd channels. */
static inline __attribute__((always_inline)) void unpack(float *restrict out, const uint8_t *restrict codes,
                                                         const stored *restrict scale, const stored *restrict zero, int dims,
                                                         int channels) {
    const uint32_t most = (1 << BITS) - 1;
    int d = 0;
#if WIDE > 1
    if (channels % (2 * WIDE) == 0)
#pragma GCC unroll 16
        for (; d < dims; d += 2 * WIDE) {
            const float width = loaded(scale[d / channels]), least = loaded(zero[d / channels]);
            const whole pair = pairs(codes + d * BITS / 8);
            *(wide *)(out + d / 2) = __builtin_convertvector((positive)(pair & most), wide) * width + least;
            *(wide *)(out + d / 2 + dims / 2) = __builtin_convertvector((positive)(pair >> BITS & most), wide) * width + least;
        }
#endif
    for (; d < dims; d++) {
        const uint32_t code = codes[d * BITS / 8] >> (d * BITS % 8) & most;
        out[split(d, dims)] = (float)code * loaded(scale[d / channels]) + loaded(zero[d / channels]);
    }
}

/* Rotates a vector by RoPE factors on two levels, cosines and sines; the second level is null if there is only one. */
static inline __attribute__((always_inline)) void turn(float *restrict x, const float *restrict low, const float *restrict high) {
    enum { P = D / 2 };
    for (int p = 0; p < P; p++) {
        const float re = x[p], im = x[p + P];
        const float c = high ? low[p] * high[p] - low[p + P] * high[p + P] : low[p];
        const float s = high ? low[p] * high[p + P] + low[p + P] * high[p] : low[p + P];
        x[p] = re * c - im * s;
        x[p + P] = re * s + im * c;
    }
}

/* Computes scores of BLOCK keys: dot products with one query [D]. */
static inline void dots(float *restrict scores, float (*restrict keys)[D], const float *restrict query) {
    int d = 0;
#if WIDE > 1
    wide sum[BLOCK] = {{0}};
    for (; d + WIDE <= D; d += WIDE)
#pragma GCC unroll 8
        for (int j = 0; j < BLOCK; j++) sum[j] += *(const wide *)(keys[j] + d) * *(const wide *)(query + d);
    wide pair[4], four[2];  /* sums of 2, and of 4 lanes, of 2 and of 4 keys side by side */
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
        pair[j] = __builtin_shufflevector(sum[2 * j], sum[2 * j + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
                  __builtin_shufflevector(sum[2 * j], sum[2 * j + 1], 1, 9, 3, 11, 5, 13, 7, 15);
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++)
        four[j] = __builtin_shufflevector(pair[2 * j], pair[2 * j + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                  __builtin_shufflevector(pair[2 * j], pair[2 * j + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    *(wide *)scores = __builtin_shufflevector(four[0], four[1], 0, 1, 2, 3, 8, 9, 10, 11) +
                      __builtin_shufflevector(four[0], four[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
    memset(scores, 0, BLOCK * sizeof(float));
#endif
    for (; d < D; d++)
        for (int j = 0; j < BLOCK; j++) scores[j] += keys[j][d] * query[d];
}

/* Adds BLOCK weighted values [E]. */
static inline void add(float *restrict sum, const float *restrict weights, float (*restrict values)[E]) {
    int e = 0;
#if WIDE > 1
    for (; e + WIDE <= E; e += WIDE) {
        wide total = *(wide *)(sum + e);
#pragma GCC unroll 8
        for (int j = 0; j < BLOCK; j++) total += weights[j] * *(const wide *)(values[j] + e);
        *(wide *)(sum + e) = total;
    }
#endif
    for (; e < E; e++)
        for (int j = 0; j < BLOCK; j++) sum[e] += weights[j] * values[j][e];
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

   key_codes: [N, slots, D * BITS / 8], key_scale, key_zero: [N, slots, g], key_exact: [N, X, D]; arguments for values have the same
   shapes with E. Other arguments are those of `step`. */
int64_t coded_step(const float *query, const float *key, const float *value, const int64_t *order, uint8_t *key_codes,
                   stored *key_scale, stored *key_zero, stored *key_exact, uint8_t *value_codes, stored *value_scale,
                   stored *value_zero, stored *value_exact, const int64_t *rank, const int64_t *position,
                   const int64_t *free_slots, const float *low, const float *high, float *out, float *mass, int64_t rows,
                   int64_t first, int64_t slots, int64_t attended, int64_t mode, int64_t limit, int64_t level, int64_t threads,
                   int64_t sinks, int64_t recent, float scaling) {
    enum { KB = D * BITS / 8, EB = E * BITS / 8, KG = D / KC, EG = E / EC };
    const int level_bits = __builtin_ctzll(level);  /* level is a power of two; a division would take as long as a rotation */
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1)
    for (int64_t n = 0; n < rows; n++) {
        float *scratch = mass ? NULL : malloc(G * attended * sizeof(float));
        if (!mass && !scratch) { failed = 1; continue; }
        float *restrict scores = mass ? mass + n * G * attended : scratch;
        const int64_t at = free_slots[n] - first - n * slots, exempt = sinks + recent;
        const int64_t *ranks = rank + n * slots, *positions = position + n * slots, now = positions[at];
        const int turns = low && mode != ROTATED;
        const int64_t own = place_of(now, now, sinks, recent);
        uint8_t *kc = key_codes + n * slots * KB, *ec = value_codes + n * slots * EB;
        stored *ks = key_scale + n * slots * KG, *kz = key_zero + n * slots * KG, *kx = key_exact + n * exempt * D;
        stored *es = value_scale + n * slots * EG, *ez = value_zero + n * slots * EG, *ex = value_exact + n * exempt * E;
        float rotated[G][D], plain[D], new_key[D];
        const int64_t here = angle(mode, ranks[at], now, now, limit);
        const float *near = low ? low + (here % level) * D : NULL, *far = high ? high + (here / level) * D : NULL;
        for (int d = 0; d < D; d++) plain[split(d, D)] = key[n * D + order[d]];
        if (low && mode == ROTATED) turn(plain, near, far);
        for (int d = 0; d < D; d++) new_key[d] = loaded(rounded(plain[split(d, D)]));
        pack(new_key, kc + at * KB, ks + at * KG, kz + at * KG, D, KC);
        pack(value + n * E, ec + at * EB, es + at * EG, ez + at * EG, E, EC);
        for (int d = 0; own >= 0 && d < D; d++) kx[own * D + d] = rounded(new_key[d]);
        for (int e = 0; own >= 0 && e < E; e++) ex[own * E + e] = rounded(value[n * E + e]);
        for (int g = 0; g < G; g++) {
            for (int d = 0; d < D; d++) rotated[g][split(d, D)] = query[(n * G + g) * D + order[d]] * scaling;
            if (low) turn(rotated[g], near, far);
        }
        float held_keys[BLOCK][D] = {{0}}, held_values[BLOCK][E] = {{0}}, sum[G][E] = {{0}}, of_block[BLOCK];
        for (int64_t begin = 0; begin < attended; begin += BLOCK) {
            const int64_t count = attended - begin < BLOCK ? attended - begin : BLOCK;
            for (int64_t j = 0, s = begin; j < count; j++, s++) {
                const int64_t place = exempt ? place_of(positions[s], now, sinks, recent) : -1;
                float *restrict x = held_keys[j];
                if (ranks[s] >= slots) continue;
                if (place < 0) unpack(x, kc + s * KB, ks + s * KG, kz + s * KG, D, KC);
                else for (int d = 0; d < D; d++) x[split(d, D)] = loaded(kx[place * D + d]);
                if (!turns) continue;
                const int64_t angle_of = angle(mode, ranks[s], positions[s], now, limit);
                if (high) turn(x, low + (angle_of & (level - 1)) * D, high + (angle_of >> level_bits) * D);
                else turn(x, low + angle_of * D, NULL);
            }
            for (int g = 0; g < G; g++) {
                dots(of_block, held_keys, rotated[g]);
                for (int64_t j = 0, s = begin; j < count; j++, s++)
                    scores[g * attended + s] = ranks[s] < slots ? of_block[j] : -INFINITY;
            }
        }
        for (int g = 0; g < G; g++) {
            float *restrict row = scores + g * attended;
            const float inverse = 1.0f / exponentials(row, largest(row, attended), attended);
            for (int64_t s = 0; s < attended; s++) row[s] = ranks[s] < slots ? row[s] * inverse : 0.0f;
        }
        for (int64_t begin = 0; begin < attended; begin += BLOCK) {
            const int64_t count = attended - begin < BLOCK ? attended - begin : BLOCK;
            for (int64_t j = 0, s = begin; j < count; j++, s++) {
                const int64_t place = exempt ? place_of(positions[s], now, sinks, recent) : -1;
                if (ranks[s] >= slots) continue;
                if (place < 0) unpack(held_values[j], ec + s * EB, es + s * EG, ez + s * EG, E, EC);
                else for (int e = 0; e < E; e++) held_values[j][split(e, E)] = loaded(ex[place * E + e]);
            }
            for (int g = 0; g < G; g++) {
                memset(of_block, 0, sizeof of_block);
                memcpy(of_block, scores + g * attended + begin, count * sizeof(float));
                add(sum[g], of_block, held_values);
            }
        }
        for (int g = 0; g < G; g++)
            for (int e = 0; e < E; e++) out[(n * G + g) * E + e] = sum[g][split(e, E)];
        free(scratch);
    }
    return failed ? -1 : 0;
}
