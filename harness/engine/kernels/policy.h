/* A policy's computation for one slot. This is a template: compiler.py puts the policy's expressions in. */

/* CacheView.uniform. */
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
