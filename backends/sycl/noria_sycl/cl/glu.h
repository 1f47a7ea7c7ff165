// f of a gated activation f(gate) * up: SwiGLU, or with the macro GEGLU that (tanh form).
#ifdef GEGLU
#define DEFINE_ACTIVATE(name, T)                                                                      \
    inline T name(T x) { return 0.5f * x * (1.f + tanh(0.7978845608028654f * (x + 0.044715f * x * x * x))); }
#else
#define DEFINE_ACTIVATE(name, T)                                                                      \
    inline T name(T x) { return x / (1.f + exp(-x)); }
#endif
DEFINE_ACTIVATE(activate, float)
DEFINE_ACTIVATE(activate8, float8)
