// f of a gated activation f(gate) * up: SwiGLU, or with the macro GEGLU that (tanh form).
#pragma once
#include "common.cuh"

#ifdef GEGLU
DEVICE float activate(float x) { return 0.5f * x * (1.f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x))); }
#else
DEVICE float activate(float x) { return x / (1.f + __expf(-x)); }
#endif
