// Element types of a KV cache: float32, bfloat16, and numbers of 8 bits that are read in place.
//
// FP8 numbers are the OCP formats E4M3 (no infinities, largest 448) and E5M2 (largest 57344); a number is its
// code's value times the scale of its layer, part and head. INT8 codes have a float16 scale per token and
// head behind the head's codes, and maybe an offset behind the scales: see octavo/kv/format.py.
#pragma once

#include "common.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace octavo {

// Cache types as ops.py numbers them: those of DType, then these.
enum CacheType : int32_t { CACHE_E4M3 = 2, CACHE_E5M2 = 3, CACHE_INT8 = 4, CACHE_INT8_OFFSET = 5 };

struct e4m3 {
    uint8_t bits;
};
struct e5m2 {
    uint8_t bits;
};
struct code8 {
    int8_t value;
};

typedef uint8_t vb __attribute__((vector_size(W)));
typedef int8_t vc __attribute__((vector_size(W)));

// A float16's bits to and from a float32, rounded to nearest even.
inline float half_to_float(uint16_t h) {
    const uint32_t size = h & 0x7fffu;
    const float value = size < 0x400u    ? float(size) * 0x1p-24f
                        : size < 0x7c00u ? bits_as<float>((size << 13) + (112u << 23))
                                         : bits_as<float>((size << 13) | 0x7f800000u);
    return h & 0x8000u ? -value : value;
}
inline uint16_t float_to_half(float x) {
    const uint32_t bits = bits_as<uint32_t>(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (size >= 0x47800000u) return uint16_t(sign | 0x7c00u);
    if (size < 0x38800000u)  // subnormal: counted in units of 2^-24
        return uint16_t(sign | (bits_as<uint32_t>(bits_as<float>(size) * 0x1p24f + 0x1p23f) - 0x4b000000u));
    return uint16_t(sign | (((size + 0xfffu + (size >> 13 & 1u)) >> 13) - (112u << 10)));
}

// What `load` and `to_float` give, times UNIT, is the code's value: E4M3 is read as the upper bits of a float16,
// whose exponent counts from 2^8 lower. Its NaN reads as 480 (nothing but a NaN is ever stored as one).
template <class C>
constexpr float UNIT = 1.0f;
#if defined(__AVX2__) && defined(__F16C__)
template <>
constexpr float UNIT<e4m3> = 256.0f;
#endif

// 4 float16 numbers.
inline void widen4(const uint16_t* from, float* to) {
#if defined(__AVX2__) && defined(__F16C__)
    _mm_storeu_ps(to, _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)from)));
#else
    for (int i = 0; i < 4; i++) to[i] = half_to_float(from[i]);
#endif
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__F16C__)
inline vf load(const e4m3* p) {
    const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
    return (vf)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(int16_t(0xbfff))));
}
inline vf load(const e5m2* p) {
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
    return (vf)_mm512_cvtph_ps(_mm256_slli_epi16(x, 8));
}
#elif defined(__AVX2__) && defined(__F16C__)
inline vf load(const e4m3* p) {
    const __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
    return (vf)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16(int16_t(0xbfff))));
}
inline vf load(const e5m2* p) {
    const __m128i x = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)p));
    return (vf)_mm256_cvtph_ps(x);
}
#else
// Normal numbers by moving the bits, subnormal ones by counting their units.
template <int MANTISSA, int BIAS>
inline vf widen8(const void* p, float unit) {
    vb b;
    std::memcpy(&b, p, sizeof b);
    const vu x = __builtin_convertvector(b, vu), size = x & 0x7fu;
    const vf normal = (vf)((size << (23 - MANTISSA)) + (uint32_t(127 - BIAS) << 23));
    const vf value = size < (1u << MANTISSA) ? __builtin_convertvector((vi)size, vf) * unit : normal;
    return (vf)((vu)value | (x & 0x80u) << 24);
}
inline vf load(const e4m3* p) { return widen8<3, 7>(p, 0x1p-9f); }
inline vf load(const e5m2* p) { return widen8<2, 15>(p, 0x1p-16f); }
#endif
inline vf load(const code8* p) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    vc c;
    std::memcpy(&c, p, sizeof c);
    return __builtin_convertvector(__builtin_convertvector(c, vi), vf);
#endif
}
inline float to_float(code8 x) { return float(x.value); }

// FP8 codes of a number: rounded to nearest even, beyond the largest the largest. Branch-free.
template <int MANTISSA, int BIAS, uint32_t LARGEST>
inline uint8_t encode8(float x) {
    constexpr int SHIFT = 23 - MANTISSA;
    constexpr float UNITS = float(1u << (BIAS - 1 + MANTISSA));  // of a subnormal number in 1
    const uint32_t bits = bits_as<uint32_t>(x), size = bits & 0x7fffffffu;
    const uint32_t rounded = (size + ((1u << (SHIFT - 1)) - 1u) + (size >> SHIFT & 1u)) >> SHIFT;
    const uint32_t normal = rounded - (uint32_t(127 - BIAS) << MANTISSA);
    const uint32_t few = bits_as<uint32_t>(bits_as<float>(size) * UNITS + 0x1p23f) - 0x4b000000u;
    uint32_t code = size < (uint32_t(128 - BIAS) << 23) ? few : normal;
    code = code > LARGEST ? LARGEST : code;
    code = size > 0x7f800000u ? 0x7fu : code;
    return uint8_t(code | (bits >> 24 & 0x80u));
}
inline void put(e4m3& p, float x) { p.bits = encode8<3, 7, 0x7e>(x); }
inline void put(e5m2& p, float x) { p.bits = encode8<2, 15, 0x7b>(x); }

// Bytes behind each token's codes.
inline int64_t bytes_behind(int32_t cache_type) {
    return cache_type == CACHE_INT8 ? 2 : cache_type == CACHE_INT8_OFFSET ? 4 : 0;
}

// Elements of one head's piece of a block.
inline int64_t piece_size(int32_t cache_type, int64_t block_size, int64_t head_dim) {
    return block_size * (head_dim + bytes_behind(cache_type));
}

// Calls f(C{}) with the C++ type of a cache's elements; returns false for a number that has none.
template <class F>
inline bool with_cache_type(int32_t cache_type, const F& f) {
    switch (cache_type) {
        case CACHE_E4M3: return f(e4m3{}), true;
        case CACHE_E5M2: return f(e5m2{}), true;
        case CACHE_INT8:
        case CACHE_INT8_OFFSET: return f(code8{}), true;
        default: return with_dtype(cache_type, f);
    }
}

}  // namespace octavo
