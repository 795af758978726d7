/* The bookkeeping after a token: updates the statistics and chooses the slot for the next token. This is a template: compiler.py
   puts a policy's expressions in.

   Axis letters: L layers, N rows of a layer (stream, KV head), R = L * N, G query heads of a KV head, S slots. */

#include "numbers.h"
#include "policy.h"

/* mass: softmax weights [R, G, attended], null if the policy needs none. state, rank, position: [R, slots], of which the first
   `attended` are used; rank and state are changed. layer: [L]. step: of the token, [R]. free_slots: the token's slot, counted
   over all rows; changed to that of the next token. full: whether to evict a token. window: the layers' sliding window, 0 if
   none. */
void release(const float *restrict mass, float *restrict state, int64_t *restrict rank, const int64_t *restrict position,
             const int64_t *restrict layer, const int64_t *restrict step, int64_t *restrict free_slots, int64_t rows,
             int64_t rows_of_layer, int64_t heads, int64_t group, int64_t slots, int64_t attended, int64_t full, int64_t window,
             int64_t seed) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t now = step[r], of_layer = layer[r / rows_of_layer], head = r % heads;
        const int64_t *restrict at = position + r * slots;
        int64_t *restrict ranks = rank + r * slots;
        float *restrict states = state ? state + r * slots : 0;
        if (states)
            for (int64_t s = 0; s < attended; s++) {
                float total = 0;
                for (int64_t g = 0; g < group; g++) total += mass[(r * group + g) * attended + s];
                states[s] = update(states[s], total, ranks[s], at[s], now, of_layer, head, seed);
            }
        if (!full) {
            free_slots[r]++;
            continue;
        }
        int64_t victim = 0, worst = INT64_MAX;
        float least = INFINITY;
        for (int64_t s = 0; s < attended; s++) {
            float worth = importance(states ? states[s] : 0, ranks[s], at[s], now, of_layer, head, seed);
            if (window && now - at[s] >= window - 1) worth = -INFINITY;
            if (worth < least || (worth == least && ranks[s] < worst)) { least = worth; worst = ranks[s]; victim = s; }
        }
        for (int64_t s = 0; s < attended; s++) ranks[s] -= ranks[s] > worst;
        ranks[victim] = slots;
        free_slots[r] = r * slots + victim;
    }
}
