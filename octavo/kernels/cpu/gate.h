// Gates of the gated feed-forward activations, in the form g * sigmoid(slope(g)).
#pragma once

#include "common.h"

namespace octavo {

// As ops.py numbers them.
enum Gate : int32_t { SILU = 0, GELU_TANH = 1 };

struct Silu {
    template <class F>
    static F slope(F g) {
        return g;
    }
};
// g / 2 (1 + tanh(u)) = g sigmoid(2 u), u = sqrt(2 / pi) (g + 0.044715 g^3)
struct GeluTanh {
    template <class F>
    static F slope(F g) {
        return g * (1.59576912f + 0.0713548163f * g * g);
    }
};

template <class G>
inline float gate_of(float g) {
    const float s = G::slope(g);
    // Below -87 exp(-s) would leave float32's range; the gate is 0 there to within 1e-35.
    const float e = exp2_of<float, int32_t>((s < -87.0f ? 87.0f : -s) * LOG2_E);
    return g / (1.0f + e);
}
template <class G>
inline vf gate_of(vf g) {
    const vf s = G::slope(g);
    return g / (1.0f + exp2_of<vf, vi>((s < -87.0f ? vf{} + 87.0f : -s) * LOG2_E));
}

}  // namespace octavo
