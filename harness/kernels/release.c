/* Bookkeeping after a token: updates the statistics and chooses the next token's slot. This is a template: compiler.py inserts a
   policy's expressions, which are not called if a policy has none.

   Axis letters: L layers, B streams, N rows of a layer (stream, KV head), R = L * N, G query heads of a KV head, S slots. */

#include "numbers.h"
#include "policy.h"
#include <stdlib.h>

/* Returns the numbers of a slot. slot: counted over all rows; states: for each number, a pointer to the number of the first slot. */
static inline State loaded(float *const *states, int64_t slot) {
    State state = {{0}};
    for (int i = 0; i < NUMBERS; i++) state.of[i] = states[i][slot * WIDTHS[i]];
    return state;
}

/* Updates the statistics of the first `attended` slots of a row, which starts at slot `first`. mass: softmax weights, [G, attended]. */
static inline void update_row(const float *restrict mass, float *const *states, const int64_t *restrict ranks,
                              const int64_t *restrict at, int64_t first, int64_t attended, Now now) {
    for (int64_t s = 0; s < attended; s++) {
        float total = 0, most = 0;
        for (int64_t g = 0; g < now.group; g++) {
            const float weight = mass[g * attended + s];
            total += weight;
            if (MOST_IS_READ) most = weight > most ? weight : most;
        }
        const State state = updated(loaded(states, first + s), total, most, ranks[s], at[s], now);
        for (int i = 0; i < NUMBERS; i++) states[i][(first + s) * WIDTHS[i]] = state.of[i];
    }
}

/* Empties the slot of the lowest (worth, rank), and returns it. A slot whose rank is `slots` is empty. */
static inline int64_t evict(float *restrict worth, int64_t *restrict ranks, int64_t attended, int64_t slots) {
    int64_t victim = 0, worst = INT64_MAX;
    float least = INFINITY;
    for (int64_t s = 0; s < attended; s++)
        if (worth[s] < least || (worth[s] == least && ranks[s] < worst)) { least = worth[s]; worst = ranks[s]; victim = s; }
    for (int64_t s = 0; s < attended; s++) ranks[s] -= (ranks[s] > worst) & (ranks[s] < slots);
    ranks[victim] = slots;
    worth[victim] = NAN;  /* skipped by comparisons */
    return victim;
}

/* Returns 0, or -1 if there is no memory.

   given: importance of every slot, [R, attended]; null if the policy's expressions compute it. mass: softmax weights,
   [R, G, attended]; null if the kernel updates no statistic. states: for each number, a pointer to the number of the first slot; the
   stride between slots is the count of numbers in the statistic. rank, position: ranks and positions in these rows, [R, slots], of
   which the first `attended` slots are used; rank and states are changed. layer: layers of these rows, [L]. head: index of the head in
   the model's layer, [R]; null if it is not read. prompt: prompt length, [L * B]; null if it is not read. step: step of the token, [R].
   free_slots: the token's slot, counted over all rows; changed to the next token's slot. base: first slot of these rows, counted over
   all rows. due: number of tokens to evict; 0 if there is an empty slot. every: number of tokens that are evicted at once. window:
   sliding window of the layers; 0 if none. */
int64_t release(const float *given, const float *mass, float *const *states, int64_t *rank, const int64_t *position,
                const int64_t *layer, const int64_t *head, const int64_t *prompt, const int64_t *step, int64_t *free_slots,
                int64_t base, int64_t rows, int64_t rows_of_layer, int64_t heads, int64_t group, int64_t slots, int64_t attended,
                int64_t due, int64_t every, int64_t window, int64_t num_layers, int64_t seed) {
    float *worth = due ? malloc(attended * sizeof(float)) : 0;
    if (due && !worth) return -1;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t first = base + r * slots, *at = position + r * slots;
        int64_t *ranks = rank + r * slots;
        const Now now = {
            step[r], layer[r / rows_of_layer], head ? head[r] : 0, ranks[free_slots[r] - first] + 1,
            prompt ? prompt[r / heads] : 0, group, num_layers, seed,
        };
        if (mass) update_row(mass + r * group * attended, states, ranks, at, first, attended, now);
        if (due) {
            for (int64_t s = 0; s < attended; s++)
                worth[s] = given ? given[r * attended + s] : importance(loaded(states, first + s), ranks[s], at[s], now);
            if (window)
                for (int64_t s = 0; s < attended; s++) worth[s] = now.step - at[s] >= window - 1 ? -INFINITY : worth[s];
            for (int64_t i = 0; i < due; i++) free_slots[r] = first + evict(worth, ranks, attended, slots);
        } else if (every == 1) {
            free_slots[r]++;
        } else {
            int64_t s = 0;
            while (s < attended && ranks[s] < slots) s++;
            free_slots[r] = first + s;
        }
    }
    free(worth);
    return 0;
}
