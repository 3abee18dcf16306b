// Attention of few lanes, a decode step's: bound by memory. Dot products along head_dim.
//
// Blocks are scattered, so the hardware cannot guess where the next tile of keys lies: its keys are asked for while
// scores are computed, its values while values are summed, and at an item's end those of the next.
#pragma once

#include "attention_tile.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace octavo {

constexpr int FEW = W == 16 ? 4 : 3;     // queries of one pass of FewLanes
constexpr int FEW_LANES = 2 * FEW;       // above this, ManyLanes is the faster

// Elements of a head go two vectors at a time, and of bfloat16 the even ones are in the first, the odd ones in the
// second: a shift and a mask widen both. Queries and results of few lanes have that order too (a last single vector
// has its own).
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

// A row of `dim` numbers, times a factor, into the order of C; and back, rounded to T.
template <class C, class T>
inline void put_in_order(const T* from, int64_t dim, float factor, float* to) {
    int64_t d = 0;
    for (; PAIRED<C> && d + 2 * W <= dim; d += 2 * W)
#pragma omp simd
        for (int i = 0; i < W; i++) {
            to[d + i] = to_float(from[d + 2 * i]) * factor;
            to[d + W + i] = to_float(from[d + 2 * i + 1]) * factor;
        }
#pragma omp simd
    for (int64_t i = d; i < dim; i++) to[i] = to_float(from[i]) * factor;
}
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

// Sums of the elements of 4 vectors.
inline void sum4(vf a, vf b, vf c, vf d, float* out) {
#if defined(__AVX2__)
#if defined(__AVX512F__) && defined(__AVX512BW__)
    auto fold = [](__m512 x) {
        return _mm256_add_ps(_mm512_castps512_ps256(x),
                             _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
    };
#else
    auto fold = [](__m256 x) { return x; };
#endif
    __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(fold(a), fold(b)), _mm256_hadd_ps(fold(c), fold(d)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
#else
    for (int i = 1; i < W; i++) a[0] += a[i], b[0] += b[i], c[0] += c[i], d[0] += d[i];
    out[0] = a[0], out[1] = b[0], out[2] = c[0], out[3] = d[0];
#endif
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

// scores[m][0..4) = q[m] . k[0..4) for M queries
template <int M, class C>
inline void dot4(const float* q, const C* k, int64_t dim, float* scores) {
    vf acc[M][4] = {};
    int64_t d = 0;
    for (; d + 2 * W <= dim; d += 2 * W) {
        vf qa[M], qb[M];
        for (int m = 0; m < M; m++) qa[m] = load(q + m * dim + d), qb[m] = load(q + m * dim + d + W);
        for (int t = 0; t < 4; t++) {
            vf ka, kb;
            load2(k + t * dim + d, ka, kb);
            for (int m = 0; m < M; m++) acc[m][t] += qa[m] * ka;
            for (int m = 0; m < M; m++) acc[m][t] += qb[m] * kb;
        }
    }
    if (d < dim)
        for (int t = 0; t < 4; t++) {
            const vf kv = load(k + t * dim + d);
            for (int m = 0; m < M; m++) acc[m][t] += load(q + m * dim + d) * kv;
        }
    for (int m = 0; m < M; m++) sum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3], scores + m * KEYS);
}

template <class C>
inline void prefetch_rows(const C* rows, int64_t dim) {
    for (int64_t i = 0; i < 4 * dim * int64_t(sizeof(C)); i += 64) __builtin_prefetch((const char*)rows + i, 0, 3);
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

// M lanes from lane `lane` of the item, over the item's keys. `then`: the item that will come next, or null.
template <int M, class C>
void few_lanes(const Call& c, const Item& it, int64_t lane, const float* q, const Partial& r, const Item* then) {
    const int64_t dim = c.s.head_dim;
    alignas(64) float p[M * KEYS];
    float alpha[M];
    int64_t pos[M];
    for (int m = 0; m < M; m++) pos[m] = it.pos0 + (lane + m) / c.group;
    // Of caches with scales for every token.
    alignas(64) float scales[KEYS], offsets[KEYS];
    float q_sum[M] = {}, shift[M] = {};  // of the results, in every element
    if constexpr (PER_TOKEN<C>)
        for (int m = 0; m < M; m++) q_sum[m] = sum_of(q + m * dim, dim);
    KeyTile<C> tile, next;
    int64_t n = std::min<int64_t>(KEYS, it.key1 - it.key0);
    next.find(c, it, it.key0, n);
    for (int64_t t0 = it.key0; t0 < it.key1; t0 += KEYS) {
        n = std::min<int64_t>(KEYS, it.key1 - t0);
        tile = next;
        int64_t ahead = std::min<int64_t>(KEYS, it.key1 - t0 - KEYS);
        if (ahead > 0) {
            next.find(c, it, t0 + KEYS, ahead);
        } else if (then) {
            ahead = std::min<int64_t>(KEYS, then->key1 - then->key0);
            next.find(c, *then, then->key0, ahead);
        }
        for (int64_t t = 0; t < n; t += 4) {
            if (t < ahead) {
                prefetch_rows(next.k[t / 4], dim);
                if constexpr (PER_TOKEN<C>) next.prefetch_scales(c, t / 4);
            }
            dot4<M>(q, tile.k[t / 4], dim, p + t);
        }
        if constexpr (PER_TOKEN<C>) {
            tile.scales(c, 0, n, scales, offsets);
            for (int m = 0; m < M; m++)
                for (int64_t t = 0; t < n; t += W)
                    store(p + m * KEYS + t, load(p + m * KEYS + t) * load(scales + t) + q_sum[m] * load(offsets + t));
            tile.scales(c, 1, n, scales, offsets);
        }
        for (int m = 0; m < M; m++) {
            float* s = p + m * KEYS;
            if (c.s.softcap) cap_scores(s, n, c.s.softcap);
            const int64_t first = c.s.window ? std::max<int64_t>(0, pos[m] - c.s.window + 1 - t0) : 0;
            const int64_t last = std::min(n, pos[m] + 1 - t0);
            for (int64_t t = 0; t < std::min(first, n); t++) s[t] = -INFINITY;
            for (int64_t t = std::max<int64_t>(last, 0); t < (n + W - 1) / W * W; t++) s[t] = -INFINITY;
            vf top = splat(r.max[m]);
            for (int64_t t = 0; t < n; t += W) top = vmax(load(s + t), top);
            float most = top[0];
            for (int j = 1; j < W; j++) most = std::max(most, top[j]);
            vf sums = {}, shifts = {};
            for (int64_t t = 0; t < n; t += W) {
                vf e = exp2_of<vf, vi>(load(s + t) - most);
                sums += e;
                if constexpr (PER_TOKEN<C>) {
                    shifts += e * load(offsets + t);
                    e *= load(scales + t);
                }
                store(s + t, e);
            }
            alpha[m] = exp2_of<float, int32_t>(r.max[m] - most);
            if constexpr (PER_TOKEN<C>) shift[m] = shift[m] * alpha[m] + sum_of(shifts);
            r.sum[m] = r.sum[m] * alpha[m] + sum_of(sums);
            r.max[m] = most;
        }
        int64_t d = 0;
        for (; d + 4 * W <= dim; d += 4 * W) weigh<M, 4>(p, tile.v, n, dim, d, alpha, r.out, next.v, d ? 0 : ahead);
        for (; d + 2 * W <= dim; d += 2 * W) weigh<M, 2>(p, tile.v, n, dim, d, alpha, r.out, next.v, d ? 0 : ahead);
        for (; d < dim; d += W) weigh<M, 1>(p, tile.v, n, dim, d, alpha, r.out, next.v, d ? 0 : ahead);
    }
    if constexpr (PER_TOKEN<C>)
        for (int m = 0; m < M; m++)
            for (int64_t d = 0; d < dim; d += W) store(r.out + m * dim + d, load(r.out + m * dim + d) + shift[m]);
}

template <class C>
void few_lanes(const Call& c, const Item& it, int64_t lanes, const float* q, const Partial& r, const Item* then) {
    const int64_t dim = c.s.head_dim;
    for (int64_t lane = 0; lane < lanes;) {
        const float* ql = q + lane * dim;
        const Partial rl{r.max + lane, r.sum + lane, r.out + lane * dim};
        const Item* next = lanes - lane <= FEW ? then : nullptr;
        switch (std::min<int64_t>(FEW, lanes - lane)) {
            case 1: few_lanes<1, C>(c, it, lane, ql, rl, next), lane += 1; break;
            case 2: few_lanes<2, C>(c, it, lane, ql, rl, next), lane += 2; break;
            case 3: few_lanes<3, C>(c, it, lane, ql, rl, next), lane += 3; break;
            default: few_lanes<FEW, C>(c, it, lane, ql, rl, next), lane += FEW;
        }
    }
}

}  // namespace octavo
