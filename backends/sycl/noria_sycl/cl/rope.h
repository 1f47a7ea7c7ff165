// Angles of rotary position embedding.
//
// Rounded to f32 at every step, each frequency made from the one before. At far positions that rounding is larger than
// that of all other ops together, so another order of steps would be another model than the one everybody runs.
// Source: llama.cpp, ggml-cpu/ops.cpp, ggml_rope_cache_init.

// (cos, sin) of pair i. step: base^(-2 / n_dims).
inline float2 turn_of(int position, int i, float step, float scale, __global const float *freq_factors) {
    float angle = position;
    for (int k = 0; k < i; k++) angle *= step;
    if (freq_factors) angle /= freq_factors[i];
    angle *= scale;
    return (float2)(cos(angle), sin(angle));
}

// The turns of all pairs of a position, by all items of a group.
inline void make_turns(__local float2 *turns, int n_pair, int position, float step, float scale,
                       __global const float *freq_factors) {
#if GROUP == 1
    float angle = position;
    for (int i = 0; i < n_pair; i++, angle *= step) {
        const float a = (freq_factors ? angle / freq_factors[i] : angle) * scale;
        turns[i] = (float2)(cos(a), sin(a));
    }
#else
    for (int i = LANE; i < n_pair; i += GROUP) turns[i] = turn_of(position, i, step, scale, freq_factors);
    MEET();
#endif
}
