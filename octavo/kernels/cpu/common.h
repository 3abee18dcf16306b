// What all CPU kernels share: vectors of the machine's width, bfloat16, exp2, tanh and log, threads.
//
// Kernels are written with the vector extensions of GCC and Clang or as plain loops that vectorise,
// so one source serves AVX-512, AVX2, SSE and NEON. No header of PyTorch is used: arrays come in
// as plain pointers, strides are counted in elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#endif

#define OCTAVO_API extern "C" __attribute__((visibility("default")))

namespace octavo {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

// bfloat16 is the upper half of a float32.
struct bf16 {
    uint16_t bits;
};

// Element types as ops.py numbers them.
enum DType : int32_t { FLOAT32 = 0, BFLOAT16 = 1 };

template <class To, class From>
inline To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

inline vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline vf load(const bf16* p) {
#if defined(__AVX512F__) && defined(__AVX512BW__)  // one instruction, for which GCC 12 takes seven
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
    vh h;
    std::memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
// Of `put` and `rounded_to` below, the same for vectors.
inline vu bf16_bits(vf x) {  // in the upper halves
    const vu bits = (vu)x, rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (x != x ? bits | 0x400000u : rounded) & 0xffff0000u;
}
inline void store(bf16* p, vf v) {
    const vu bits = bf16_bits(v) >> 16;
#if defined(__AVX512F__) && defined(__AVX512BW__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)bits));
#else
    const vh h = __builtin_convertvector(bits, vh);
    std::memcpy(p, &h, sizeof h);
#endif
}
template <class T>
inline vf rounded_to(vf x) {
    if constexpr (sizeof(T) == sizeof(float)) return x;
    return (vf)bf16_bits(x);
}
inline vf splat(float x) { return vf{} + x; }
inline vf vmax(vf a, vf b) { return a > b ? a : b; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }
inline void put(float& p, float x) { p = x; }
// Rounds to nearest even; a NaN stays a NaN. Branch-free, so that loops of it vectorise.
inline void put(bf16& p, float x) {
    uint32_t bits = bits_as<uint32_t>(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    p.bits = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? ((bits >> 16) | 0x40u) : rounded);
}
// The value after a round trip through T: kernels round where PyTorch's operations do.
template <class T>
inline float rounded_to(float x) {
    T t;
    put(t, x);
    return to_float(t);
}

// 2^x for x < 128, F = float with I = int32_t or F = vf with I = vi. Exactly 0 below -126, so that
// -inf gives 0. Error below 1 ulp: a polynomial on [-0.5, 0.5], scaled through the exponent bits.
template <class F, class I>
inline F exp2_of(F x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const F floor = F{} - 126.0f;
    F clamped = x < floor ? floor : x;
    F shifted = clamped + magic;
    F f = clamped - (shifted - magic);
    I scale = (bits_as<I>(shifted) - bits_as<int32_t>(magic) + 127) << 23;
    F p = f * 1.5461447464e-04f + 1.3390867351e-03f;
    p = p * f + 9.6180566699e-03f;
    p = p * f + 5.5503571043e-02f;
    p = p * f + 2.4022650922e-01f;
    p = p * f + 6.9314718803e-01f;
    p = p * f + 1.0f;
    return x < floor ? F{} : p * bits_as<F>(scale);
}

constexpr float LOG2_E = 1.44269504088896341f;

// tanh(x), F and I as for exp2_of, relative error below 3e-7 (a NaN stays one). Near 0 an odd polynomial
// (1 - 2 / (e^2x + 1) would cancel there), fitted for the least relative error on [-0.625, 0.625].
template <class F, class I>
inline F tanh_of(F x) {
    F size = x < 0.0f ? -x : x;
    size = size > 10.0f ? F{} + 10.0f : size;  // 1 from 9.02 on
    F far = 1.0f - 2.0f / (exp2_of<F, I>(size * (2 * LOG2_E)) + 1.0f);
    F square = x * x;
    F p = square * -5.7170659e-03f + 2.0650608e-02f;
    p = p * square - 5.3743505e-02f;
    p = p * square + 1.3331491e-01f;
    p = p * square - 3.3333284e-01f;
    return size < 0.625f ? x + x * square * p : (x < 0.0f ? -far : far);
}

// Natural logarithm of a positive normal x, error below 1 ulp (2 near powers of two):
// x = 2^e * m with m in [sqrt(1/2), sqrt(2)), log(m) = f - f^2/2 + f^3 P(f) with f = m - 1.
inline float log_of(float x) {
    int32_t bits = bits_as<int32_t>(x);
    int32_t e = (bits - 0x3f3504f3) >> 23;
    float f = bits_as<float>(bits - (e << 23)) - 1.0f;
    float p = f * 7.1497538913e-02f - 1.1571200727e-01f;
    p = p * f + 1.1661511068e-01f;
    p = p * f - 1.2411050684e-01f;
    p = p * f + 1.4249936533e-01f;
    p = p * f - 1.6668480240e-01f;
    p = p * f + 2.0000707478e-01f;
    p = p * f - 2.4999989049e-01f;
    p = p * f + 3.3333331191e-01f;
    float n = float(e), f2 = f * f;
    // log(2) in two pieces: the first has few bits, so that n times it is exact.
    return n * 0.693359375f + (f + (f2 * f * p - 0.5f * f2 + n * -2.12194440e-4f));
}

// Calls call(context, i) for i in [0, n) on up to `threads` threads; each takes the next i when free.
// The threads are PyTorch's own (runtime.cpp), so no second pool competes for the cores.
void run_parallel(int64_t n, int64_t threads, void (*call)(const void*, int64_t), const void* context);

template <class Body>
inline void parallel_for(int64_t n, int64_t threads, const Body& body) {
    run_parallel(n, threads, [](const void* b, int64_t i) { (*static_cast<const Body*>(b))(i); }, &body);
}

// parallel_for over ranges of `n` rows: body(first, last). Small work stays on the calling thread
// (waking the others costs more than about 8 thousand elements do).
template <class Body>
inline void parallel_rows(int64_t n, int64_t elements_per_row, int64_t threads, const Body& body) {
    const int64_t pieces = n * elements_per_row < 16384 ? 1 : std::min(n, threads);
    parallel_for(pieces, threads, [&](int64_t i) { body(n * i / pieces, n * (i + 1) / pieces); });
}

// Calls f(T{}) with the C++ type of a DType; returns false for a number that has none.
template <class F>
inline bool with_dtype(int32_t dtype, const F& f) {
    if (dtype == FLOAT32) return f(float{}), true;
    if (dtype == BFLOAT16) return f(bf16{}), true;
    return false;
}

}  // namespace octavo
