// Attention of many lanes, a chunk of a prompt: bound by arithmetic.
//
// Lanes lie along the vectors; scores and results are held transposed, so that neither K nor V has to be.
#pragma once

#include <cmath>

#include "attention_tile.h"

namespace octavo {

constexpr int NV = W == 16 ? 6 : 3;      // vectors of lanes in registers: 4 * NV accumulators
constexpr int PANEL = NV * W;            // lanes of one pass of the inner kernels
constexpr int MAX_LANES = W == 16 ? 192 : 96;  // lanes of a tile: its keys are widened once for all of them
static_assert(MAX_LANES % PANEL == 0, "tiles");

// Keys (or elements of values) of one pass, by the vectors of lanes: enough accumulators to hide an addition's
// latency, as many as registers hold.
template <int N>
constexpr int ACROSS = N == 1 ? 8 : N == 2 && W == 16 ? 8 : 4;

// scores[0..T)[lanes] = k[0..T) . q, q held as [dim, PANEL]
template <int N, int T>
inline void score_keys(const float* k, const float* q, int64_t dim, float* scores) {
    vf acc[T][N] = {};
    for (int64_t d = 0; d < dim; d++) {
        vf qv[N];
        for (int j = 0; j < N; j++) qv[j] = load(q + d * PANEL + j * W);
        for (int t = 0; t < T; t++)
            for (int j = 0; j < N; j++) acc[t][j] += qv[j] * k[t * dim + d];
    }
    for (int t = 0; t < T; t++)
        for (int j = 0; j < N; j++) store(scores + t * PANEL + j * W, acc[t][j]);
}

// out[d..d+D)[lanes] = alpha[lanes] * out + v[:, d..d+D)^T . p over n keys, p held as [KEYS, PANEL]
template <int N, int D>
inline void weigh_values(const float* p, const float* v, int64_t n, int64_t dim, const vf* alpha, float* out) {
    vf acc[D][N];
    for (int i = 0; i < D; i++)
        for (int j = 0; j < N; j++) acc[i][j] = load(out + i * PANEL + j * W) * alpha[j];
    for (int64_t t = 0; t < n; t++) {
        vf pv[N];
        for (int j = 0; j < N; j++) pv[j] = load(p + t * PANEL + j * W);
        for (int i = 0; i < D; i++)
            for (int j = 0; j < N; j++) acc[i][j] += pv[j] * v[t * dim + i];
    }
    for (int i = 0; i < D; i++)
        for (int j = 0; j < N; j++) store(out + i * PANEL + j * W, acc[i][j]);
}

// One tile of keys, k and v [KEYS, dim], for N vectors of lanes. max, sum: [PANEL]; out: [dim, PANEL]; pos: of the
// lanes. (Not inlined: once for all types of caches.)
template <bool CAP, int N>
__attribute__((noinline)) void many_lanes_tile(const float* k, const float* v, int64_t n, int64_t dim, const float* q,
                                               float* p, bool masked, const int32_t* pos, int64_t t0, int64_t window,
                                               float softcap, float* max, float* sum, float* out) {
    constexpr int A = ACROSS<N>;
    for (int64_t t = 0; t < n; t += A) score_keys<N, A>(k + t * dim, q, dim, p + t * PANEL);
    if constexpr (CAP)
        for (int64_t t = 0; t < n; t++) cap_scores(p + t * PANEL, N * W, softcap);
    vf alpha[N];
    for (int j = 0; j < N; j++) {
        const vf before = load(max + j * W);
        vf top = before;
        float* pj = p + j * W;
        if (masked) {
            vi at;
            std::memcpy(&at, pos + j * W, sizeof at);
            const vi from = window ? at - int32_t(window) : at * 0 - 1;  // keys in (from, at] are seen
            for (int64_t t = 0; t < n; t++) {
                const vi key = vi{} + int32_t(t0 + t);
                store(pj + t * PANEL, (key <= at) & (key > from) ? load(pj + t * PANEL) : splat(-INFINITY));
            }
        }
        vf tops[4] = {top, top, top, top};  // side by side: one after the other they'd wait for each other
        int64_t t = 0;
        for (; t + 4 <= n; t += 4)
            for (int i = 0; i < 4; i++) tops[i] = vmax(load(pj + (t + i) * PANEL), tops[i]);
        for (; t < n; t++) tops[0] = vmax(load(pj + t * PANEL), tops[0]);
        top = vmax(vmax(tops[0], tops[1]), vmax(tops[2], tops[3]));
        vf s = {};
        for (int64_t first = 0; first < std::min<int64_t>(n, W); first++) {  // in the order of few_lanes
            vf part = {};
            for (int64_t at = first; at < n; at += W) {
                const vf e = weight_of(load(pj + at * PANEL) - top);
                part += e;
                store(pj + at * PANEL, e);
            }
            s += part;
        }
        alpha[j] = weight_of(before - top);
        store(sum + j * W, load(sum + j * W) * alpha[j] + s);
        store(max + j * W, top);
    }
    int64_t d = 0;
    for (; d + A <= dim; d += A) weigh_values<N, A>(p, v + d, n, dim, alpha, out + d * PANEL);
    if (d < dim) weigh_values<N, 4>(p, v + d, n, dim, alpha, out + d * PANEL);
}

template <bool CAP, int N, class... Args>
inline void many_lanes_dispatch(int64_t vectors, const Args&... args) {
    if constexpr (N > 1) {
        if (vectors < N) return many_lanes_dispatch<CAP, N - 1>(vectors, args...);
    }
    many_lanes_tile<CAP, N>(args...);
}

// A tile is copied into a buffer as float32, keys, then values, [KEYS, dim] each, once for all lanes. (For float32
// too: scattered blocks of 4 kB compete for the same lines of the first-level cache.)
template <class C>
inline void as_float(const Call& c, const KeyTile<C>& tile, int64_t n, float* buffer) {
    const int64_t dim = c.s.head_dim, size = 4 * dim;  // a multiple of W
    if constexpr (!PER_TOKEN<C>) {
        for (int64_t g = 0; g < (n + 3) / 4; g++) {
            float *k = buffer + g * size, *v = k + KEYS * dim;
            for (int64_t i = 0; i < size; i += W) store(k + i, load(tile.k[g] + i));
            for (int64_t i = 0; i < size; i += W) store(v + i, load(tile.v[g] + i));
        }
    } else {
        alignas(64) float scales[KEYS], offsets[KEYS];
        for (int64_t part = 0; part < 2; part++) {
            tile.scales(c, part, n, scales, offsets);
            for (int64_t t = 0; t < n; t++) {
                const C* from = (part ? tile.v : tile.k)[t / 4] + t % 4 * dim;
                float* row = buffer + (part * KEYS + t) * dim;
#pragma omp simd
                for (int64_t d = 0; d < dim; d++) row[d] = to_float(from[d]) * scales[t] + offsets[t];
            }
        }
    }
}

// Joins what a piece of the context came to with the pieces before it, as `join` in attention.cpp does, and begins the
// next (or, `last`, leaves the total in its place).
inline void end_piece(int64_t panels, int64_t dim, const Partial& r, const Partial& total, bool first, bool last) {
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t l = panel * PANEL; l < (panel + 1) * PANEL; l += W) {
            const vf before = first ? splat(NOTHING) : load(total.max + l), top = vmax(load(r.max + l), before);
            const vf a = weight_of(before - top), b = weight_of(load(r.max + l) - top);
            auto add = [&](float* x, float* all) {
                vf old = first ? vf{} : load(all) * a;
                asm("" : "+m"(old));  // rounded: left to the compiler, either product may be the exact one
                const vf sum = old + load(x) * b;
                store(last ? x : all, sum);
                if (!last) store(x, vf{});
            };
            add(r.sum + l, total.sum + l);
            const int64_t at = panel * PANEL * dim + l % PANEL;
            for (int64_t d = 0; d < dim; d++) add(r.out + at + d * PANEL, total.out + at + d * PANEL);
            store((last ? r : total).max + l, top);
            if (!last) store(r.max + l, splat(NOTHING));
        }
}

// Floats of `rest` below.
inline int64_t many_lanes_scratch(int64_t dim) {
    return KEYS * PANEL + 2 * KEYS * dim + MAX_LANES * (dim + 2);
}

// All lanes of an item over its keys. q and out: [panels, dim, PANEL].
template <class C, bool CAP>
void many_lanes(const Call& c, const Item& it, int64_t lanes, const float* q, float* rest, const Partial& r) {
    const int64_t dim = c.s.head_dim, panels = (lanes + PANEL - 1) / PANEL;
    float *p = rest, *buffer = rest + KEYS * PANEL, *all = buffer + 2 * KEYS * dim;
    const Partial total{all, all + MAX_LANES, all + 2 * MAX_LANES};
    alignas(64) int32_t pos[MAX_LANES];
    for (int64_t l = 0; l < panels * PANEL; l++) pos[l] = it.pos0 + int32_t(std::min(l, lanes - 1) / c.group);
    int64_t n;
    for (int64_t t0 = first_tile(it); t0 < it.key1; t0 += n) {
        if (t0 % SPLIT == 0 && t0 > it.key0) end_piece(panels, dim, r, total, t0 - it.key0 <= SPLIT, false);
        n = tile_keys(it, t0);
        KeyTile<C> tile;
        tile.find(c, it, t0, n);
        as_float(c, tile, n, buffer);
        for (int64_t panel = 0; panel < panels; panel++) {
            const int64_t at = panel * PANEL, end = std::min<int64_t>(PANEL, lanes - at), vectors = (end + W - 1) / W;
            // What its last lane doesn't see no other does.
            const int64_t first = pos[at], last = pos[at + end - 1], seen = std::min(n, last + 1 - t0);
            if (seen <= 0) continue;
            const bool masked = t0 + seen - 1 > first || (c.s.window && t0 <= last - c.s.window);
            many_lanes_dispatch<CAP, NV>(vectors, (const float*)buffer, (const float*)buffer + KEYS * dim, seen, dim,
                                         q + at * dim, p, masked, (const int32_t*)pos + at, t0, c.s.window, c.s.softcap,
                                         r.max + at, r.sum + at, r.out + at * dim);
        }
    }
    if ((it.key1 - 1) / SPLIT > it.key0 / SPLIT) end_piece(panels, dim, r, total, false, true);
}

}  // namespace octavo
