/* Bookkeeping after a token, for heads that hold different numbers of tokens. The least important tokens of all heads of a layer are
   evicted, or the tokens of each head above its budget. The last tokens of a row then move to the slots of evicted tokens, and empty
   pages are returned. This is a template: compiler.py inserts a policy's expressions, which are not called if a policy has none.

   Axis letters: L layers, B streams, R rows of one layer or of all (layer, stream, KV head), G query heads of a KV head, S slots,
   W pages of a row. */

#include "numbers.h"
#include "policy.h"
#include "statistics.h"
#include <stdlib.h>
#include <string.h>

/* An array over slots, and its number of bytes per slot. */
typedef struct { char *first; int64_t bytes; } Held;

/* Returns the slot of the lowest (worth, rank) among the first `count`; -1 if there is none. Slots with worth NaN are skipped. */
static inline int64_t lowest(const float *restrict worth, const int64_t *restrict ranks, int64_t count) {
    int64_t slot = -1, worst = INT64_MAX;
    float least = INFINITY;
    for (int64_t s = 0; s < count; s++)
        if (worth[s] < least || (worth[s] == least && ranks[s] < worst)) { least = worth[s]; worst = ranks[s]; slot = s; }
    return slot;
}

/* Removes victims, whose worth is NaN, from a row of `count` tokens. Returns the number of remaining tokens. */
static int64_t close_up(const float *worth, int64_t *ranks, int64_t count, int64_t gone, int64_t slots, const Held *of_slots,
                        int64_t num_of_slots, const Held *of_pool, const int64_t *table, int64_t page, int64_t *scratch) {
    const int64_t left = count - gone;
    int64_t mover = left;
    for (int64_t s = 0, i = 0; s < count; s++) if (isnan(worth[s])) scratch[i++] = ranks[s];
    for (int64_t s = 0; s < count; s++) {
        int64_t older = 0;
        for (int64_t i = 0; i < gone; i++) older += scratch[i] < ranks[s];
        ranks[s] -= older;
    }
    for (int64_t s = 0; s < left; s++) {
        if (!isnan(worth[s])) continue;
        while (isnan(worth[mover])) mover++;
        ranks[s] = ranks[mover];
        for (int64_t i = 0; i < num_of_slots; i++)
            memcpy(of_slots[i].first + s * of_slots[i].bytes, of_slots[i].first + mover * of_slots[i].bytes, of_slots[i].bytes);
        const int64_t into = table[s / page] * page + s % page, out_of = table[mover / page] * page + mover % page;
        for (int i = 0; i < 2; i++)
            memcpy(of_pool[i].first + into * of_pool[i].bytes, of_pool[i].first + out_of * of_pool[i].bytes, of_pool[i].bytes);
        mover++;
    }
    for (int64_t s = left; s < count; s++) ranks[s] = slots;
    return left;
}

/* Returns whether pages became free, or -1 if there is no memory.

   given: importance of every slot, [R, attended]; null if the policy's expressions compute it. mass, states, rank, position, layer,
   head, prompt, step, free_slots, window: as in release.c. The token is in the last used slot of each row. of_slots: other arrays over
   slots, positions included. of_pool: keys and values, [pages, page, D]. table: [R, W]. budgets: budget of each row, [R]; null if it is
   the capacity. base: flat index of the rows' first slot, which `free_slots` include. floor: minimum number of tokens of each head if
   the heads of a layer compete; otherwise -1. due: whether tokens are evicted once `every` tokens more than the capacity are held. */
int64_t compete(const float *given, const float *mass, float *const *states, int64_t *rank, const int64_t *position,
                const int64_t *layer, const int64_t *head, const int64_t *prompt, const int64_t *step, int64_t *free_slots,
                const Held *of_slots, const Held *of_pool, int64_t *table, const int64_t *budgets, int64_t base,
                int64_t num_of_slots, int64_t width, int64_t page, int64_t rows, int64_t rows_of_layer, int64_t heads, int64_t group,
                int64_t slots, int64_t attended, int64_t due, int64_t every, int64_t capacity, int64_t floor, int64_t window,
                int64_t num_layers, int64_t seed) {
    float *worths = malloc(heads * attended * sizeof(float));
    int64_t *numbers = malloc((3 * heads + attended) * sizeof(int64_t)), *count = numbers, *gone = count + heads;
    int64_t *next = gone + heads, *scratch = next + heads, freed = 0;
    Held *of_row = malloc((num_of_slots + 1) * sizeof(Held));
    if (!worths || !numbers || !of_row) { free(worths); free(numbers); free(of_row); return -1; }
    for (int64_t r0 = 0; r0 < rows; r0 += heads) {
        int64_t excess = -heads * capacity;
        for (int64_t h = 0; h < heads; h++) {
            const int64_t r = r0 + h, first = r * slots, *ranks = rank + first, *at = position + first;
            float *worth = worths + h * attended;
            count[h] = free_slots[r] - base - first + 1, gone[h] = 0, excess += count[h];
            const Now now = {
                step[r], layer[r / rows_of_layer], head ? head[r] : 0, count[h], prompt ? prompt[r / heads] : 0, group, num_layers, seed,
            };
            if (mass) update_row(mass + r * group * attended, states, ranks, at, first, attended, count[h], now);
            if (!due) continue;
            if (given) memcpy(worth, given + r * attended, count[h] * sizeof(float));
            for (int64_t s = 0; s < count[h] && !given; s++) {
                worth[s] = importance(loaded(states, first + s), ranks[s], at[s], now);
                if (window && now.step - at[s] >= window - 1) worth[s] = -INFINITY;
            }
        }
        const int competes = floor >= 0;
        if (due && competes && excess >= heads * every) {
            for (int64_t h = 0; h < heads; h++)
                next[h] = count[h] > floor ? lowest(worths + h * attended, rank + (r0 + h) * slots, count[h]) : -1;
            for (; excess > 0; excess--) {
                int64_t of = -1;
                for (int64_t h = 0; h < heads; h++) {
                    if (next[h] < 0) continue;
                    const float ours = worths[h * attended + next[h]], best = of < 0 ? 0 : worths[of * attended + next[of]];
                    const int64_t older = of < 0 ? 1 : rank[(r0 + h) * slots + next[h]] < rank[(r0 + of) * slots + next[of]];
                    if (of < 0 || ours < best || (ours == best && older)) of = h;
                }
                if (of < 0) break;
                worths[of * attended + next[of]] = NAN, gone[of]++;
                next[of] = count[of] - gone[of] > floor ? lowest(worths + of * attended, rank + (r0 + of) * slots, count[of]) : -1;
            }
        }
        for (int64_t h = 0; h < heads; h++) {
            const int64_t r = r0 + h, first = r * slots;
            float *worth = worths + h * attended;
            if (due && !competes) {
                const int64_t over = count[h] - (budgets ? budgets[r] : capacity);
                for (; over >= every && gone[h] < over; gone[h]++) worth[lowest(worth, rank + first, count[h])] = NAN;
            }
            if (gone[h]) {
                for (int64_t i = 0; i < num_of_slots; i++)
                    of_row[i] = (Held){of_slots[i].first + first * of_slots[i].bytes, of_slots[i].bytes};
                count[h] = close_up(worth, rank + first, count[h], gone[h], slots, of_row, num_of_slots, of_pool, table + r * width,
                                    page, scratch);
            }
            free_slots[r] = base + first + count[h];
            for (int64_t j = count[h] / page + 1; j < width && table[r * width + j] >= 0; j++) table[r * width + j] = -1, freed = 1;
        }
    }
    free(worths);
    free(numbers);
    free(of_row);
    return freed;
}
