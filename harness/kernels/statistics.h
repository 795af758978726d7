/* Statistics in the arrays of `Slots`. Axis letters: G query heads of a KV head. */

/* Returns the numbers of a slot. slot: counted over all rows; states: for each number, a pointer to the number of the first slot. */
static inline State loaded(float *const *states, int64_t slot) {
    State state = {{0}};
    for (int i = 0; i < NUMBERS; i++) state.of[i] = states[i][slot * WIDTHS[i]];
    return state;
}

/* Updates the statistics of the first `used` slots of a row, which starts at slot `first`. mass: softmax weights [G, attended]. */
static inline void update_row(const float *restrict mass, float *const *states, const int64_t *restrict ranks,
                              const int64_t *restrict at, int64_t first, int64_t attended, int64_t used, Now now) {
    for (int64_t s = 0; s < used; s++) {
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
