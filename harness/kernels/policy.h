/* A policy's computation for one slot. This is a template: compiler.py inserts the policy's expressions. */

enum { NUMBERS = NUMBERS_OF_POLICY, MOST_IS_READ = MOST_READ_OF_POLICY };

static const int64_t WIDTHS[NUMBERS + !NUMBERS] = {WIDTHS_OF_POLICY};  /* for each number, the count of numbers in its statistic */

/* Numbers of the statistics; at least one, as C requires. */
typedef struct { float of[NUMBERS + !NUMBERS]; } State;

/* Values that all slots of a row share. group: query heads; prompt: prompt length; count: tokens held. */
typedef struct { int64_t step, layer, head, count, prompt, group, num_layers, seed; } Now;

/* CacheView.uniform. */
static inline float uniform(int64_t position, int64_t head, int64_t layer, int64_t seed) {
    uint64_t x = (uint64_t)position * (uint64_t)-7046029254386353131LL + (uint64_t)head * (uint64_t)-4658895280553007687LL;
    x += (uint64_t)layer * 6364136223846793005ULL + (uint64_t)seed;
    x = (x ^ (uint64_t)((int64_t)x >> 29)) * (uint64_t)-7046029254386353131LL;
    x = (x ^ (uint64_t)((int64_t)x >> 29)) * (uint64_t)-4658895280553007687LL;
    return (float)((x >> 40) & 0xFFFFFF) / 16777216.0f;
}

/* Quotient rounded down, as in PyTorch; 0 if b is 0. */
static inline int64_t floor_quotient(int64_t a, int64_t b) {
    return b ? a / b - ((a % b != 0) & ((a < 0) != (b < 0))) : 0;
}

static inline int64_t floor_remainder(int64_t a, int64_t b) {
    return a - floor_quotient(a, b) * b;
}

static inline float importance(State state, int64_t rank, int64_t position, Now now) {
    const int64_t step = now.step, layer = now.layer, head = now.head, count = now.count, prompt = now.prompt;
    const int64_t group = now.group, num_layers = now.num_layers, seed = now.seed;
    return (float)(IMPORTANCE_OF_POLICY);
}

/* mass: attention received, summed over query heads; most: its maximum over them. */
static inline State updated(State state, float mass, float most, int64_t rank, int64_t position, Now now) {
    const int64_t step = now.step, layer = now.layer, head = now.head, count = now.count, prompt = now.prompt;
    const int64_t group = now.group, num_layers = now.num_layers, seed = now.seed;
    const State after = {{UPDATES_OF_POLICY}};
    return after;
}
