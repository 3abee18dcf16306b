// Attention of few lanes, a decode step's: bound by memory.
//
// A tile's keys are transposed in registers, so that scores lie along the vectors, each summed over head_dim from
// front to back: as attention_many.h sums them. With the same tiles, weights and order of keys, a row's result is the
// same by either.
//
// Blocks are scattered, so the hardware cannot guess where the next tile of keys lies: its keys are asked for while
// scores are computed, its values while values are summed, and at an item's end those of the next.
#pragma once

#include "attention_keys.h"
#include "attention_tile.h"

namespace octavo {

constexpr int FEW = W == 16 ? 6 : 3;     // lanes of one pass
constexpr int FEW_LANES = W == 16 ? 12 : 6;  // above this, many_lanes is the faster

// Elements of a head go two vectors at a time, and of bfloat16 the even ones are in the first, the odd ones in the
// second: a shift and a mask widen both. Results of few lanes have that order too (a last single vector has its own).
template <class C>
inline void load2(const C* p, vf& a, vf& b) {
    a = load(p), b = load(p + W);
}
inline void load2(const bf16* p, vf& a, vf& b) {
    vu v;
    std::memcpy(&v, p, sizeof v);
    a = (vf)(v << 16), b = (vf)(v & 0xffff0000u);
}
template <class C>
constexpr bool PAIRED = std::is_same_v<C, bf16>;

// A row of `dim` numbers in the order of C, times a factor, rounded to T.
template <class C, class T>
inline void take_from_order(const float* from, int64_t dim, float factor, T* to) {
    int64_t d = 0;
    for (; PAIRED<C> && d + 2 * W <= dim; d += 2 * W)
#pragma omp simd
        for (int i = 0; i < W; i++) {
            put(to[d + 2 * i], from[d + i] * factor);
            put(to[d + 2 * i + 1], from[d + W + i] * factor);
        }
#pragma omp simd
    for (int64_t i = d; i < dim; i++) put(to[i], from[i] * factor);
}

inline float sum_of(vf v) {
    float sum = 0;
    for (int j = 0; j < W; j++) sum += v[j];
    return sum;
}
inline float sum_of(const float* x, int64_t n) {  // n: a multiple of W
    vf sums = {};
    for (int64_t i = 0; i < n; i += W) sums += load(x + i);
    return sum_of(sums);
}

// out[m][d..d+N*W) = alpha[m] * out + p[m] . v over n keys; asks memory for what is `next`, up to `ahead` keys
template <int M, int N, class C>
inline void weigh(const float* p, const C* const* v, int64_t n, int64_t dim, int64_t d, const float* alpha, float* out,
                  const C* const* next, int64_t ahead) {
    vf acc[M][N];
    for (int m = 0; m < M; m++)
        for (int j = 0; j < N; j++) acc[m][j] = load(out + m * dim + d + j * W) * alpha[m];
    for (int64_t t = 0; t < n; t++) {
        const C* row = v[t / 4] + (t % 4) * dim + d;
        if (t % 4 == 0 && t < ahead) prefetch_rows(next[t / 4], dim);
        vf vv[N];
        if constexpr (N == 1) {
            vv[0] = load(row);
        } else {
            for (int j = 0; j < N; j += 2) load2(row + j * W, vv[j], vv[j + 1]);
        }
        for (int m = 0; m < M; m++)
            for (int j = 0; j < N; j++) acc[m][j] += vv[j] * p[m * KEYS + t];
    }
    for (int m = 0; m < M; m++)
        for (int j = 0; j < N; j++) store(out + m * dim + d + j * W, acc[m][j]);
}

// Calls f(m, M) with M lanes from lane m on, known when compiled, until `lanes` are done.
template <int M = FEW, class F>
inline void by_lanes(int64_t lane, int64_t lanes, const F& f) {
    if constexpr (M > 1) {
        for (; lanes - lane >= M; lane += M) f(lane, std::integral_constant<int, M>{});
        by_lanes<M - 1>(lane, lanes, f);
    } else if (lane < lanes) {
        f(lane, std::integral_constant<int, 1>{});
    }
}

// All lanes of an item over its keys. q: [lanes, dim]; words: room for a tile of keys; `then`: the item that will come
// next, or null.
template <class C>
void few_lanes(const Call& c, const Item& it, int64_t lanes, const float* q, uint32_t* words, const Partial& r,
               const Item* then) {
    const int64_t dim = c.s.head_dim;
    alignas(64) float p[FEW_LANES * KEYS];
    float alpha[FEW_LANES];
    // Of caches with scales for every token.
    alignas(64) float scales[KEYS], offsets[KEYS];
    float q_sum[FEW_LANES] = {}, shift[FEW_LANES] = {};  // of the results, in every element
    if constexpr (PER_TOKEN<C>)
        for (int64_t m = 0; m < lanes; m++) q_sum[m] = sum_of(q + m * dim, dim);
    KeyTile<C> tile, next;
    int64_t n = tile_keys(it, first_tile(it));
    next.find(c, it, first_tile(it), n);
    for (int64_t t0 = first_tile(it); t0 < it.key1; t0 += n) {
        n = tile_keys(it, t0);
        tile = next;
        int64_t ahead = 0;
        if (t0 + n < it.key1) {
            ahead = tile_keys(it, t0 + n);
            next.find(c, it, t0 + n, ahead);
        } else if (then) {
            ahead = tile_keys(*then, first_tile(*then));
            next.find(c, *then, first_tile(*then), ahead);
        }
        for (int64_t t = 0; t < n; t += W) transpose_keys(tile.k, t, n, dim, words);
        if constexpr (PER_TOKEN<C>)
            for (int64_t t = 0; t < ahead; t += 4) next.prefetch_scales(c, t / 4);
        by_lanes(0, lanes, [&](int64_t m, auto M) {
            dot_keys<M, C>(q + m * dim, words, n, dim, p + m * KEYS, next.k, m ? 0 : ahead);
        });
        if constexpr (PER_TOKEN<C>) {
            tile.scales(c, 0, n, scales, offsets);
            for (int64_t m = 0; m < lanes; m++)
                for (int64_t t = 0; t < n; t += W)
                    store(p + m * KEYS + t, load(p + m * KEYS + t) * load(scales + t) + q_sum[m] * load(offsets + t));
            tile.scales(c, 1, n, scales, offsets);
        }
        for (int64_t m = 0; m < lanes; m++) {
            float* s = p + m * KEYS;
            const int64_t pos = it.pos0 + m / c.group;
            if (c.s.softcap) cap_scores(s, n, c.s.softcap);
            const int64_t first = c.s.window ? std::max<int64_t>(0, pos - c.s.window + 1 - t0) : 0;
            const int64_t last = std::min(n, pos + 1 - t0);
            for (int64_t t = 0; t < std::min(first, n); t++) s[t] = -INFINITY;
            for (int64_t t = std::max<int64_t>(last, 0); t < (n + W - 1) / W * W; t++) s[t] = -INFINITY;
            vf top = splat(r.max[m]);
            for (int64_t t = 0; t < n; t += W) top = vmax(load(s + t), top);
            float most = top[0];
            for (int j = 1; j < W; j++) most = std::max(most, top[j]);
            vf sums = {}, shifts = {};
            for (int64_t t = 0; t < n; t += W) {
                vf e = weight_of(load(s + t) - most);
                sums += e;
                if constexpr (PER_TOKEN<C>) {
                    shifts += e * load(offsets + t);
                    e *= load(scales + t);
                }
                store(s + t, e);
            }
            alpha[m] = weight_of(splat(r.max[m] - most))[0];
            if constexpr (PER_TOKEN<C>) shift[m] = shift[m] * alpha[m] + sum_of(shifts);
            r.sum[m] = r.sum[m] * alpha[m] + sum_of(sums);
            r.max[m] = most;
        }
        by_lanes(0, lanes, [&](int64_t m, auto M) {
            const float *pm = p + m * KEYS, *am = alpha + m;
            float* out = r.out + m * dim;
            int64_t d = 0;
            auto asked = [&] { return m + d ? 0 : ahead; };
            for (; d + 4 * W <= dim; d += 4 * W) weigh<M, 4>(pm, tile.v, n, dim, d, am, out, next.v, asked());
            for (; d + 2 * W <= dim; d += 2 * W) weigh<M, 2>(pm, tile.v, n, dim, d, am, out, next.v, asked());
            for (; d < dim; d += W) weigh<M, 1>(pm, tile.v, n, dim, d, am, out, next.v, asked());
        });
    }
    if constexpr (PER_TOKEN<C>)
        for (int64_t m = 0; m < lanes; m++)
            for (int64_t d = 0; d < dim; d += W) store(r.out + m * dim + d, load(r.out + m * dim + d) + shift[m]);
}

}  // namespace octavo
