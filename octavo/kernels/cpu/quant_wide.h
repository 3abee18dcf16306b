// Products of many rows with quantized matrices, for AVX-512 VNNI.
//
// Runs of two panels are taken apart once, into bytes of one kind with scales in float32, for all rows of a piece
// of work; then tiles of up to six rows pass over them in the nearest cache. The arithmetic is that of
// quant_tile.h, in its order: a row's result is the same with few rows and with many.
//
// What bounds a tile is the two ports that take vectors: 8 dot products of a vector and block, and 3 operations
// that scale its sum (4 with a minimum; twice that where two groups share a block).
#pragma once

#include "quant_tile.h"

#if OCTAVO_QUANT && defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define OCTAVO_WIDE 1

namespace octavo {

constexpr int64_t WIDE_ROWS = 10;  // from which on taking apart pays; tiles then have 4 to 6 rows
constexpr int WIDE_MOST = 6;       // rows of a tile: 12 sums, 12 accumulators and what they need fill the registers
constexpr int64_t RUN = 20;        // blocks of a run at most: two panels of it and a tile's x take 32 KiB

// A block of a panel; weight = scale * (byte - 128), or scale * byte + minimum. It does not depend on the bits that
// it was stored in.
template <int GROUPS, bool MINIMUM>
struct alignas(64) WideBlock {
    uint8_t bytes[BLOCK * LANES];
    float scales[GROUPS][LANES];
    float minima[MINIMUM ? GROUPS : 0][LANES];
};

template <class F>
using WideOf = WideBlock<F::groups, F::minimum>;

template <class F, int J = 0>
inline void widen_quads(const uint8_t* block, iv low, iv shift, uint8_t* out) {
    if constexpr (J < QUADS) {
        _mm512_store_si512(out + J * VECTOR, _mm512_add_epi8(weights<F, J>(block, low), shift));
        widen_quads<F, J + 1>(block, low, shift, out);
    }
}

template <class F>
inline void widen(const uint8_t* block, int64_t blocks, int32_t zero, WideOf<F>* out) {
    const iv low = all_bytes(15), shift = all_bytes(F::bits == 8 || F::minimum ? 0 : char(128 - zero));
    for (int64_t b = 0; b < blocks; b++, block += F::bytes, out++) {
        widen_quads<F>(block, low, shift, out->bytes);
        for (int g = 0; g < F::groups; g++) {
            put_floats(out->scales[g], halves(block + F::scales_at + g * 2 * LANES));
            if constexpr (F::minimum) put_floats(out->minima[g], halves(block + F::minima_at + g * 2 * LANES));
        }
    }
}

// Adds M rows of x (`x_stride` blocks apart) times a run of two panels to out[p][m * LANES ..]; the first run
// sets them.
template <int GROUPS, bool MINIMUM, int M>
__attribute__((noinline)) void wide_tile(const WideBlock<GROUPS, MINIMUM>* w0, const WideBlock<GROUPS, MINIMUM>* w1,
                                         const XBlock* x, int64_t x_stride, int64_t blocks, float* const* out,
                                         bool first) {
    fv acc[2][M];
    for (int p = 0; p < 2; p++)
        for (int m = 0; m < M; m++) acc[p][m] = first ? no_floats() : _mm512_load_ps(out[p] + m * LANES);
    for (int64_t b = 0; b < blocks; b++, w0++, w1++, x++) {
#pragma GCC unroll 2
        for (int g = 0; g < GROUPS; g++) {
            const int at = GROUPS == 1 ? 2 : g;
            iv sums[2][M];
            for (int m = 0; m < M; m++) sums[0][m] = sums[1][m] = all(MINIMUM ? 0 : x[m * x_stride].starts[at]);
#pragma GCC unroll 8
            for (int j = g * QUADS / GROUPS; j < (g + 1) * QUADS / GROUPS; j++) {
                const iv a = load_bytes(w0->bytes + j * VECTOR), b = load_bytes(w1->bytes + j * VECTOR);
                for (int m = 0; m < M; m++) {
                    const iv quad = quad_of(x[m * x_stride].q + 4 * j);
                    sums[0][m] = dot(sums[0][m], a, quad);
                    sums[1][m] = dot(sums[1][m], b, quad);
                }
            }
            const fv scales[2] = {_mm512_load_ps(w0->scales[g]), _mm512_load_ps(w1->scales[g])};
            for (int p = 0; p < 2; p++)
                for (int m = 0; m < M; m++) {
                    const XBlock& row = x[m * x_stride];
                    acc[p][m] = fma(floats(sums[p][m]), times(scales[p], spread(row.scale)), acc[p][m]);
                    if constexpr (MINIMUM)
                        acc[p][m] = fma(_mm512_load_ps((p ? w1 : w0)->minima[g]), spread(row.sums[at]), acc[p][m]);
                }
        }
    }
    for (int p = 0; p < 2; p++)
        for (int m = 0; m < M; m++) put_floats(out[p] + m * LANES, acc[p][m]);
}

// The sums of two panels, or of one (`second` null), for `rows` rows of x, at least WIDE_ROWS, each of `blocks`:
// first_sums and second_sums [rows, LANES].
template <class F>
inline void sum_wide(const uint8_t* first, const uint8_t* second, int32_t zero, int64_t blocks, const XBlock* x,
                     int64_t rows, float* first_sums, float* second_sums) {
    WideOf<F> panels[2][RUN];
    const int64_t runs = (blocks + RUN - 1) / RUN, tiles = (rows + WIDE_MOST - 1) / WIDE_MOST;  // of equal size
    for (int64_t run = 0; run < runs; run++) {
        const int64_t from = blocks * run / runs, n = blocks * (run + 1) / runs - from;
        widen<F>(first + from * F::bytes, n, zero, panels[0]);
        if (second) widen<F>(second + from * F::bytes, n, zero, panels[1]);
        const WideOf<F>*w0 = panels[0], *w1 = second ? panels[1] : w0;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t r = rows * t / tiles, m = rows * (t + 1) / tiles - r;
            float* const out[2] = {first_sums + r * LANES, second_sums + r * LANES};
            const XBlock* at = x + r * blocks + from;
            switch (m) {
                case 4: wide_tile<F::groups, F::minimum, 4>(w0, w1, at, blocks, n, out, run == 0); break;
                case 5: wide_tile<F::groups, F::minimum, 5>(w0, w1, at, blocks, n, out, run == 0); break;
                default: wide_tile<F::groups, F::minimum, 6>(w0, w1, at, blocks, n, out, run == 0);
            }
        }
    }
}

}  // namespace octavo
#else
#define OCTAVO_WIDE 0
#endif
