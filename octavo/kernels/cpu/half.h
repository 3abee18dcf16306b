// Matrices of 16-bit floats as the CPU kernels hold them: the numbers of a checkpoint, in another order.
//
// A panel is PANEL rows, two vectors of float32; it goes column by column, so that a product reads one stream
// from front to back and every row has a lane of its own. Of bfloat16, lane i of a column's 32-bit words holds
// row i in its lower and row W + i in its upper half: a shift and a mask widen both. Of float16, rows lie in
// their order.
#pragma once

#include "common.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)  // and wherever there is AVX-512
#define OCTAVO_HALF 1
#include <immintrin.h>
#endif

// A matrix [rows, columns], as half.py fills it: ceil(rows / PANEL) panels, rows beyond the last are zero.
struct HalfMatrix {
    uint16_t* data;
    int64_t rows, columns;
    int32_t is_float16;  // else bfloat16
};

#if OCTAVO_HALF

namespace octavo {

constexpr int PANEL = 2 * W;

struct Brain {
    static constexpr int place(int row) { return row < W ? 2 * row : 2 * (row - W) + 1; }
    static void widen(const uint16_t* p, vf& low, vf& high) {
        vu v;
        std::memcpy(&v, p, sizeof v);
        low = (vf)(v << 16);
        high = (vf)(v & 0xffff0000u);
    }
};

struct Half {
    static constexpr int place(int row) { return row; }
    static void widen(const uint16_t* p, vf& low, vf& high) {
#if defined(__AVX512F__) && defined(__AVX512BW__)  // as W is chosen
        low = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
        high = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(p + W)));
#else
        low = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
        high = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + W)));
#endif
    }
};

// Calls f(Brain) or f(Half).
template <class F>
inline void with_half(const HalfMatrix& m, const F& f) {
    if (m.is_float16)
        f(Half{});
    else
        f(Brain{});
}

inline int64_t half_panels(int64_t rows) { return (rows + PANEL - 1) / PANEL; }

}  // namespace octavo
#endif
