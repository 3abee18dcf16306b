// Rotary embedding and the writing of keys and values into the paged cache.
//
// The cache of a layer is [num_blocks, 2 (K, V), kv_heads, block_size, head_dim], contiguous.
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

template <class From, class To>
inline void copy(const From* from, To* to, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) put(to[i], to_float(from[i]));
}

}  // namespace

// One layer's shapes and types, as ops.py fills it.
struct CacheShape {
    int64_t heads, kv_heads, head_dim, block_size, rot_dim;
    int32_t dtype, cache_dtype;
};

// Any of three parts, by which pointers are given: rotate q and k (cos_sin), store k and v (cache).
// q, k, v: rows of heads, heads contiguous, rows *_stride apart. positions: int64 (int32 if
// `short_positions`). slots: int64, block * block_size + offset, negative: not stored.
OCTAVO_API int32_t octavo_rope_and_write_kv(const CacheShape* shape, void* q, void* k, const void* v,
                                            int64_t q_stride, int64_t k_stride, int64_t v_stride,
                                            const float* cos_sin, const void* positions, int32_t short_positions,
                                            void* cache, const int64_t* slots, int64_t rows, int32_t threads) {
    const CacheShape s = *shape;
    record_call([=] {
        return octavo_rope_and_write_kv(&s, q, k, v, q_stride, k_stride, v_stride, cos_sin, positions, short_positions,
                                        cache, slots, rows, threads);
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
                with_dtype(s.cache_dtype, [&](auto c) {
                    using C = decltype(c);
                    const int64_t plane = s.block_size * s.head_dim;
                    C* to = (C*)cache + block * 2 * s.kv_heads * plane + offset * s.head_dim;
                    for (int64_t h = 0; h < s.kv_heads; h++) {
                        copy(key + h * s.head_dim, to + h * plane, s.head_dim);
                        copy(value + h * s.head_dim, to + (s.kv_heads + h) * plane, s.head_dim);
                    }
                });
            }
        });
    });
    return known ? 0 : -1;
}
