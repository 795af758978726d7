/* Functions shared by the kernels: the maximum of an array, and its exponentials. */

#include <math.h>
#include <stdint.h>

#define LANES 16

static inline float largest(const float *restrict x, int64_t count) {
    float lane[LANES], most = x[0];
    int64_t s = 0;
    for (int j = 0; j < LANES; j++) lane[j] = x[0];
    for (; s + LANES <= count; s += LANES)
        for (int j = 0; j < LANES; j++) lane[j] = x[s + j] > lane[j] ? x[s + j] : lane[j];
    for (; s < count; s++) most = x[s] > most ? x[s] : most;
    for (int j = 0; j < LANES; j++) most = lane[j] > most ? lane[j] : most;
    return most;
}

/* Returns exp(x) for x in [-87, 88], accurate to the last digits of float32. This is Cephes' expf, with a minimax polynomial on
   [-ln2/2, ln2/2]. Always inlined, so that loops over it vectorise under any options. */
static inline __attribute__((always_inline)) float bounded_exponential(float x) {
    float n = floorf(x * 1.44269504f + 0.5f);
    float f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
    return (p * f * f + f + 1.0f) * power.f;
}

/* Replaces x by exp(x - most), and returns the sum. */
static inline float exponentials(float *restrict x, float most, int64_t count) {
    float total = 0;
    for (int64_t s = 0; s < count; s++) {
        const float y = x[s] - most;
        x[s] = bounded_exponential(y < -87.0f ? -87.0f : y);
        total += x[s];
    }
    return total;
}
