/* Programs of a policy, for all slots of TOGETHER rows at once. This is a template: compiler.py inserts the programs.

   Axis letters: H rows of a program, G query heads of a KV head, S slots, D key dim, E value dim, W numbers kept with a token,
   V tokens evicted at once. */

#define PROGRAMS PROGRAMS_OF_POLICY

enum { TOGETHER = TOGETHER_OF_POLICY, SUMS = SUMS_OF_POLICY, SCRATCH = SCRATCH_OF_POLICY };
enum { RANKS_ARE_READ = RANKS_READ_OF_POLICY, LOGITS_ARE_READ = LOGITS_READ_OF_POLICY };
enum { MERGES = MERGES_OF_POLICY, MERGED_WIDTH = MERGED_WIDTH_OF_POLICY };
enum { KEYS_WIDTH = KEYS_WIDTH_OF_POLICY, ROTATED_WIDTH = ROTATED_WIDTH_OF_POLICY, TERMS_WIDTH = TERMS_WIDTH_OF_POLICY };

static const int64_t KEPT_WIDTHS[3] = {KEYS_WIDTH, ROTATED_WIDTH, TERMS_WIDTH};
static const int64_t SUM_OF_TERM[TERMS_WIDTH + !TERMS_WIDTH] = {SUM_OF_TERM_OF_POLICY};

/* Arrays of a program. position, rank: [H, S]; step, layer, prompt: one number; head: [H]; keys, rotated: [H, S, D]; values: [H, E, S];
   state: [H, NUMBERS, S]; sums: [H, SUMS]; weights, logits: [H, G, S]; outputs: [H, G, E]; queries: unrotated, [H, G, D];
   worth: [H, S]; evicted: slots in ascending order, [H, V]; merged: receives unrotated keys, [H, S, D]. */
typedef struct {
    const int64_t *position, *rank, *step, *layer, *head, *prompt;
    const float *keys, *rotated, *values;
    float *state;
    double *sums;
    const float *weights, *logits, *outputs, *queries;
    float *worth;
    const int64_t *evicted;
    float *merged;
} Arrays;

/* Enters the numbers that are kept with a token, and adds its terms to the sums of its row. row, token, slot: of the token. */
static inline void keep(float *const *kept, const float *const *fresh, double *sums, int64_t row, int64_t token, int64_t slots,
                        int64_t slot) {
    for (int i = 0; i < 3; i++)
        if (KEPT_WIDTHS[i])
            memcpy(kept[i] + (row * slots + slot) * KEPT_WIDTHS[i], fresh[i] + token * KEPT_WIDTHS[i], KEPT_WIDTHS[i] * sizeof(float));
    for (int64_t i = 0; i < TERMS_WIDTH; i++) sums[row * SUMS + SUM_OF_TERM[i]] += fresh[2][token * TERMS_WIDTH + i];
}

/* Subtracts the terms of evicted tokens from the sums of a row, and closes the gaps. victims: as in `close_gaps`. */
static inline void forget(float *const *kept, double *sums, int64_t row, int64_t slots, const int64_t *victims, int64_t evicted) {
    for (int64_t v = 0; v < evicted; v++)
        for (int64_t i = 0; i < TERMS_WIDTH; i++)
            sums[row * SUMS + SUM_OF_TERM[i]] -= kept[2][(row * slots + victims[v]) * TERMS_WIDTH + i];
    for (int i = 0; i < 3; i++)
        if (KEPT_WIDTHS[i])
            close_gaps(kept[i] + row * slots * KEPT_WIDTHS[i], victims, evicted, KEPT_WIDTHS[i] * sizeof(float));
}

static const double FREQUENCIES[MERGED_WIDTH / 2 + 1] = {FREQUENCIES_OF_POLICY};  /* of RoPE; 0 for pairs that do not rotate */

/* Stores the merged keys that changed, [S, D]: as they are and rotated in `kept`, and rotated in `keys`, [2, P, S].
   at: positions, [S]. */
static inline void put_merged(const float *merged, float *const *kept, float *keys, const int64_t *at, int64_t row, int64_t slots,
                              int64_t count) {
    const int64_t pairs = MERGED_WIDTH / 2;
    for (int64_t s = 0; s < count; s++) {
        const float *key = merged + s * MERGED_WIDTH;
        float *own = kept[0] + (row * slots + s) * MERGED_WIDTH, *turned = kept[1] + (row * slots + s) * MERGED_WIDTH;
        if (!memcmp(own, key, MERGED_WIDTH * sizeof(float))) continue;
        memcpy(own, key, MERGED_WIDTH * sizeof(float));
        for (int64_t p = 0; p < pairs; p++) {
            const float c = cos(at[s] * FREQUENCIES[p]), i = sin(at[s] * FREQUENCIES[p]);
            keys[p * slots + s] = turned[2 * p] = key[2 * p] * c - key[2 * p + 1] * i;
            keys[(pairs + p) * slots + s] = turned[2 * p + 1] = key[2 * p] * i + key[2 * p + 1] * c;
        }
    }
}

/* Returns a place within an axis, so that a policy's indices never leave its arrays. */
static inline int64_t within(int64_t place, int64_t size) {
    return place < 0 ? 0 : place < size ? place : size - 1;
}

/* Sorts numbers in ascending order, and keeps the order of equal numbers. order: receives the places of the `count` numbers, followed
   by as many of scratch. */
static inline void sort_order(const double *key, int64_t *order, int64_t count) {
    int64_t *from = order, *into = order + count;
    for (int64_t i = 0; i < count; i++) from[i] = i;
    for (int64_t width = 1; width < count; width *= 2) {
        for (int64_t low = 0; low < count; low += 2 * width) {
            const int64_t middle = low + width < count ? low + width : count, high = low + 2 * width < count ? low + 2 * width : count;
            int64_t a = low, b = middle;
            for (int64_t i = low; i < high; i++) into[i] = a < middle && (b >= high || key[from[a]] <= key[from[b]]) ? from[a++] : from[b++];
        }
        int64_t *other = from;
        from = into, into = other;
    }
    if (from != order) memcpy(order, from, count * sizeof(int64_t));
}

enum { TILE_ROWS = 4, TILE = 32 };

/* Multiplies matrices. left: [rows, inner], with rows of zeros up to a multiple of TILE_ROWS; right: [inner, columns], with columns up
   to a multiple of TILE, `width`; out: [rows, columns] with any strides. mirrored: the result is symmetric, since `right` is `left`
   transposed. */
#define MULTIPLY(TYPE) \
    static inline void multiply_##TYPE(const TYPE *left, const TYPE *right, TYPE *out, int64_t rows, int64_t inner, int64_t columns, \
                                       int64_t width, int64_t row_stride, int64_t column_stride, int mirrored) { \
        for (int64_t i0 = 0; i0 < rows; i0 += TILE_ROWS) \
            for (int64_t j0 = mirrored ? i0 / TILE * TILE : 0; j0 < columns; j0 += TILE) { \
                TYPE sum[TILE_ROWS][TILE] = {{0}}; \
                for (int64_t k = 0; k < inner; k++) \
                    for (int i = 0; i < TILE_ROWS; i++) \
                        for (int j = 0; j < TILE; j++) sum[i][j] += left[(i0 + i) * inner + k] * right[k * width + j0 + j]; \
                const int64_t height = rows - i0 < TILE_ROWS ? rows - i0 : TILE_ROWS, last = columns - j0 < TILE ? columns - j0 : TILE; \
                for (int64_t i = 0; i < height; i++) \
                    for (int64_t j = 0; j < last; j++) out[(i0 + i) * row_stride + (j0 + j) * column_stride] = sum[i][j]; \
                for (int64_t j = 0; j < last && mirrored; j++) \
                    for (int64_t i = 0; i < height; i++) out[(j0 + j) * row_stride + (i0 + i) * column_stride] = sum[i][j]; \
            } \
    }
MULTIPLY(float)
MULTIPLY(double)

/* Equal tokens must be worth the same in every slot: sums keep their order, and no product is fused with a sum. */
#pragma GCC push_options
#pragma GCC optimize("no-associative-math", "fp-contract=off", "no-tree-pre")

/* Returns exp(x); 0 and infinity beyond the range of `bounded_exponential`. */
static inline float exponential(float x) {
    const float y = bounded_exponential(x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x);
    return x < -87.0f ? 0.0f : x > 88.0f ? INFINITY : x == x ? y : x;
}

/* Multiplies a few rows with a matrix whose columns are contiguous. left: [rows, inner]; right: columns of `inner` numbers, `stride`
   apart; out: as in `multiply`. */
#define DOTS(TYPE) \
    static inline void dots_##TYPE(const TYPE *left, const TYPE *right, TYPE *out, int64_t rows, int64_t inner, int64_t columns, \
                                   int64_t stride, int64_t row_stride, int64_t column_stride) { \
        for (int64_t i = 0; i < rows; i++) \
            for (int64_t j = 0; j < columns; j++) { \
                const TYPE *a = left + i * inner, *b = right + j * stride; \
                TYPE lane[LANES] = {0}; \
                int64_t k = 0; \
                for (; k + LANES <= inner; k += LANES) \
                    for (int l = 0; l < LANES; l++) lane[l] += a[k + l] * b[k + l]; \
                for (int half = LANES / 2; half; half /= 2) \
                    for (int l = 0; l < half; l++) lane[l] += lane[l + half]; \
                for (; k < inner; k++) lane[0] += a[k] * b[k]; \
                out[i * row_stride + j * column_stride] = lane[0]; \
            } \
    }
DOTS(float)
DOTS(double)

PROGRAM_TEXTS_OF_POLICY
#pragma GCC pop_options
