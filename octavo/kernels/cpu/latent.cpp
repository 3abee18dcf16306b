// Latent attention (MLA, arXiv 2405.04434): writing the paged cache of latent vectors, and absorbed
// attention over it, which is multi-query attention whose value is the first `rank` elements of its key.
//
// The cache of a layer is [num_blocks, 1, 1, block_size, rank + rope], contiguous.
//
// A vector serves all heads of a row, so attention is bound by arithmetic even when a row decodes alone
// (2 (2 rank + rope) operations per vector and head). One unit of work is a tile of "lanes"
// (pairs of a request's row and a head, a row's heads together) and a range of keys. Lanes lie along the
// machine's vectors: queries and results are held transposed, so that keys are read as they lie.
// Softmax is taken online in base 2.
//
// A request of few rows has its context cut in pieces of SPLIT keys, at fixed places: a single long
// request uses all threads, and its result depends neither on their number nor on other requests.
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "attention.h"
#include "common.h"
#include "record.h"

using namespace octavo;

namespace {

constexpr int NV = W == 16 ? 6 : 3;  // vectors of lanes in registers: 4 * NV accumulators
constexpr int PANEL = NV * W;        // lanes of one pass of the inner kernels
constexpr int MAX_LANES = 4 * PANEL > 96 ? 96 : 4 * PANEL;  // lanes of a tile
constexpr int KEYS = 64;             // keys of a tile
constexpr int FEW_ROWS = 8;          // of a request, up to which its context is cut in pieces
constexpr int SPLIT = 512;           // keys of a piece of context, a multiple of KEYS
constexpr float NOTHING = -1e30f;    // running maximum before the first key: finite, so that the
                                     // difference to a masked score (-inf) is not NaN
static_assert(MAX_LANES % PANEL == 0 && SPLIT % KEYS == 0, "tiles");

}  // namespace

// One layer's constants, as latent.py fills them. block_size is a multiple of 4, rank of 4, rope even.
struct LatentShape {
    int64_t heads, rank, rope, block_size;
    float scale;
    int32_t dtype, cache_dtype;
};

namespace {

struct Item {
    int32_t request;
    int32_t lane0, lanes;    // of the request's rows * heads
    int32_t row0, pos0;      // the request's first row in the step, and its position in the context
    int32_t key0, key1;      // keys to visit; key0 is a multiple of KEYS
    int32_t piece, pieces;   // of the context
    int32_t counter;         // which countdown the pieces share
    int64_t partial;         // first float of the piece's partial result
};

struct Call {
    LatentShape s;
    AttentionBatch b;
    const char* q;
    const char* cache;
    char* out;
    float* partials;
    std::atomic<int32_t>* counters;
};

// Running softmax of lanes, and their unnormalised results.
struct Partial {
    float *max, *sum, *out;  // [lanes], [lanes], [lanes, rank]
};

// A tile of keys is held as [dim / 4, KEYS, 4]: both products below read it from front to back.

// scores[t..t+4)[lanes] = k[t..t+4) . q, q held as [dim, N * W], scores as [KEYS, N * W]
template <int N>
inline void scores4(const float* k, const float* q, int64_t t, int64_t dim, float* scores) {
    vf acc[4][N] = {};
    for (int64_t d = 0; d < dim; d += 4) {
        const float* kd = k + d * KEYS + t * 4;
        for (int i = 0; i < 4; i++) {
            vf qv[N];
            for (int j = 0; j < N; j++) qv[j] = load(q + ((d + i) * N + j) * W);
            for (int key = 0; key < 4; key++)
                for (int j = 0; j < N; j++) acc[key][j] += qv[j] * kd[key * 4 + i];
        }
    }
    for (int key = 0; key < 4; key++)
        for (int j = 0; j < N; j++) store(scores + ((t + key) * N + j) * W, acc[key][j]);
}

// out[d..d+4)[lanes] = alpha[lanes] * out + k[:, d..d+4)^T . p over n keys, p held as [KEYS, N * W]
template <int N>
inline void weigh4(const float* p, const float* k, int64_t n, int64_t d, const vf* alpha, float* out) {
    vf acc[4][N];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < N; j++) acc[i][j] = load(out + ((d + i) * N + j) * W) * alpha[j];
    const float* kd = k + d * KEYS;
    for (int64_t t = 0; t < n; t++) {
        vf pv[N];
        for (int j = 0; j < N; j++) pv[j] = load(p + (t * N + j) * W);
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < N; j++) acc[i][j] += pv[j] * kd[t * 4 + i];
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < N; j++) store(out + ((d + i) * N + j) * W, acc[i][j]);
}

// One tile of n keys from position t0 on, for N vectors of lanes at positions pos.
template <int N>
void attend_tile(const float* k, int64_t n, int64_t t0, int64_t dim, int64_t rank, bool masked, const int32_t* pos,
                 const float* q, float* p, float* max, float* sum, float* out) {
    for (int64_t t = 0; t < n; t += 4) scores4<N>(k, q, t, dim, p);
    vf alpha[N];
    for (int j = 0; j < N; j++) {
        const vf before = load(max + j * W);
        float* pj = p + j * W;
        if (masked) {
            vi at;
            std::memcpy(&at, pos + j * W, sizeof at);
            for (int64_t t = 0; t < n; t++)
                store(pj + t * N * W, vi{} + int32_t(t0 + t) <= at ? load(pj + t * N * W) : splat(-INFINITY));
        }
        vf top = before, s = {};
        for (int64_t t = 0; t < n; t++) top = vmax(load(pj + t * N * W), top);
        for (int64_t t = 0; t < n; t++) {
            const vf e = exp2_of<vf, vi>(load(pj + t * N * W) - top);
            s += e;
            store(pj + t * N * W, e);
        }
        alpha[j] = exp2_of<vf, vi>(before - top);
        store(sum + j * W, load(sum + j * W) * alpha[j] + s);
        store(max + j * W, top);
    }
    for (int64_t d = 0; d < rank; d += 4) weigh4<N>(p, k, n, d, alpha, out);
}

template <int N, class... Args>
inline void attend_vectors(int64_t vectors, const Args&... args) {
    if constexpr (N > 1) {
        if (vectors < N) return attend_vectors<N - 1>(vectors, args...);
    }
    attend_tile<N>(args...);
}

// Scratch of a thread, in floats: queries [panels, dim, lanes], results [panels, rank, lanes], scores, keys.
inline float* scratch(int64_t dim) {
    static thread_local std::unique_ptr<float[]> memory;
    static thread_local int64_t size = 0;
    const int64_t need = 2 * MAX_LANES * dim + KEYS * PANEL + KEYS * dim + 64;
    if (size < need) memory.reset(new float[need]), size = need;
    return (float*)((uintptr_t(memory.get()) + 63) / 64 * 64);
}

// Copies keys t0 .. t0 + n into a tile, as float32. Keys up to the next multiple of 4, and elements up to
// the next multiple of 4, are zeros: what the cache holds after the last key may be a NaN.
template <class C>
void copy_keys(const Call& c, const Item& it, int64_t t0, int64_t n, float* tile) {
    const int64_t dim = c.s.rank + c.s.rope, whole = dim / 4 * 4;
    const int32_t* table = c.b.block_table + it.request * c.b.table_stride;
    for (int64_t t = 0; t < (n + 3) / 4 * 4; t++) {
        float* to = tile + t * 4;
        const int64_t block = t < n ? table[(t0 + t) / c.s.block_size] : 0;
        const C* from = (const C*)c.cache + (block * c.s.block_size + (t0 + t) % c.s.block_size) * dim;
        const bool real = t < n;
        for (int64_t d = 0; d < whole; d += 4)
            for (int i = 0; i < 4; i++) to[d * KEYS + i] = real ? to_float(from[d + i]) : 0.0f;
        for (int64_t i = 0; whole + i < (dim + 3) / 4 * 4; i++)
            to[whole * KEYS + i] = real && whole + i < dim ? to_float(from[whole + i]) : 0.0f;
    }
}

inline void finish_lane(const Call& c, const Item& it, int64_t lane, const float* out, int64_t stride, float sum) {
    const float norm = 1.0f / sum;
    const int64_t at = (it.row0 * c.s.heads + it.lane0 + lane) * c.s.rank;
    if (c.s.dtype == FLOAT32)
        for (int64_t d = 0; d < c.s.rank; d++) ((float*)c.out)[at + d] = out[d * stride] * norm;
    else
        for (int64_t d = 0; d < c.s.rank; d++) put(((bf16*)c.out)[at + d], out[d * stride] * norm);
}

inline Partial partial_of(const Call& c, const Item& it, int64_t piece) {
    float* p = c.partials + it.partial + (piece - it.piece) * it.lanes * (c.s.rank + 2);
    return {p, p + it.lanes, p + 2 * it.lanes};
}

// Joins the pieces of a context, in order; done by whichever thread finishes the last of them.
void join(const Call& c, const Item& it) {
    const int64_t rank = c.s.rank;
    float* out = scratch(rank);
    for (int64_t lane = 0; lane < it.lanes; lane++) {
        float max = NOTHING, sum = 0;
        for (int64_t i = 0; i < it.pieces; i++) max = std::max(max, partial_of(c, it, i).max[lane]);
        std::fill(out, out + rank, 0.0f);
        for (int64_t i = 0; i < it.pieces; i++) {
            const Partial part = partial_of(c, it, i);
            const float alpha = exp2_of<float, int32_t>(part.max[lane] - max);
            sum += part.sum[lane] * alpha;
#pragma omp simd
            for (int64_t d = 0; d < rank; d++) out[d] += part.out[lane * rank + d] * alpha;
        }
        finish_lane(c, it, lane, out, 1, sum);
    }
}

template <class T, class C>
void work(const Call& c, const Item& it) {
    const int64_t rank = c.s.rank, dim = rank + c.s.rope, dim4 = (dim + 3) / 4 * 4;
    const int64_t lanes = it.lanes, vectors = (lanes + W - 1) / W;
    float* q = scratch(dim4);
    float *out = q + MAX_LANES * dim4, *p = out + MAX_LANES * dim, *buffer = p + KEYS * PANEL;
    alignas(64) float max[MAX_LANES], sum[MAX_LANES];
    alignas(64) int32_t pos[MAX_LANES];
    // Panels of NV vectors, the last of what remains; element d of a lane lies at first + d * stride.
    auto stride_of = [&](int64_t lane) { return std::min<int64_t>(NV, vectors - lane / PANEL * NV) * W; };
    auto place = [&](int64_t lane, int64_t size) { return lane / PANEL * PANEL * size + lane % PANEL; };
    const float scale = c.s.scale * LOG2_E;
    for (int64_t l = 0; l < vectors * W; l++) {
        const int64_t from = std::min(l, lanes - 1), stride = stride_of(l);  // spare lanes repeat the last
        const T* row = (const T*)c.q + (it.row0 * c.s.heads + it.lane0 + from) * dim;
        float* to = q + place(l, dim4);
        for (int64_t d = 0; d < dim4; d++) to[d * stride] = d < dim ? to_float(row[d]) * scale : 0.0f;
        pos[l] = it.pos0 + int32_t((it.lane0 + from) / c.s.heads);
        max[l] = NOTHING, sum[l] = 0.0f;
    }
    std::fill(out, out + vectors * W * rank, 0.0f);
    for (int64_t t0 = it.key0; t0 < it.key1; t0 += KEYS) {
        const int64_t n = std::min<int64_t>(KEYS, it.key1 - t0), padded = (n + 3) / 4 * 4;
        copy_keys<C>(c, it, t0, n, buffer);
        const bool masked = t0 + padded - 1 > pos[0];
        for (int64_t at = 0; at < vectors * W; at += PANEL)
            attend_vectors<NV>(stride_of(at) / W, (const float*)buffer, padded, t0, dim4, rank, masked, pos + at,
                               (const float*)q + at * dim4, p, max + at, sum + at, out + at * rank);
    }
    if (it.pieces == 1) {
        for (int64_t l = 0; l < lanes; l++) finish_lane(c, it, l, out + place(l, rank), stride_of(l), sum[l]);
        return;
    }
    const Partial part = partial_of(c, it, it.piece);
    std::copy(max, max + lanes, part.max);
    std::copy(sum, sum + lanes, part.sum);
    for (int64_t l = 0; l < lanes; l++)
        for (int64_t d = 0; d < rank; d++) part.out[l * rank + d] = out[place(l, rank) + d * stride_of(l)];
    if (c.counters[it.counter].fetch_sub(1, std::memory_order_acq_rel) == 1) join(c, it);
}

struct Plan {
    std::vector<Item> items;
    std::vector<int32_t> pieces_of;
    std::vector<std::atomic<int32_t>> counters;
    std::vector<float> partials;

    // Cuts the batch into items, the later rows of a prompt first (they see more keys).
    void make(const LatentShape& s, const AttentionBatch& b) {
        items.clear(), pieces_of.clear();
        int64_t floats = 0;
        for (int64_t r = 0; r < b.requests; r++) {
            const int64_t start = b.query_start[r], rows = b.query_start[r + 1] - start, pos0 = b.seq_lens[r] - rows;
            const int64_t all = rows * s.heads;
            for (int64_t tile = (all + MAX_LANES - 1) / MAX_LANES - 1; tile >= 0; tile--) {
                const int64_t lane0 = tile * MAX_LANES, lanes = std::min<int64_t>(MAX_LANES, all - lane0);
                const int64_t keys = pos0 + (lane0 + lanes - 1) / s.heads + 1;  // that the tile's last row sees
                const int64_t pieces = rows > FEW_ROWS ? 1 : (keys + SPLIT - 1) / SPLIT;
                for (int64_t i = 0; i < pieces; i++) {
                    items.push_back({int32_t(r), int32_t(lane0), int32_t(lanes), int32_t(start), int32_t(pos0),
                                     int32_t(i * SPLIT), int32_t(i == pieces - 1 ? keys : (i + 1) * SPLIT), int32_t(i),
                                     int32_t(pieces), int32_t(pieces_of.size()), floats});
                    if (pieces > 1) floats += lanes * (s.rank + 2);
                }
                if (pieces > 1) pieces_of.push_back(int32_t(pieces));
            }
        }
        if (counters.size() < pieces_of.size()) counters = std::vector<std::atomic<int32_t>>(pieces_of.size() * 2);
        for (size_t i = 0; i < pieces_of.size(); i++) counters[i].store(pieces_of[i], std::memory_order_relaxed);
        if (int64_t(partials.size()) < floats) partials.resize(size_t(floats * 2));
    }
};

}  // namespace

// q: [rows, heads, rank + rope] and out: [rows, heads, rank], contiguous. Every request's rows are written,
// rows past query_start[requests] are left alone.
OCTAVO_API int32_t octavo_latent_attention(const LatentShape* shape, const AttentionBatch* batch, const void* q,
                                           const void* cache, void* out) {
    if (shape->rank % 4 || shape->block_size % 4) return -2;
    record_call([shape = *shape, batch = *batch, q, cache, out] {
        return octavo_latent_attention(&shape, &batch, q, cache, out);
    });
    static thread_local Plan plan;
    plan.make(*shape, *batch);
    const Call call{*shape, *batch, (const char*)q, (const char*)cache, (char*)out, plan.partials.data(),
                    plan.counters.data()};
    const Item* items = plan.items.data();
    bool known = true;
    known &= with_dtype(shape->dtype, [&](auto t) {
        known &= with_dtype(shape->cache_dtype, [&](auto c) {
            parallel_for(int64_t(plan.items.size()), batch->threads,
                         [&](int64_t i) { work<decltype(t), decltype(c)>(call, items[i]); });
        });
    });
    return known ? 0 : -1;
}

// Rotates queries from q_pe to q_out (rows of heads *_head apart), "neox" pairing; normalizes, rotates and
// stores the rows of kv, [rows, rank + rope], at their slots (negative: not stored).
OCTAVO_API int32_t octavo_latent_write(const LatentShape* shape, const void* q_pe, int64_t q_row, int64_t q_head,
                                       void* q_out, int64_t out_row, int64_t out_head, const void* kv, int64_t kv_row,
                                       const void* weight, float eps, const float* cos_sin, const int64_t* positions,
                                       void* cache, const int64_t* slots, int64_t rows, int32_t threads) {
    const LatentShape s = *shape;
    record_call([=] {
        return octavo_latent_write(&s, q_pe, q_row, q_head, q_out, out_row, out_head, kv, kv_row, weight, eps, cos_sin,
                                   positions, cache, slots, rows, threads);
    });
    const int64_t half = s.rope / 2, dim = s.rank + s.rope;
    bool known = true;
    known &= with_dtype(s.dtype, [&](auto t) {
        using T = decltype(t);
        known &= with_dtype(s.cache_dtype, [&](auto c) {
            using C = decltype(c);
            parallel_rows(rows, s.heads * s.rope + 2 * dim, threads, [&](int64_t first, int64_t last) {
                for (int64_t r = first; r < last; r++) {
                    const float *cos = cos_sin + positions[r] * s.rope, *sin = cos + half;
                    for (int64_t h = 0; h < s.heads; h++) {
                        const T* x = (const T*)q_pe + r * q_row + h * q_head;
                        T* to = (T*)q_out + r * out_row + h * out_head;
#pragma omp simd
                        for (int64_t i = 0; i < half; i++) {
                            const float a = to_float(x[i]), b = to_float(x[half + i]);
                            put(to[i], a * cos[i] - b * sin[i]);
                            put(to[half + i], b * cos[i] + a * sin[i]);
                        }
                    }
                    if (slots[r] < 0) continue;
                    const T *x = (const T*)kv + r * kv_row, *w = (const T*)weight;
                    C* to = (C*)cache + slots[r] * dim;
                    float square = 0;
#pragma omp simd reduction(+ : square)
                    for (int64_t i = 0; i < s.rank; i++) square += to_float(x[i]) * to_float(x[i]);
                    const float norm = 1.0f / std::sqrt(square / float(s.rank) + eps);
                    // Rounded to the model's dtype where an unfused norm and rotation round.
#pragma omp simd
                    for (int64_t i = 0; i < s.rank; i++)
                        put(to[i], rounded_to<T>(to_float(w[i]) * rounded_to<T>(to_float(x[i]) * norm)));
                    x += s.rank, to += s.rank;
#pragma omp simd
                    for (int64_t i = 0; i < half; i++) {
                        const float a = to_float(x[i]), b = to_float(x[half + i]);
                        put(to[i], rounded_to<T>(a * cos[i] - b * sin[i]));
                        put(to[half + i], rounded_to<T>(b * cos[i] + a * sin[i]));
                    }
                }
            });
        });
    });
    return known ? 0 : -1;
}
