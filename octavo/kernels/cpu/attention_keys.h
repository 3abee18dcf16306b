// Keys of a tile, transposed, and their dot products with few queries.
//
// What is transposed are words of 32 bits: a float32, or two numbers as bfloat16, which all types of fewer bits fit
// exactly. Word i of a bfloat16 row are its elements 2i and 2i + 1; of 8 bits, of every 2 W elements, i and W + i.
#pragma once

#include "attention_tile.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace octavo {

// x[i][j] becomes x[j][i].
inline void transpose(vu (&x)[W]) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    __m512i a[W], b[W];
    for (int i = 0; i < W; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)x[i], (__m512i)x[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)x[i], (__m512i)x[i + 1]);
    }
    for (int i = 0; i < W; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]), b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]), b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        const __m512i low = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x44), high = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xee);
        const __m512i low2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x44);
        const __m512i high2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xee);
        x[i] = (vu)_mm512_shuffle_i32x4(low, low2, 0x88), x[4 + i] = (vu)_mm512_shuffle_i32x4(low, low2, 0xdd);
        x[8 + i] = (vu)_mm512_shuffle_i32x4(high, high2, 0x88), x[12 + i] = (vu)_mm512_shuffle_i32x4(high, high2, 0xdd);
    }
#elif defined(__AVX2__)
    __m256i a[W], b[W];
    for (int i = 0; i < W; i += 2) {
        a[i] = _mm256_unpacklo_epi32((__m256i)x[i], (__m256i)x[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32((__m256i)x[i], (__m256i)x[i + 1]);
    }
    for (int i = 0; i < W; i += 4) {
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]), b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]), b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        x[i] = (vu)_mm256_permute2x128_si256(b[i], b[4 + i], 0x20);
        x[4 + i] = (vu)_mm256_permute2x128_si256(b[i], b[4 + i], 0x31);
    }
#else
    for (int i = 0; i < W; i++)
        for (int j = 0; j < i; j++) {
            const uint32_t word = x[i][j];
            x[i][j] = x[j][i], x[j][i] = word;
        }
#endif
}

// Words of a row's elements from d on, W of them or all.
template <class C>
inline vu words_of(const C* row, int64_t d, int64_t dim) {
    vu words = {};
    if constexpr (std::is_same_v<C, float>) {
        std::memcpy(&words, row + d, sizeof words);
    } else if constexpr (std::is_same_v<C, bf16>) {
        if (dim - d >= 2 * W)
            std::memcpy(&words, row + d, sizeof words);
        else
            std::memcpy(&words, row + d, sizeof words / 2);
    } else {
        words = (vu)load(row + d) >> 16;
        if (dim - d >= 2 * W) words |= (vu)load(row + d + W) & 0xffff0000u;
    }
    return words;
}

template <class C>
constexpr int WORD = std::is_same_v<C, float> ? 1 : 2;  // elements of a word

// Keys t to t + W of the n, found as KeyTile says, to words [dim / WORD, KEYS], rounded up to W words if of 8 bits.
template <class C>
inline void transpose_keys(const C* const* k, int64_t t, int64_t n, int64_t dim, uint32_t* words) {
    const C* rows[W];
    for (int i = 0; i < W; i++) {
        const int64_t key = std::min(t + i, n - 1);  // what comes after the last has no weight
        rows[i] = k[key / 4] + key % 4 * dim;
    }
#if defined(__AVX512F__) && defined(__AVX512BW__)
    if constexpr (!PER_TOKEN<C> && sizeof(C) > 1) {
        // 4 words of 16 rows: four rows side by side by loading them so, which costs the shuffles' port nothing.
        for (int64_t d = 0; d < dim; d += 4 * WORD<C>) {
            auto at = [&](int row) { return _mm_loadu_si128((const __m128i*)(rows[row] + d)); };
            __m512i x[4];
            for (int i = 0; i < 4; i++) {
                x[i] = _mm512_inserti32x4(_mm512_castsi128_si512(at(i)), at(4 + i), 1);
                x[i] = _mm512_inserti32x4(_mm512_inserti32x4(x[i], at(8 + i), 2), at(12 + i), 3);
            }
            const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
            const __m512i e = _mm512_unpacklo_epi32(x[2], x[3]), f = _mm512_unpackhi_epi32(x[2], x[3]);
            uint32_t* to = words + d / WORD<C> * KEYS + t;
            _mm512_storeu_si512(to, _mm512_unpacklo_epi64(a, e));
            _mm512_storeu_si512(to + KEYS, _mm512_unpackhi_epi64(a, e));
            _mm512_storeu_si512(to + 2 * KEYS, _mm512_unpacklo_epi64(b, f));
            _mm512_storeu_si512(to + 3 * KEYS, _mm512_unpackhi_epi64(b, f));
        }
        return;
    }
#endif
    for (int64_t d = 0; d < dim; d += WORD<C> * W) {
        vu x[W];
        for (int i = 0; i < W; i++) x[i] = words_of(rows[i], d, dim);
        transpose(x);
        const bool half = std::is_same_v<C, bf16> && dim - d < 2 * W;
        for (int i = 0; i < (half ? W / 2 : W); i++) std::memcpy(words + (d / WORD<C> + i) * KEYS + t, &x[i], sizeof x[i]);
    }
}

template <class C>
inline void prefetch_rows(const C* rows, int64_t dim) {
    for (int64_t i = 0; i < 4 * dim * int64_t(sizeof(C)); i += 64) __builtin_prefetch((const char*)rows + i, 0, 3);
}

// scores[m][0..T * W) = q[m] . k for M queries, [M, dim], and T vectors of keys; asks memory,
// bit by bit, for what is `next`, up to `ahead` keys
template <int M, int T, class C>
inline void dot_words(const float* q, const uint32_t* words, int64_t dim, float* scores, const C* const* next,
                      int64_t ahead) {
    vf acc[M][T] = {};
    auto add = [&](const vf (&k)[T], int64_t d) {
        for (int m = 0; m < M; m++)
            for (int t = 0; t < T; t++) acc[m][t] += k[t] * q[m * dim + d];
    };
    int64_t asked = 0;
    auto with = [&](int64_t word, int64_t d, auto widen) {
        for (; asked < ahead && asked * dim <= d * KEYS; asked += 4) prefetch_rows(next[asked / 4], dim);
        vf k[T];
        for (int t = 0; t < T; t++) {
            vu x;
            std::memcpy(&x, words + word * KEYS + t * W, sizeof x);
            k[t] = (vf)widen(x);
        }
        add(k, d);
    };
    auto whole = [](vu x) { return x; };
    auto low = [](vu x) { return x << 16; };
    auto high = [](vu x) { return x & 0xffff0000u; };
    if constexpr (std::is_same_v<C, float>) {
        for (int64_t d = 0; d < dim; d++) with(d, d, whole);
    } else if constexpr (std::is_same_v<C, bf16>) {
        for (int64_t d = 0; d < dim; d += 2) with(d / 2, d, low), with(d / 2, d + 1, high);
    } else {
        for (int64_t d = 0; d < dim; d += 2 * W) {
            for (int i = 0; i < W; i++) with(d / 2 + i, d + i, low);
            if (dim - d >= 2 * W)
                for (int i = 0; i < W; i++) with(d / 2 + i, d + W + i, high);
        }
    }
    for (int m = 0; m < M; m++)
        for (int t = 0; t < T; t++) store(scores + m * KEYS + t * W, acc[m][t]);
}

// The same for all n keys of a tile: scores [M, KEYS].
template <int M, class C>
inline void dot_keys(const float* q, const uint32_t* words, int64_t n, int64_t dim, float* scores,
                     const C* const* next, int64_t ahead) {
    constexpr int T = W == 16 ? 4 : 2;
    for (int64_t t = 0; t < n; t += T * W) {
        if (T == 4 && n - t <= 2 * W)
            dot_words<M, 2, C>(q, words + t, dim, scores + t, next, t ? 0 : ahead);
        else
            dot_words<M, T, C>(q, words + t, dim, scores + t, next, t ? 0 : ahead);
    }
}

}  // namespace octavo
