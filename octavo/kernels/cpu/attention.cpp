// Paged attention of a ragged batch: causal, grouped queries, optional sliding window and softcap.
//
// One unit of work is a tile of a request's rows, one KV head, and a range of keys; all query heads
// of the KV head go together, so every key and value is loaded once for all of them ("lanes" below
// are the (row, head) pairs of a tile). Softmax is taken online, tile of keys by tile of keys
// (Milakov and Gimelshein 2018; Dao et al. 2022), in base 2. Two kernels:
//
// - few_lanes (a decode step): bound by memory. Keys lie along the vectors.
// - many_lanes (a chunk of a prompt): bound by arithmetic. Lanes lie along the vectors.
//
// A context is cut in pieces of SPLIT keys, at fixed places, whose results are joined in order; those of a request
// whose rows fit one tile are items of their own, so that a single long request uses all threads. Both kernels do the
// same additions in the same order: a row's result depends neither on the number of threads, nor on the other requests
// of the batch, nor on the rows of its own beside it.
//
// Keys and values of 8 bits are widened as they are read (a prompt's tile once for all its lanes). A scale that
// all of a head's share goes into the queries and into the results; those of single tokens go into scores and
// weights, and so do offsets: q . (c s + o) = (q . c) s + sum(q) o.
//
// Under a sliding window no key before the block of a tile's first visible key is read: those blocks
// may belong to another request by now.
#include <cmath>
#include <memory>
#include <vector>

#include "attention_few.h"
#include "attention_many.h"
#include "record.h"

using namespace octavo;

namespace {

// Scratch of a thread, in floats.
inline float* scratch(int64_t need) {
    static thread_local std::unique_ptr<float[]> memory;
    static thread_local int64_t size = 0;
    if (size < need + 16) memory.reset(new float[need + 16]), size = need + 16;
    return (float*)((uintptr_t(memory.get()) + 63) / 64 * 64);
}

// ------------------------------------------------------------------------------------ work and ends

// What all of a head's keys (part 0) or values (part 1) are to be multiplied by.
template <class C>
inline float head_scale(const Call& c, const Item& it, int64_t part) {
    constexpr bool per_head = std::is_same_v<C, e4m3> || std::is_same_v<C, e5m2>;
    return per_head ? UNIT<C> * c.kv_scale[part * c.s.kv_heads + it.head] : 1.0f;
}

// Where a lane's query and its result begin, in elements.
inline int64_t lane_at(const Call& c, const Item& it, int64_t lane, int64_t stride) {
    return (it.row0 + lane / c.group) * stride + (it.head * c.group + lane % c.group) * c.s.head_dim;
}

// Calls f with a lane's query, or result, as what it is.
template <class F>
inline void with_row(const Call& c, const char* rows, int64_t at, const F& f) {
    if (c.s.dtype == FLOAT32)
        f((float*)rows + at);
    else
        f((bf16*)rows + at);
}

// Writes a lane's result times `norm`, that of few lanes in the order of C, to the output.
template <class C>
inline void finish_lane(const Call& c, const Item& it, int64_t lane, const float* out, bool few, float norm) {
    const int64_t dim = c.s.head_dim;
    with_row(c, c.out, lane_at(c, it, lane, c.out_stride), [&](auto* to) {
        if (few) return take_from_order<C>(out, dim, norm, to);
        for (int64_t d = 0; d < dim; d++) put(to[d], out[d * PANEL] * norm);
    });
}

inline Partial partial_of(const Call& c, const Item& it, int64_t lanes, int64_t piece) {
    float* p = c.partials + it.partial + (piece - it.piece) * lanes * (c.s.head_dim + 2);
    return {p, p + lanes, p + 2 * lanes};
}

// Joins the pieces of a context, in order; done by whichever thread finishes the last of them.
template <class C>
void join(const Call& c, const Item& it, int64_t lanes, bool few, float scale) {
    const int64_t dim = c.s.head_dim;
    float* out = scratch(dim);
    for (int64_t lane = 0; lane < lanes; lane++) {
        float max = NOTHING, sum = 0;
        std::fill(out, out + dim, 0.0f);
        for (int64_t i = 0; i < it.pieces; i++) {
            const Partial part = partial_of(c, it, lanes, i);
            const float top = std::max(max, part.max[lane]);
            const float a = weight_of(splat(max - top))[0], b = weight_of(splat(part.max[lane] - top))[0];
            max = top, sum *= a;
            for (int64_t d = 0; d < dim; d++) out[d] *= a;
            asm("" : "+m"(sum) : : "memory");  // these products are rounded, those below may not be
            sum += part.sum[lane] * b;
            for (int64_t d = 0; d < dim; d++) out[d] += part.out[lane * dim + d] * b;
        }
        with_row(c, c.out, lane_at(c, it, lane, c.out_stride), [&](auto* to) {
            few ? take_from_order<C>(out, dim, scale / sum, to) : take_from_order<float>(out, dim, scale / sum, to);
        });
    }
}

template <class C>
void work(const Call& c, const Item& it, const Item* then) {
    const int64_t dim = c.s.head_dim, lanes = it.rows * c.group;
    const bool few = lanes <= FEW_LANES && dim % W == 0;
    const float scale = (c.s.softcap ? c.s.scale / c.s.softcap : c.s.scale * LOG2_E) * head_scale<C>(c, it, 0);
    const float v_scale = head_scale<C>(c, it, 1);
    float* q = scratch(2 * MAX_LANES * dim + many_lanes_scratch(dim));
    float *out = q + MAX_LANES * dim, *rest = out + MAX_LANES * dim;
    alignas(64) float max[MAX_LANES], sum[MAX_LANES];
    // Where lane l begins; its elements lie side by side (few) or PANEL apart.
    auto place = [&](int64_t l) { return few ? l * dim : l / PANEL * PANEL * dim + l % PANEL; };
    const int64_t apart = few ? 1 : PANEL;
    const int64_t padded = few ? lanes : (lanes + PANEL - 1) / PANEL * PANEL;
    if (padded > lanes) std::fill(q + (padded - PANEL) * dim, q + padded * dim, 0.0f);
    for (int64_t l = 0; l < lanes; l++) {
        float* to = q + place(l);
        with_row(c, c.q, lane_at(c, it, l, c.q_stride), [&](auto* from) {
            for (int64_t d = 0; d < dim; d++) to[d * apart] = to_float(from[d]) * scale;
        });
    }
    std::fill(out, out + padded * dim, 0.0f);
    std::fill(max, max + padded, NOTHING);
    std::fill(sum, sum + padded, 0.0f);

    if (few)
        few_lanes<C>(c, it, lanes, q, (uint32_t*)rest, Partial{max, sum, out}, then);
    else if (c.s.softcap)
        many_lanes<C, true>(c, it, lanes, q, rest, Partial{max, sum, out});
    else
        many_lanes<C, false>(c, it, lanes, q, rest, Partial{max, sum, out});

    if (it.pieces == 1) {
        for (int64_t l = 0; l < lanes; l++) finish_lane<C>(c, it, l, out + place(l), few, v_scale / sum[l]);
        return;
    }
    const Partial part = partial_of(c, it, lanes, it.piece);
    std::copy(max, max + lanes, part.max);
    std::copy(sum, sum + lanes, part.sum);
    for (int64_t l = 0; l < lanes; l++)
        for (int64_t d = 0; d < dim; d++) part.out[l * dim + d] = out[place(l) + d * apart];
    if (c.counters[it.counter].fetch_sub(1, std::memory_order_acq_rel) == 1) join<C>(c, it, lanes, few, v_scale);
}

struct Plan {
    std::vector<Item> items;
    std::vector<std::atomic<int32_t>> counters;
    std::vector<float> partials;
};

// Cuts the batch into items, the later rows of a prompt first (they see more keys).
void plan_items(const Call& c, Plan& plan, std::vector<int32_t>& pieces_of) {
    plan.items.clear();
    pieces_of.clear();
    int64_t floats = 0;
    const int64_t tile_rows = std::max<int64_t>(1, MAX_LANES / c.group);
    for (int64_t r = 0; r < c.b.requests; r++) {
        const int64_t start = c.b.query_start[r], rows = c.b.query_start[r + 1] - start, context = c.b.seq_lens[r];
        for (int64_t tile = (rows + tile_rows - 1) / tile_rows - 1; tile >= 0; tile--) {
            const int64_t row0 = tile * tile_rows, n = std::min(tile_rows, rows - row0), pos0 = context - rows + row0;
            const int64_t key1 = pos0 + n;
            const int64_t key0 = c.s.window ? std::max<int64_t>(0, pos0 - c.s.window + 1) / 4 * 4 : 0;
            const bool whole = rows > tile_rows && n * c.group > FEW_LANES;  // many_lanes joins pieces itself
            const int64_t first = key0 / SPLIT, pieces = whole ? 1 : (key1 + SPLIT - 1) / SPLIT - first;
            for (int32_t head = 0; head < c.s.kv_heads; head++) {
                for (int64_t i = 0; i < pieces; i++) {
                    Item it{int32_t(r), head, int32_t(start + row0), int32_t(n), int32_t(pos0), 0, 0,
                            int32_t(i), int32_t(pieces), int32_t(pieces_of.size()), floats};
                    it.key0 = int32_t(i == 0 ? key0 : (first + i) * SPLIT);
                    it.key1 = int32_t(i == pieces - 1 ? key1 : (first + i + 1) * SPLIT);
                    plan.items.push_back(it);
                    if (pieces > 1) floats += n * c.group * (c.s.head_dim + 2);
                }
                if (pieces > 1) pieces_of.push_back(int32_t(pieces));
            }
        }
    }
    if (plan.counters.size() < pieces_of.size()) plan.counters = std::vector<std::atomic<int32_t>>(pieces_of.size() * 2);
    for (size_t i = 0; i < pieces_of.size(); i++) plan.counters[i].store(pieces_of[i], std::memory_order_relaxed);
    if (int64_t(plan.partials.size()) < floats) plan.partials.resize(size_t(floats * 2));
}

}  // namespace

// q, out: rows of heads, heads contiguous, rows *_stride apart. Every request's rows are written,
// rows past query_start[requests] are left alone. kv_scale: of FP8 caches, else null.
OCTAVO_API int32_t octavo_paged_attention(const AttentionShape* shape, const AttentionBatch* batch, const void* q,
                                          int64_t q_stride, const void* cache, const float* kv_scale, void* out,
                                          int64_t out_stride) {
    const int64_t group = shape->heads / shape->kv_heads;
    if (group > MAX_LANES || shape->head_dim % 4 || shape->block_size % 4) return -2;
    record_call([shape = *shape, batch = *batch, q, q_stride, cache, kv_scale, out, out_stride] {
        return octavo_paged_attention(&shape, &batch, q, q_stride, cache, kv_scale, out, out_stride);
    });
    static thread_local Plan plan;
    static thread_local std::vector<int32_t> pieces_of;
    Call call{*shape,   *batch,     group,      (const char*)q, q_stride, (const char*)cache,
              kv_scale, (char*)out, out_stride, nullptr,        nullptr};
    plan_items(call, plan, pieces_of);
    call.partials = plan.partials.data();
    call.counters = plan.counters.data();
    const Item* items = plan.items.data();
    // Of many items a thread takes some in a row, and asks memory for the next one's beginning.
    const int64_t n = int64_t(plan.items.size()), shares = std::min(n, 16 * batch->threads);
    bool known = with_cache_type(shape->cache_type, [&](auto t) {
        parallel_for(shares, batch->threads, [&](int64_t share) {
            const int64_t end = n * (share + 1) / shares;
            for (int64_t i = n * share / shares; i < end; i++)
                work<decltype(t)>(call, items[i], i + 1 < end ? items + i + 1 : nullptr);
        });
    });
    return known ? 0 : -1;
}
