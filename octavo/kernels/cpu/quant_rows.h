// Rows of x in 8 bits, with a scale for every 32 columns.
#pragma once

#include "quant.h"

#if OCTAVO_QUANT

namespace octavo {

// 32 columns of a row of x.
struct alignas(64) XBlock {
    int8_t q[BLOCK];
    float scale;
    float sums[3];      // of columns 0-15, 16-31, and all
    int32_t starts[4];  // -128 times the sums of q of these; the fourth is padding
};
static_assert(sizeof(XBlock) == 64, "a line of the cache");

// What a block's largest magnitude, as its bits, makes of it.
struct Scaling {
    float scale, inverse;
    bool finite;

    explicit Scaling(int32_t top) {
        const float most = bits_as<float>(top);
        const bool tiny = most < 1e-30f;
        finite = top < 0x7f800000;
        inverse = !finite || tiny ? 0.0f : 127.0f / most;
        scale = !finite ? bits_as<float>(0x7fc00000) : tiny ? 0.0f : most / 127.0f;
    }
};

// A row's block: q = round(x * 127 / largest), ties to even. NaN and infinity make the scale a NaN.
// Magnitudes' bits are ordered as the magnitudes are, with NaN above infinity.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
template <class T>
inline void quantize_block(const T* x, XBlock& out) {
    const __m512 low = (__m512)load(x), high = (__m512)load(x + 16);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const Scaling s(_mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_and_si512((__m512i)low, magnitude),
                                                             _mm512_and_si512((__m512i)high, magnitude))));
    const __m512 inverse = _mm512_set1_ps(s.inverse);
    const __mmask16 kept = s.finite ? 0xffff : 0;
    const __m128i a = _mm512_cvtepi32_epi8(_mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(low, inverse)));
    const __m128i b = _mm512_cvtepi32_epi8(_mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(high, inverse)));
    _mm_store_si128((__m128i*)out.q, a);
    _mm_store_si128((__m128i*)(out.q + 16), b);
    // Sums of eights of bytes, with 128 added to each: of a in the lower two, of b in the others.
    auto eights = [](__m128i q) { return (__m128)_mm_sad_epu8(_mm_xor_si128(q, _mm_set1_epi8(-128)), __m128i{}); };
    __m128i sums = (__m128i)_mm_shuffle_ps(eights(a), eights(b), _MM_SHUFFLE(2, 0, 2, 0));
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, _MM_SHUFFLE(2, 3, 0, 1)));
    sums = _mm_sub_epi32(sums, _mm_set1_epi32(16 * 128));
    const __m128i total = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, _MM_SHUFFLE(1, 0, 3, 2)));
    sums = _mm_blend_epi32(sums, total, 8);  // first, first, second, total
    const __m128 scale = _mm_set1_ps(s.scale);
    _mm_store_ps(&out.scale, _mm_blend_ps(_mm_mul_ps(_mm_cvtepi32_ps(sums), scale), scale, 1));  // and `sums`
    const __m128i starts = _mm_sub_epi32(__m128i{}, _mm_slli_epi32(sums, 7));
    _mm_store_si128((__m128i*)out.starts, _mm_shuffle_epi32(starts, _MM_SHUFFLE(3, 3, 2, 1)));
}
#else
template <class T>
inline void quantize_block(const T* x, XBlock& out) {
    alignas(64) float wide[BLOCK];
    alignas(64) int32_t ints[BLOCK];
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) wide[i] = to_float(x[i]);
    int32_t top = 0, first = 0, second = 0;
#pragma omp simd reduction(max : top)
    for (int i = 0; i < BLOCK; i++) top = std::max(top, bits_as<int32_t>(wide[i]) & 0x7fffffff);
    const Scaling s(top);
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) ints[i] = s.finite ? int32_t(__builtin_rintf(wide[i] * s.inverse)) : 0;
#pragma omp simd reduction(+ : first, second)
    for (int i = 0; i < BLOCK / 2; i++) first += ints[i], second += ints[i + BLOCK / 2];
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) out.q[i] = int8_t(ints[i]);
    out.scale = s.scale;
    const int32_t sums[3] = {first, second, first + second};
    for (int i = 0; i < 3; i++) out.sums[i] = s.scale * float(sums[i]), out.starts[i] = -128 * sums[i];
}
#endif

template <class T>
inline void quantize_row(const T* x, int64_t columns, XBlock* out) {
    int64_t at = 0;
    for (; at + BLOCK <= columns; at += BLOCK) quantize_block(x + at, *out++);
    if (at == columns) return;
    T rest[BLOCK] = {};
    std::memcpy(rest, x + at, size_t(columns - at) * sizeof(T));
    quantize_block(rest, *out);
}

}  // namespace octavo
#endif
