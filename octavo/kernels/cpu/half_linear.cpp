// Products of float32 or bfloat16 rows with matrices of 16-bit floats; both are widened on the way.
//
// This also serves processors whose own bfloat16 products are no faster: Intel's cores since Golden Cove begin one
// vdpbf16ps in two cycles, but two float32 multiplications in each. Widening is exact; a result is rounded once.
//
// Columns are summed one after the other in runs of equal length, runs in their order: a row's result depends
// on nothing but the row, whether it comes alone or with others.
#include <atomic>
#include <memory>
#include <type_traits>

#include "gate.h"
#include "half.h"
#include "record.h"

#if OCTAVO_HALF

using namespace octavo;

namespace {

constexpr int64_t RUN = 256;           // columns of a run at most: its weights and its x stay in the nearest cache
constexpr int64_t CHUNK_ROWS = 96;     // rows of x of a piece of work
constexpr int64_t ITEM_BYTES = 65536;  // of weights, likewise
constexpr int64_t AHEAD = 1024;        // halves that are asked of memory before they are needed: 2 KiB
constexpr int MOST = W == 16 ? 12 : 6;  // rows of a tile: what the registers hold

// Adds a run of P panels, `stride` apart, times M rows to sums (`add`: else the run is the first):
// sums[p][m] at sums + (p * CHUNK_ROWS + m) * PANEL.
template <class H, int M, int P>
inline void tile(const uint16_t* w, int64_t stride, const float* x, int64_t x_stride, int64_t n, float* sums,
                 bool add) {
    vf acc[P][M][2];
    for (int p = 0; p < P; p++)
        for (int m = 0; m < M; m++) acc[p][m][0] = acc[p][m][1] = vf{};
    const float* rows[M];
    for (int m = 0; m < M; m++) rows[m] = x + m * x_stride;
#pragma GCC unroll 2
    for (int64_t k = 0; k < n; k++) {
        for (int p = 0; p < P; p++) {
            __builtin_prefetch(w + k * PANEL + p * stride + AHEAD);
            vf low, high;
            H::widen(w + k * PANEL + p * stride, low, high);
            for (int m = 0; m < M; m++) {
                const vf b = rows[m][k] - vf{};
                acc[p][m][0] += low * b;
                acc[p][m][1] += high * b;
            }
        }
    }
    for (int p = 0; p < P; p++)
        for (int m = 0; m < M; m++)
            for (int h = 0; h < 2; h++) {
                float* at = sums + (p * CHUNK_ROWS + m) * PANEL + h * W;
                store(at, add ? load(at) + acc[p][m][h] : acc[p][m][h]);
            }
}

// tile for one or two panels: at once while the registers hold both, so that few rows have sums enough in flight.
template <class H, int M>
inline void tile_rows(const uint16_t* w, int64_t stride, int panels, const float* x, int64_t x_stride, int64_t n,
                      float* sums, bool add) {
    if constexpr (M * 2 <= MOST) {
        if (panels == 2) return tile<H, M, 2>(w, stride, x, x_stride, n, sums, add);
        return tile<H, M, 1>(w, stride, x, x_stride, n, sums, add);
    } else {
        for (int p = 0; p < panels; p++)
            tile<H, M, 1>(w + p * stride, 0, x, x_stride, n, sums + p * CHUNK_ROWS * PANEL, add);
    }
}

// tile_rows for m rows, at most MOST.
template <class H, int M = MOST>
inline void tile_of(int64_t m, const uint16_t* w, int64_t stride, int panels, const float* x, int64_t x_stride,
                    int64_t n, float* sums, bool add) {
    if constexpr (M > 1)
        if (m < M) return tile_of<H, M - 1>(m, w, stride, panels, x, x_stride, n, sums, add);
    tile_rows<H, M>(w, stride, panels, x, x_stride, n, sums, add);
}

template <class T>
struct Product {
    const HalfMatrix* matrix;
    const T* x;
    int64_t x_stride;
    const T* bias;  // null: none
    T* out;
    int64_t out_stride;
    int32_t gate;    // -1: none
    uint64_t number;  // of the call

    // Rows first .. last of x in float32, and how far they are apart. Those that had to be widened are this
    // thread's until it asks for others.
    const float* widened(int64_t first, int64_t last, int64_t& stride) const;
};

template <>
const float* Product<float>::widened(int64_t first, int64_t, int64_t& stride) const {
    stride = x_stride;
    return x + first * x_stride;
}

template <>
const float* Product<bf16>::widened(int64_t first, int64_t last, int64_t& stride) const {
    struct Kept {
        std::unique_ptr<float[]> memory;
        int64_t size = 0, first = 0;
        uint64_t number = 0;
    };
    static thread_local Kept kept;
    const int64_t columns = matrix->columns;
    // An odd number of lines apart: rows that are a multiple of 4 KiB apart would share few places of the cache.
    stride = (columns + 15) / 16 * 16 + (columns + 15) / 16 % 2 * 16 + 16;
    if (kept.number == number && kept.first == first) return kept.memory.get();
    const int64_t size = (last - first) * stride;
    if (kept.size < size) kept.memory.reset(new float[size_t(size)]), kept.size = size;
    for (int64_t r = first; r < last; r++) {
        float* to = kept.memory.get() + (r - first) * stride;
        const bf16* from = x + r * x_stride;
#pragma omp simd
        for (int64_t k = 0; k < columns; k++) to[k] = to_float(from[k]);
    }
    kept.number = number, kept.first = first;
    return kept.memory.get();
}

// Sums of one or two panels, `stride` apart, for `rows` rows of x.
template <class H>
inline void sum_panels(const uint16_t* w, int64_t columns, int64_t stride, int panels, const float* x,
                       int64_t x_stride, int64_t rows, float* sums) {
    const int64_t runs = (columns + RUN - 1) / RUN, tiles = (rows + MOST - 1) / MOST;  // of about equal size
    for (int64_t run = 0; run < runs; run++) {
        const int64_t k = columns * run / runs, n = columns * (run + 1) / runs - k;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t r = rows * t / tiles, m = rows * (t + 1) / tiles - r;
            tile_of<H>(m, w + k * PANEL, stride, panels, x + r * x_stride + k, x_stride, n, sums + r * PANEL, run > 0);
        }
    }
}

template <class T>
inline void finish(const Product<T>& p, const float* sums, int64_t first, int64_t last, int64_t panel) {
    const int64_t column = panel * PANEL, lanes = std::min<int64_t>(PANEL, p.matrix->rows - column);
    alignas(64) float bias[PANEL] = {};
    for (int64_t i = 0; i < (p.bias ? lanes : 0); i++) bias[i] = to_float(p.bias[column + i]);
    for (int64_t r = first; r < last; r++, sums += PANEL) {
        T* out = p.out + r * p.out_stride + column;
#pragma omp simd
        for (int64_t i = 0; i < lanes; i++) put(out[i], sums[i] + bias[i]);
    }
}

// out = act(gate) * up of a panel and its partner.
template <class G, class T>
inline void finish_gated(const Product<T>& p, const float* sums, int64_t first, int64_t last, int64_t panel) {
    const int64_t column = panel * PANEL, half = p.matrix->rows / 2;
    alignas(64) float gate_bias[PANEL] = {}, up_bias[PANEL] = {};
    for (int i = 0; i < (p.bias ? PANEL : 0); i++) {
        gate_bias[i] = to_float(p.bias[column + i]);
        up_bias[i] = to_float(p.bias[half + column + i]);
    }
    for (int64_t r = first; r < last; r++, sums += PANEL) {
        T* out = p.out + r * p.out_stride + column;
        const float* up = sums + CHUNK_ROWS * PANEL;
#pragma omp simd
        for (int i = 0; i < PANEL; i++) put(out[i], gate_of<G>(sums[i] + gate_bias[i]) * (up[i] + up_bias[i]));
    }
}

template <class H, class T>
void multiply(const Product<T>& p, int64_t rows, int64_t threads) {
    const int64_t columns = p.matrix->columns, size = columns * PANEL;
    const bool gated = p.gate >= 0;
    const int64_t half = p.matrix->rows / 2, panels = half_panels(gated ? half : p.matrix->rows);
    // Panels go in pairs: neighbours, or a gate's and its partner.
    const int64_t pairs = gated ? panels : (panels + 1) / 2, stride = gated ? half / PANEL * size : size;
    const int64_t at_once = std::max<int64_t>(1, ITEM_BYTES / (4 * size));
    const int64_t pieces = (pairs + at_once - 1) / at_once, chunks = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
    parallel_for(pieces * chunks, threads, [&](int64_t item) {
        alignas(64) float sums[2 * CHUNK_ROWS * PANEL];
        const int64_t chunk = item / pieces, first = rows * chunk / chunks, last = rows * (chunk + 1) / chunks;
        const int64_t begin = item % pieces * at_once, end = std::min(pairs, begin + at_once);
        int64_t x_stride;
        const float* x = p.widened(first, last, x_stride);
        for (int64_t pair = begin; pair < end; pair++) {
            const int64_t panel = gated ? pair : 2 * pair;
            const int both = gated || panel + 1 < panels ? 2 : 1;
            sum_panels<H>(p.matrix->data + panel * size, columns, stride, both, x, x_stride, last - first, sums);
            if (p.gate == SILU) {
                finish_gated<Silu>(p, sums, first, last, panel);
            } else if (gated) {
                finish_gated<GeluTanh>(p, sums, first, last, panel);
            } else {
                for (int i = 0; i < both; i++) finish(p, sums + i * CHUNK_ROWS * PANEL, first, last, panel + i);
            }
        }
    });
}

}  // namespace

// out = x W^T + bias: x [rows, columns] with rows `x_stride` apart, bias [matrix rows] or null and out [rows,
// matrix rows], rows `out_stride` apart, all of one DType. With a gate (a Gate of gate.h, else -1) out is
// gate(first half) * second half, half as wide, of a matrix whose half is whole panels.
OCTAVO_API int32_t octavo_half_linear(const HalfMatrix* matrix, const void* x, int64_t rows, int64_t x_stride,
                                      const void* bias, void* out, int64_t out_stride, int32_t gate, int32_t dtype,
                                      int64_t threads) {
    static std::atomic<uint64_t> calls{0};
    if (gate >= 0 && matrix->rows % (2 * PANEL)) return -2;
    record_call(
        [=] { return octavo_half_linear(matrix, x, rows, x_stride, bias, out, out_stride, gate, dtype, threads); });
    const bool known = with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        const Product<T> product{matrix,     (const T*)x, x_stride, (const T*)bias, (T*)out,
                                 out_stride, gate,        ++calls};
        with_half(*matrix, [&](auto h) { multiply<decltype(h)>(product, rows, threads); });
    });
    return known ? 0 : -1;
}

#endif
