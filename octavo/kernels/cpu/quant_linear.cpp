// Products with quantized matrices, computed in integers.
//
// Rows of x are quantized to 8 bits with a scale for every 32 columns; products of a block are summed as
// integers, exactly, and blocks in float32 in their order. A row's result depends on nothing but the row: one
// row, few and many go through the same arithmetic.
//
// Three forms of the dot product of bytes: AVX-512 VNNI and AVX-VNNI (unsigned by signed bytes into 32-bit
// sums: weights of 8 bits are shifted by 128), and AVX2, whose sums of two products are 16 bits wide: several
// weights of 4, 5 or 6 bits may be added up there before they are widened, and weights of 8 bits give
// their sign to x first.
#include <vector>

#include "gate.h"
#include "quant_rows.h"
#include "quant_tile.h"
#include "quant_wide.h"
#include "record.h"

#if OCTAVO_QUANT

using namespace octavo;

namespace {

constexpr int64_t CHUNK_ROWS = 96;     // rows of x of a piece of work
constexpr int MOST = 4;                // rows of a tile of few rows
constexpr int64_t ITEM_BYTES = 32768;  // of weights, likewise

// ----------------------------------------------------------------------------------------- products

struct Product {
    const QuantMatrix* matrix;
    const XBlock* x;
    const void* bias;  // null: none
    void* out;
    int64_t out_stride;
    int32_t gate;  // -1: none
};

// Numbers of a panel, W at a time; with AVX-512 but no VNNI a panel is half a vector.
template <class T>
inline vf load_lanes(const T* p) {
    if constexpr (W <= LANES) return load(p);
    T wide[W] = {};
    std::memcpy(wide, p, LANES * sizeof(T));
    return load(wide);
}
template <class T>
inline void store_lanes(T* p, vf v) {
    if constexpr (W <= LANES) return store(p, v);
    T wide[W];
    store(wide, v);
    std::memcpy(p, wide, LANES * sizeof(T));
}

template <class T>
inline void finish(const Product& p, const float* sums, int64_t row, int64_t column, int64_t lanes) {
    T* out = (T*)p.out + row * p.out_stride + column;
    const T* bias = p.bias ? (const T*)p.bias + column : nullptr;
    if (lanes == LANES && !bias) {
        for (int i = 0; i < LANES; i += W) store_lanes(out + i, load_lanes(sums + i));
        return;
    }
    for (int64_t i = 0; i < lanes; i++) put(out[i], bias ? sums[i] + to_float(bias[i]) : sums[i]);
}

// out[column..] = act(gate) * up of one panel, with the bias of both and rounded as the separate operations
// round.
template <class G, class T>
inline void finish_gated(const Product& p, const float* gate, const float* up, int64_t row, int64_t column,
                         int64_t half) {
    T* out = (T*)p.out + row * p.out_stride + column;
    const T* bias = (const T*)p.bias + column;
    for (int i = 0; i < LANES; i += W) {
        vf g = load_lanes(gate + i), u = load_lanes(up + i);
        if (p.bias) g += load_lanes(bias + i), u += load_lanes(bias + half + i);
        store_lanes(out + i, rounded_to<T>(gate_of<G>(rounded_to<T>(g))) * rounded_to<T>(u));
    }
}

// Panels of a part that are computed at once: neighbours, or a gate's and its partner.
struct Pair {
    int64_t panel;   // the first of them
    int64_t stride;  // bytes from it to the other
    int count;       // 1 where a part ends
};

// The result of a pair for one row of x from its sums.
template <class T>
inline void finish_pair(const Product& p, const QuantPart& part, const Pair& pair, const float* first,
                        const float* second, int64_t row) {
    const int64_t column = pair.panel * LANES, half = p.matrix->rows / 2;
    if (p.gate == SILU) return finish_gated<Silu, T>(p, first, second, row, column, half);
    if (p.gate >= 0) return finish_gated<GeluTanh, T>(p, first, second, row, column, half);
    for (int i = 0; i < pair.count; i++) {
        const int64_t at = column + i * LANES, lanes = std::min<int64_t>(LANES, part.rows - at);
        finish<T>(p, i ? second : first, row, part.target + at, lanes);
    }
}

template <class F, class T, int M, int P>
inline void few_rows(const Product& p, const QuantPart& part, const Pair& pair, int64_t row) {
    const int64_t blocks = p.matrix->blocks;
    const XBlock* x[M];
    for (int m = 0; m < M; m++) x[m] = p.x + (row + m) * blocks;
    alignas(64) float sums[P][M][LANES];
    tile<F, M, P>(part.data + pair.panel * blocks * F::bytes, pair.stride, part.zero, x, blocks, sums);
    for (int m = 0; m < M; m++) finish_pair<T>(p, part, pair, sums[0][m], sums[P - 1][m], row + m);
}

// few_rows for m rows, at most MOST.
template <class F, class T, int M = MOST>
inline void few_rows_of(int64_t m, const Product& p, const QuantPart& part, const Pair& pair, int64_t row) {
    if constexpr (M > 1)
        if (m < M) return few_rows_of<F, T, M - 1>(m, p, part, pair, row);
    if (pair.count == 2)
        few_rows<F, T, M, 2>(p, part, pair, row);
    else
        few_rows<F, T, M, 1>(p, part, pair, row);
}

#if OCTAVO_WIDE
template <class F, class T>
inline void many_rows(const Product& p, const QuantPart& part, const Pair& pair, int64_t first, int64_t last) {
    alignas(64) float sums[2][CHUNK_ROWS][LANES];
    const int64_t blocks = p.matrix->blocks;
    const uint8_t* w = part.data + pair.panel * blocks * F::bytes;
    sum_wide<F>(w, pair.count == 2 ? w + pair.stride : nullptr, part.zero, blocks, p.x + first * blocks, last - first,
                sums[0][0], sums[1][0]);
    for (int64_t r = first; r < last; r++)
        finish_pair<T>(p, part, pair, sums[0][r - first], sums[1][r - first], r);
}
#endif

// Pairs for rows first .. last of x.
template <class F, class T, class PairOf>
inline void rows_of_pairs(const Product& p, const QuantPart& part, const PairOf& pair_of, int64_t begin, int64_t end,
                          int64_t first, int64_t last) {
    const int64_t rows = last - first;
#if OCTAVO_WIDE
    if (rows >= WIDE_ROWS) {
        for (int64_t i = begin; i < end; i++) many_rows<F, T>(p, part, pair_of(i), first, last);
        return;
    }
#endif
    const int64_t tiles = (rows + MOST - 1) / MOST;  // of about equal size
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t r = rows * t / tiles, m = rows * (t + 1) / tiles - r;
        for (int64_t i = begin; i < end; i++) few_rows_of<F, T>(m, p, part, pair_of(i), first + r);
    }
}

template <class T>
void multiply(const Product& p, int64_t rows, int64_t threads) {
    for (int64_t i = 0; i < p.matrix->num_parts; i++) {
        const QuantPart& part = p.matrix->parts[i];
        with_format(part, [&](auto f) {
            using F = decltype(f);
            const bool gated = p.gate >= 0;
            const int64_t half = p.matrix->rows / 2, panels = panels_of(gated ? half : part.rows);
            const int64_t size = p.matrix->blocks * F::bytes, pairs = gated ? panels : (panels + 1) / 2;
            auto pair_of = [&](int64_t i) {
                if (gated) return Pair{i, half / LANES * size, 2};
                return Pair{2 * i, size, 2 * i + 1 < panels ? 2 : 1};
            };
            // A piece of the weights stays in the second-level cache while tiles of x pass it, each of which
            // stays in the first-level cache meanwhile; and it is large enough to pay for a turn.
            const int64_t at_once = std::max<int64_t>(1, ITEM_BYTES / (2 * size));
            const int64_t pieces = (pairs + at_once - 1) / at_once, chunks = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
            parallel_for(pieces * chunks, threads, [&](int64_t item) {
                const int64_t begin = item % pieces * at_once, chunk = item / pieces;
                rows_of_pairs<F, T>(p, part, pair_of, begin, std::min(pairs, begin + at_once), rows * chunk / chunks,
                                    rows * (chunk + 1) / chunks);
            });
        });
    }
}

}  // namespace

// out = x W^T + bias: x [rows, columns] with rows `x_stride` apart, bias [matrix rows] or null and out [rows,
// matrix rows], rows `out_stride` apart, all of one dtype. With a gate (a Gate of gate.h, else -1) out is
// gate(first half) * second half, half as wide, of a matrix of one part whose half is whole panels.
OCTAVO_API int32_t octavo_quant_linear(const QuantMatrix* matrix, const void* x, int64_t rows, int64_t x_stride,
                                       const void* bias, void* out, int64_t out_stride, int32_t gate, int32_t dtype,
                                       int64_t threads) {
    if (gate >= 0 && (matrix->num_parts != 1 || matrix->rows % (2 * LANES))) return -2;
    record_call([=] {
        return octavo_quant_linear(matrix, x, rows, x_stride, bias, out, out_stride, gate, dtype, threads);
    });
    static thread_local std::vector<XBlock> scratch;
    const bool known = with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        if (int64_t(scratch.size()) < rows * matrix->blocks) scratch.resize(size_t(rows * matrix->blocks));
        XBlock* blocks = scratch.data();
        parallel_rows(rows, matrix->columns, threads, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; r++)
                quantize_row((const T*)x + r * x_stride, matrix->columns, blocks + r * matrix->blocks);
        });
        multiply<T>(Product{matrix, blocks, bias, out, out_stride, gate}, rows, threads);
    });
    return known ? 0 : -1;
}

#endif
