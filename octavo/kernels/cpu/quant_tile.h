// Tiles of products with quantized matrices: some rows of x against some panels, in the machine's own dot
// products of bytes.
#pragma once

#include <type_traits>

#include "quant_rows.h"

#if OCTAVO_QUANT

namespace octavo {

// ------------------------------------------------------------------------------------- instructions

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
typedef __m512i iv;
typedef __m512 fv;
inline iv load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline iv all(int32_t x) { return _mm512_set1_epi32(x); }
inline iv all_bytes(char x) { return _mm512_set1_epi8(x); }
inline iv both(iv a, iv b) { return _mm512_and_si512(a, b); }
inline iv either(iv a, iv b) { return _mm512_or_si512(a, b); }
inline iv add(iv a, iv b) { return _mm512_add_epi32(a, b); }
template <int N>
inline iv shift(iv a) {  // right by N, left by -N
    return N > 0 ? _mm512_srli_epi16(a, N > 0 ? N : 0) : N < 0 ? _mm512_slli_epi16(a, N < 0 ? -N : 0) : a;
}
inline iv dot(iv sum, iv w, iv x) { return _mm512_dpbusd_epi32(sum, w, x); }
inline fv floats(iv a) { return _mm512_cvtepi32_ps(a); }
inline fv halves(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline fv spread(float x) { return _mm512_set1_ps(x); }
inline fv fma(fv a, fv b, fv c) { return _mm512_fmadd_ps(a, b, c); }
inline fv times(fv a, fv b) { return _mm512_mul_ps(a, b); }
inline fv no_floats() { return _mm512_setzero_ps(); }
inline void put_floats(float* p, fv a) { _mm512_storeu_ps(p, a); }
#else
typedef __m256i iv;
typedef __m256 fv;
inline iv load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline iv all(int32_t x) { return _mm256_set1_epi32(x); }
inline iv all_bytes(char x) { return _mm256_set1_epi8(x); }
inline iv both(iv a, iv b) { return _mm256_and_si256(a, b); }
inline iv either(iv a, iv b) { return _mm256_or_si256(a, b); }
inline iv add(iv a, iv b) { return _mm256_add_epi32(a, b); }
template <int N>
inline iv shift(iv a) {
    return N > 0 ? _mm256_srli_epi16(a, N > 0 ? N : 0) : N < 0 ? _mm256_slli_epi16(a, N < 0 ? -N : 0) : a;
}
inline fv floats(iv a) { return _mm256_cvtepi32_ps(a); }
inline fv halves(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline fv spread(float x) { return _mm256_set1_ps(x); }
inline fv fma(fv a, fv b, fv c) { return _mm256_fmadd_ps(a, b, c); }
inline fv times(fv a, fv b) { return _mm256_mul_ps(a, b); }
inline fv no_floats() { return _mm256_setzero_ps(); }
inline void put_floats(float* p, fv a) { _mm256_storeu_ps(p, a); }
#if defined(__AVXVNNI__)
inline iv dot(iv sum, iv w, iv x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#elif OCTAVO_VNNI  // imitated: the same sums, slowly
inline iv dot(iv sum, iv w, iv x) {
    const iv low = _mm256_madd_epi16(both(w, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    return add(sum, add(low, _mm256_madd_epi16(shift<8>(w), _mm256_srai_epi16(x, 8))));
}
#endif
#endif

inline iv quad_of(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return all(x);
}

// ------------------------------------------------------------------------------------------- tiles

// Quad J of a block: unsigned bytes; those of 8 bits as they are stored.
template <class F, int J>
inline iv weights(const uint8_t* block, iv low) {
    if constexpr (F::bits == 8) return load_bytes(block + J * VECTOR);
    const iv v = load_bytes(block + J % 4 * VECTOR);
    const iv nibbles = both(J < 4 ? v : shift<4>(v), low);
    if constexpr (F::bits == 5)
        return either(nibbles, both(shift<J - 4>(load_bytes(block + 4 * VECTOR)), all_bytes(16)));
    if constexpr (F::bits == 6)
        return either(nibbles, both(shift<2 * (J % 4) - 4>(load_bytes(block + (4 + J / 4) * VECTOR)), all_bytes(48)));
    return nibbles;
}

// Sums of products of one group of a block, for P panels and M rows: the integers that scale times x's scale
// multiplies. `block`: of the first panel, the others `size` bytes apart.
template <class F, int M, int P>
struct GroupSums {
    iv sums[P][M];

    // Products of two bytes that fit 16 bits: pairs of 127 * 15 (or 31, or 63) added up so often.
    static constexpr int SAFE = F::bits == 4 ? 8 : F::bits == 5 ? 4 : F::bits == 6 ? 2 : 1;

    inline void start(const XBlock* const* x, int64_t b, int g, int32_t zero) {
        if (F::bits == 8) zero = SIGN;
        for (int m = 0; m < M; m++) {
            const int32_t start = x[m][b].starts[F::groups == 1 ? 2 : g];
            const iv first = all(F::minimum || zero == 0 ? 0 : zero == 128 ? start : start / 128 * zero);
            for (int p = 0; p < P; p++) sums[p][m] = first;
        }
    }

#if OCTAVO_VNNI
    template <int J, int END>
    inline void quads(const uint8_t* block, int64_t size, const XBlock* const* x, int64_t b, iv low) {
        if constexpr (J < END) {
            iv w[P];
            for (int p = 0; p < P; p++) w[p] = weights<F, J>(block + p * size, low);
            for (int m = 0; m < M; m++) {
                const iv quad = quad_of(x[m][b].q + 4 * J);
                for (int p = 0; p < P; p++) sums[p][m] = dot(sums[p][m], w[p], quad);
            }
            quads<J + 1, END>(block, size, x, b, low);
        }
    }
#else
    template <int J, int END>
    inline void quads(const uint8_t* block, int64_t size, const XBlock* const* x, int64_t b, iv low) {
        if constexpr (J < END) {
            constexpr int STOP = J + SAFE < END ? J + SAFE : END;
            const iv ones = _mm256_set1_epi16(1);
            if constexpr (F::bits == 8) {
                iv w[P], magnitude[P];
                for (int p = 0; p < P; p++) {
                    w[p] = weights<F, J>(block + p * size, low);
                    magnitude[p] = _mm256_abs_epi8(w[p]);
                }
                for (int m = 0; m < M; m++) {
                    const iv quad = quad_of(x[m][b].q + 4 * J);
                    for (int p = 0; p < P; p++) {
                        const iv two = _mm256_maddubs_epi16(magnitude[p], _mm256_sign_epi8(quad, w[p]));
                        sums[p][m] = add(sums[p][m], _mm256_madd_epi16(two, ones));
                    }
                }
            } else {
                iv narrow[P][M];
                pairs<J, J, STOP>(block, size, x, b, low, narrow);
                for (int p = 0; p < P; p++)
                    for (int m = 0; m < M; m++)
                        sums[p][m] = add(sums[p][m], _mm256_madd_epi16(narrow[p][m], ones));
            }
            quads<STOP, END>(block, size, x, b, low);
        }
    }

    template <int FIRST, int J, int STOP>
    inline void pairs(const uint8_t* block, int64_t size, const XBlock* const* x, int64_t b, iv low,
                      iv (*narrow)[M]) {
        if constexpr (J < STOP) {
            iv w[P];
            for (int p = 0; p < P; p++) w[p] = weights<F, J>(block + p * size, low);
            for (int m = 0; m < M; m++) {
                const iv quad = quad_of(x[m][b].q + 4 * J);
                for (int p = 0; p < P; p++) {
                    const iv two = _mm256_maddubs_epi16(w[p], quad);
                    narrow[p][m] = J == FIRST ? two : _mm256_add_epi16(narrow[p][m], two);
                }
            }
            pairs<FIRST, J + 1, STOP>(block, size, x, b, low, narrow);
        }
    }
#endif
};

// out[p][m][lane] = row `lane` of panel p times row m of x: P panels `size` bytes apart, M rows.
template <class F, int M, int P>
__attribute__((noinline)) void tile(const uint8_t* w, int64_t size, int32_t zero, const XBlock* const* x, int64_t blocks,
                 float (*out)[M][LANES]) {
    fv acc[P][M];
    for (int p = 0; p < P; p++)
        for (int m = 0; m < M; m++) acc[p][m] = no_floats();
    const iv low = all_bytes(15);
    for (int64_t b = 0; b < blocks; b++, w += F::bytes) {
        auto group = [&](auto which) {
            constexpr int G = decltype(which)::value, AT = F::groups == 1 ? 2 : G;
            GroupSums<F, M, P> s;
            s.start(x, b, G, zero);
            s.template quads<G * F::quads, (G + 1) * F::quads>(w, size, x, b, low);
            for (int p = 0; p < P; p++) {
                const uint8_t* block = w + p * size;
                const fv scale = halves(block + F::scales_at + G * 2 * LANES);
                for (int m = 0; m < M; m++) {
                    acc[p][m] = fma(floats(s.sums[p][m]), times(scale, spread(x[m][b].scale)), acc[p][m]);
                    if (F::minimum) {
                        const fv minimum = halves(block + F::minima_at + G * 2 * LANES);
                        acc[p][m] = fma(minimum, spread(x[m][b].sums[AT]), acc[p][m]);
                    }
                }
            }
        };
        group(std::integral_constant<int, 0>{});
        if constexpr (F::groups == 2) group(std::integral_constant<int, 1>{});
    }
    for (int p = 0; p < P; p++)
        for (int m = 0; m < M; m++) put_floats(out[p][m], acc[p][m]);
}

}  // namespace octavo
#endif
