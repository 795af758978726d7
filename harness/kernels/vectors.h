/* Step of one KV head: dims, RoPE of a vector, and dot products. This is a template: compiler.py inserts the dims.

   Axis letters: G query heads of a KV head, P pairs of dims, D key dim, E value dim. */

#include <stddef.h>
#include <stdint.h>

enum { G = GROUP, D = KEY_DIM, E = VALUE_DIM };
enum { BY_RANK, BY_POSITION, CLAMPED, ROTATED };

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define WIDE 8
typedef float wide __attribute__((vector_size(4 * WIDE), aligned(4)));
static const wide SIGNS = {-1, 1, -1, 1, -1, 1, -1, 1};

/* Products of interleaved complex numbers. */
static inline wide product(wide a, wide b) {
    const wide re = __builtin_shufflevector(b, b, 0, 0, 2, 2, 4, 4, 6, 6), im = __builtin_shufflevector(b, b, 1, 1, 3, 3, 5, 5, 7, 7);
    return a * re + __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6) * (im * SIGNS);
}
#endif
#endif
#ifndef WIDE
#define WIDE 1
#endif

/* Rotates a vector by the RoPE factors `low` times `high` [D], complex numbers; by `low` alone if `high` is null. */
static inline void rotate(float *restrict out, const float *restrict x, const float *restrict low, const float *restrict high) {
    int d = 0;
#if WIDE > 1
    for (; d + WIDE <= D; d += WIDE) {
        wide factors = *(const wide *)(low + d);
        if (high) factors = product(factors, *(const wide *)(high + d));
        *(wide *)(out + d) = product(*(const wide *)(x + d), factors);
    }
#endif
    for (; d < D - 1; d += 2) {
        const float re = high ? low[d] * high[d] - low[d + 1] * high[d + 1] : low[d];
        const float im = high ? low[d] * high[d + 1] + low[d + 1] * high[d] : low[d + 1];
        out[d] = x[d] * re - x[d + 1] * im;
        out[d + 1] = x[d] * im + x[d + 1] * re;
    }
}

/* Dot product of two vectors [D]. */
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

/* Returns the position that RoPE gives to the token of a slot. */
static inline int64_t angle(int64_t mode, int64_t rank, int64_t position, int64_t step, int64_t limit) {
    if (mode == BY_RANK) return rank;
    if (mode == BY_POSITION || mode == ROTATED) return position;
    const int64_t distance = step - position;
    return limit - (distance < 0 ? 0 : distance < limit ? distance : limit);
}
