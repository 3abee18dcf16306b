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
constexpr int64_t AHEAD = 2048;        // halves that are asked of memory before they are needed: 4 KiB
constexpr int64_t APART = RUN + 16;    // floats from row to row of a run of x: an odd number of lines of the cache, so
                                       // that rows compete for no place, and constant, so that all share one address
constexpr int MOST = W == 16 ? 12 : 6;  // rows of a tile: what the registers hold

// Adds a run of P panels, `stride` apart, times M rows, APART apart, to sums (`add`: else the run is the first):
// sums[p][m] at sums + (p * CHUNK_ROWS + m) * PANEL.
template <class H, int M, int P>
inline void tile(const uint16_t* w, int64_t stride, const float* x, int64_t n, float* sums, bool add) {
    vf acc[P][M][2];
    for (int p = 0; p < P; p++)
        for (int m = 0; m < M; m++) acc[p][m][0] = acc[p][m][1] = vf{};
#pragma GCC unroll 2
    for (int64_t k = 0; k < n; k++) {
        for (int p = 0; p < P; p++) {
            __builtin_prefetch(w + k * PANEL + p * stride + AHEAD);
            vf low, high;
            H::widen(w + k * PANEL + p * stride, low, high);
            for (int m = 0; m < M; m++) {
                const vf b = x[m * APART + k] - vf{};
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

// tile for m rows, at most M.
template <class H, int P, int M>
inline void tile_of(int64_t m, const uint16_t* w, int64_t stride, const float* x, int64_t n, float* sums, bool add) {
    if constexpr (M > 1)
        if (m < M) return tile_of<H, P, M - 1>(m, w, stride, x, n, sums, add);
    tile<H, M, P>(w, stride, x, n, sums, add);
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
};

// A matrix' columns in runs of about equal length.
inline int64_t runs_of(int64_t columns) { return (columns + RUN - 1) / RUN; }
inline int64_t run_start(int64_t columns, int64_t run) { return columns * run / runs_of(columns); }

// Rows first .. last of x in float32, run by run: row r of a run lies APART r behind its first. They are this
// thread's until it asks for others.
template <class T>
const float* widened(const Product<T>& p, int64_t first, int64_t last) {
    struct Kept {
        std::unique_ptr<float[]> memory;
        int64_t size = 0, first = 0;
        uint64_t number = 0;
    };
    static thread_local Kept kept;
    if (kept.number == p.number && kept.first == first) return kept.memory.get();
    const int64_t columns = p.matrix->columns, rows = last - first, size = rows * runs_of(columns) * APART;
    if (kept.size < size) kept.memory.reset(new float[size_t(size)]), kept.size = size;
    float* to = kept.memory.get();
    for (int64_t run = 0; run < runs_of(columns); run++) {
        const int64_t k = run_start(columns, run), n = run_start(columns, run + 1) - k;
        for (int64_t r = first; r < last; r++, to += APART) {
            const T* from = p.x + r * p.x_stride + k;
#pragma omp simd
            for (int64_t i = 0; i < n; i++) to[i] = to_float(from[i]);
        }
    }
    kept.number = p.number, kept.first = first;
    return kept.memory.get();
}

// Sums of P panels, `stride` apart, for rows of x that are `widened`.
template <class H, int P>
inline void sum_panels(const uint16_t* w, int64_t columns, int64_t stride, const float* x, int64_t rows, float* sums) {
    const int64_t tiles = (rows + MOST - 1) / MOST;  // of about equal size
    for (int64_t run = 0; run < runs_of(columns); run++, x += rows * APART) {
        const int64_t k = run_start(columns, run), n = run_start(columns, run + 1) - k;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t r = rows * t / tiles, m = rows * (t + 1) / tiles - r;
            tile_of<H, P, MOST / P>(m, w + k * PANEL, stride, x + r * APART, n, sums + r * PANEL, run > 0);
        }
    }
}

// Two panels at once while the registers hold both, so that few rows have sums enough in flight; else one after the
// other, each from front to back.
template <class H>
inline void sum_panels(const uint16_t* w, int64_t columns, int64_t stride, int panels, const float* x, int64_t rows,
                       float* sums) {
    if (panels == 2 && 2 * rows <= MOST) return sum_panels<H, 2>(w, columns, stride, x, rows, sums);
    for (int p = 0; p < panels; p++)
        sum_panels<H, 1>(w + p * stride, columns, 0, x, rows, sums + p * CHUNK_ROWS * PANEL);
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
    // Panels go in pairs: neighbours, or a gate's and its partner. Few go one by one, for equal shares.
    const int unit = gated || panels >= 16 * threads ? 2 : 1;
    const int64_t pairs = gated ? panels : (panels + unit - 1) / unit, stride = gated ? half / PANEL * size : size;
    const int64_t at_once = std::max<int64_t>(1, ITEM_BYTES / (2 * unit * size));
    const int64_t pieces = (pairs + at_once - 1) / at_once, chunks = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
    parallel_for(pieces * chunks, threads, [&](int64_t item) {
        alignas(64) float sums[2 * CHUNK_ROWS * PANEL];
        const int64_t chunk = item / pieces, first = rows * chunk / chunks, last = rows * (chunk + 1) / chunks;
        const int64_t begin = item % pieces * at_once, end = std::min(pairs, begin + at_once);
        const float* x = widened(p, first, last);
        for (int64_t pair = begin; pair < end; pair++) {
            const int64_t panel = gated ? pair : unit * pair;
            const int both = gated || panel + unit <= panels ? unit : 1;
            sum_panels<H>(p.matrix->data + panel * size, columns, stride, both, x, last - first, sums);
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
