// Rotary embedding and the writing of keys and values into the paged cache.
//
// The cache of a layer is [num_blocks, 2 (K, V), kv_heads, block_size, head_dim], contiguous; behind the codes of
// 8 bits that have scales of their own, a head's piece of a block has these: see octavo/kv/format.py.
#include <cmath>
#include <type_traits>

#include "cached.h"
#include "common.h"
#include "record.h"

using namespace octavo;

namespace {

// Rotates one head in place, "neox" pairing: element i with element i + rot / 2.
template <class T>
inline void rotate(T* x, const float* cos_sin, int64_t half) {
    const float *cos = cos_sin, *sin = cos_sin + half;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = to_float(x[i]), b = to_float(x[half + i]);
        put(x[i], a * cos[i] - b * sin[i]);
        put(x[half + i], b * cos[i] + a * sin[i]);
    }
}

// Row `offset` of one head's piece of a block; `scale`: of FP8 caches; `centre`: what keys of 8 bits are stored less
// of, or null.
template <class From, class To>
inline void store_row(const From* from, To* piece, int64_t offset, int64_t dim, float scale, const float* centre) {
    To* to = piece + offset * dim;
    if constexpr (std::is_same_v<To, float> || std::is_same_v<To, bf16>) {
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) put(to[i], to_float(from[i]));
    } else if (centre) {
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) put(to[i], (to_float(from[i]) - centre[i]) / scale);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) put(to[i], to_float(from[i]) / scale);
    }
}

// Codes with a scale of their own, and maybe the middle of what they span as their offset. A number that is
// not finite makes the scale NaN, and the whole row with it.
template <class From>
inline void store_codes(const From* from, code8* piece, int64_t offset, int64_t dim, int64_t block_size, bool shifted,
                        const float* centre) {
    float low = INFINITY, high = -INFINITY, poison = 0;
#pragma omp simd reduction(min : low) reduction(max : high) reduction(+ : poison)
    for (int64_t i = 0; i < dim; i++) {
        const float x = centre ? to_float(from[i]) - centre[i] : to_float(from[i]);
        low = x < low ? x : low, high = x > high ? x : high, poison += x * 0.0f;
    }
    uint16_t* scales = (uint16_t*)(piece + block_size * dim) + offset;
    float middle = 0;
    if (shifted) {
        scales[block_size] = float_to_half((high + low) * 0.5f);
        middle = half_to_float(scales[block_size]);
    }
    const float most = std::max(std::fabs(high - middle), std::fabs(low - middle));
    scales[0] = float_to_half(most * (1.0f / 127) + poison);
    const float scale = half_to_float(scales[0]);
    code8* to = piece + offset * dim;
#pragma omp simd
    for (int64_t i = 0; i < dim; i++) {
        float x = centre ? to_float(from[i]) - centre[i] : to_float(from[i]);
        x = scale > 0 ? (x - middle) / scale : 0.0f;
        x = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x;
        to[i].value = int8_t(int32_t(bits_as<uint32_t>(x + 12582912.0f)) - 0x4b400000);  // to nearest even
    }
}

}  // namespace

// One layer's shapes and types, as ops.py fills it.
struct CacheShape {
    int64_t heads, kv_heads, head_dim, block_size, rot_dim;
    int32_t dtype, cache_type;
};

// Any of three parts, by which pointers are given: rotate q and k (cos_sin), store k and v (cache).
// q, k, v: rows of heads, heads contiguous, rows *_stride apart. positions: int64 (int32 if
// `short_positions`). slots: int64, block * block_size + offset, negative: not stored. kv_scale: [2, kv_heads], of
// FP8 caches, else null. kv_centre: [kv_heads, head_dim], what keys of 8 bits are stored less of, or null.
OCTAVO_API int32_t octavo_rope_and_write_kv(const CacheShape* shape, void* q, void* k, const void* v,
                                            int64_t q_stride, int64_t k_stride, int64_t v_stride,
                                            const float* cos_sin, const void* positions, int32_t short_positions,
                                            void* cache, const float* kv_scale, const float* kv_centre,
                                            const int64_t* slots, int64_t rows, int32_t threads) {
    const CacheShape s = *shape;
    record_call([=] {
        return octavo_rope_and_write_kv(&s, q, k, v, q_stride, k_stride, v_stride, cos_sin, positions, short_positions,
                                        cache, kv_scale, kv_centre, slots, rows, threads);
    });
    bool known = with_dtype(s.dtype, [&](auto t) {
        using T = decltype(t);
        parallel_rows(rows, (s.heads + 2 * s.kv_heads) * s.head_dim, threads, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; r++) {
                T* key = (T*)k + r * k_stride;
                if (cos_sin) {
                    int64_t pos = short_positions ? ((const int32_t*)positions)[r] : ((const int64_t*)positions)[r];
                    const float* cs = cos_sin + pos * s.rot_dim;
                    T* query = (T*)q + r * q_stride;
                    for (int64_t h = 0; h < s.heads; h++) rotate(query + h * s.head_dim, cs, s.rot_dim / 2);
                    for (int64_t h = 0; h < s.kv_heads; h++) rotate(key + h * s.head_dim, cs, s.rot_dim / 2);
                }
                if (!cache || slots[r] < 0) continue;
                const T* value = (const T*)v + r * v_stride;
                const int64_t block = slots[r] / s.block_size, offset = slots[r] % s.block_size;
                with_cache_type(s.cache_type, [&](auto c) {
                    using C = decltype(c);
                    const int64_t size = piece_size(s.cache_type, s.block_size, s.head_dim);
                    C* piece = (C*)cache + block * 2 * s.kv_heads * size;
                    for (int64_t h = 0; h < 2 * s.kv_heads; h++, piece += size) {
                        const T* from = h < s.kv_heads ? key + h * s.head_dim : value + (h - s.kv_heads) * s.head_dim;
                        const float* centre = kv_centre && h < s.kv_heads ? kv_centre + h * s.head_dim : nullptr;
                        if constexpr (std::is_same_v<C, code8>)
                            store_codes(from, piece, offset, s.head_dim, s.block_size,
                                        s.cache_type == CACHE_INT8_OFFSET, centre);
                        else
                            store_row(from, piece, offset, s.head_dim, kv_scale ? kv_scale[h] : 1.0f, centre);
                    }
                });
            }
        });
    });
    return known ? 0 : -1;
}
