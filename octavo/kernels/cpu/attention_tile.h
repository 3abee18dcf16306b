// What the kernels of paged attention share: a call, a unit of its work, a tile of keys, a running softmax.
#pragma once

#include <atomic>
#include <type_traits>

#include "attention.h"
#include "cached.h"
#include "common.h"

// One layer's constants, as ops.py fills them. head_dim and block_size are multiples of 4.
struct AttentionShape {
    int64_t heads, kv_heads, head_dim, block_size, window;  // window 0: none
    float scale, softcap;  // softcap 0: none
    int32_t dtype, cache_type;
};

namespace octavo {

constexpr int KEYS = 64;                 // keys of a tile
constexpr int SPLIT = 512;               // keys of a piece of context, a multiple of KEYS
static_assert(SPLIT % KEYS == 0, "pieces");
constexpr float NOTHING = -1e30f;        // running maximum before the first key: finite, so that
                                         // the difference to a masked score (-inf) is not NaN

struct Item {
    int32_t request, head;    // KV head
    int32_t row0, rows;       // rows of the tile, counted in the step
    int32_t pos0;             // position of row0 in its context
    int32_t key0, key1;       // keys to visit; key0 is a multiple of 4
    int32_t piece, pieces;    // of the context
    int32_t counter;          // which countdown the pieces share
    int64_t partial;          // first float of the piece's partial result
};

struct Call {
    AttentionShape s;
    AttentionBatch b;
    int64_t group;  // query heads of a KV head
    const char* q;
    int64_t q_stride;
    const char* cache;
    const float* kv_scale;  // [2, kv_heads], of FP8 caches
    char* out;
    int64_t out_stride;
    float* partials;
    std::atomic<int32_t>* counters;
};

// What a score, q . k with the scale of `work` in q, becomes in base 2: softcap * tanh(scale q . k / softcap)
// (Gemma 2, arXiv 2408.00118). Without a softcap q's scale has done it all. Comes before any mask.
inline void cap_scores(float* scores, int64_t n, float softcap) {
    const float cap = softcap * LOG2_E;
    for (int64_t t = 0; t < n; t += W) store(scores + t, cap * tanh_of<vf, vi>(load(scores + t)));
}

// Tiles begin at multiples of KEYS, and pieces of a context at multiples of SPLIT, wherever an item's keys do: what
// a row's result is made of doesn't depend on the rows beside it.
inline int64_t first_tile(const Item& it) { return it.key0 / KEYS * KEYS; }
inline int64_t tile_keys(const Item& it, int64_t t0) { return std::min<int64_t>(KEYS, it.key1 - t0); }

template <class C>
constexpr bool PER_TOKEN = std::is_same_v<C, code8>;  // has a scale for every token

// Where the tile's keys and values lie: a pointer for every 4 keys (4 divides the block size).
template <class C>
struct KeyTile {
    const C *k[KEYS / 4], *v[KEYS / 4];
    const uint16_t* scale[KEYS / 4];  // of the keys, if PER_TOKEN; those of the values are one part on

    void find(const Call& c, const Item& it, int64_t t0, int64_t n) {
        const int32_t* table = c.b.block_table + it.request * c.b.table_stride;
        const int64_t piece = piece_size(c.s.cache_type, c.s.block_size, c.s.head_dim);
        const int64_t start = std::max<int64_t>(t0, it.key0);  // for those before it, which have no weight, as well
        int64_t index = start / c.s.block_size, offset = start % c.s.block_size;
        for (int64_t i = 0; i < n; i += 4) {
            if (t0 + i > start) offset += 4;
            if (offset == c.s.block_size) index++, offset = 0;
            const C* first = (const C*)c.cache + (int64_t(table[index]) * 2 * c.s.kv_heads + it.head) * piece;
            k[i / 4] = first + offset * c.s.head_dim;
            v[i / 4] = k[i / 4] + c.s.kv_heads * piece;
            if constexpr (PER_TOKEN<C>) scale[i / 4] = (const uint16_t*)(first + c.s.block_size * c.s.head_dim) + offset;
        }
    }

    void prefetch_scales(const Call& c, int64_t i) const {
        const int64_t away = c.s.kv_heads * piece_size(c.s.cache_type, c.s.block_size, c.s.head_dim);
        __builtin_prefetch(scale[i], 0, 3), __builtin_prefetch((const char*)scale[i] + away, 0, 3);
    }

    // Scales and (0 if there are none) offsets of the n keys (part 0) or values (part 1), and 0 up to a whole vector.
    void scales(const Call& c, int64_t part, int64_t n, float* scales, float* offsets) const {
        const int64_t away = part * c.s.kv_heads * piece_size(c.s.cache_type, c.s.block_size, c.s.head_dim);
        const bool has_offset = c.s.cache_type == CACHE_INT8_OFFSET;
        for (int64_t i = 0; i < n; i += 4) {
            const auto* from = (const uint16_t*)((const char*)scale[i / 4] + away);
            widen4(from, scales + i);
            if (has_offset) widen4(from + c.s.block_size, offsets + i);
        }
        for (int64_t t = n; t < (n + W - 1) / W * W; t++) scales[t] = 0;
        for (int64_t t = has_offset ? n : 0; t < (n + W - 1) / W * W; t++) offsets[t] = 0;
    }
};

// 2^x for x <= 0: a weight of the softmax. Exactly 1 for 0, and exactly 0 below -126, so that -inf gives 0.
inline vf weight_of(vf x) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
    // 2^floor(x) times a polynomial of the fraction, of relative error 8e-8.
    const __m512 f = _mm512_reduce_ps((__m512)x, 0x09);
    vf p = (vf)f * 1.8671301952e-03f + 9.0170300573e-03f;
    p = p * (vf)f + 5.5799913293e-02f;
    p = p * (vf)f + 2.4016445010e-01f;
    p = p * (vf)f + 6.9315131181e-01f;
    p = p * (vf)f + 1.0f;
    const __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
    return (vf)_mm512_maskz_scalef_ps(seen, (__m512)p, (__m512)x);
#else
    return exp2_of<vf, vi>(x);
#endif
}

// Running softmax of a lane, and its unnormalised result.
struct Partial {
    float *max, *sum, *out;  // [lanes], [lanes], [lanes, head_dim]
};

}  // namespace octavo
