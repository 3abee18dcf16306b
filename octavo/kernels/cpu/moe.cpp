// Products of few rows each with the matrices of several experts: every weight is read once, by one thread.
#include "common.h"
#include "record.h"

using namespace octavo;

namespace {

constexpr int64_t BLOCK = 32;  // outputs that a thread takes at a time

// One expert's pairs: `first .. last` of the sorted pairs.
struct Segment {
    int32_t expert, first, last;
};

inline float sum_of(vf v) {
    float s = 0;
    for (int i = 0; i < W; i++) s += v[i];
    return s;
}

// dots[r][c] = w[c] . x[r]: C rows of a matrix with R vectors. C * R sums stay in registers.
template <int R, int C, class T>
inline void dots_of(const T* w, const T* const* x, int64_t size, float (*dots)[C]) {
    vf sums[R][C] = {};
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        vf xs[R];
        for (int r = 0; r < R; r++) xs[r] = load(x[r] + i);
        for (int c = 0; c < C; c++) {
            vf ws = load(w + c * size + i);
            for (int r = 0; r < R; r++) sums[r][c] += ws * xs[r];
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            float s = sum_of(sums[r][c]);
            for (int64_t j = i; j < size; j++) s += to_float(w[c * size + j]) * to_float(x[r][j]);
            dots[r][c] = s;
        }
}

struct Product {
    const void* x;
    const void* w;
    const int32_t* rows;
    const int32_t* targets;
    const float* scales;
    void* out;
    int64_t x_stride, n, size;
};

// Outputs `from .. to` of R pairs from the sorted pair `at` on.
template <int R, class T, class Out>
inline void tile(const Product& p, const T* w, int64_t at, int64_t from, int64_t to) {
    constexpr int C = R == 1 ? 8 : 4;
    const T* x[R];
    Out* out[R];
    float scale[R];
    for (int r = 0; r < R; r++) {
        x[r] = (const T*)p.x + p.rows[at + r] * p.x_stride;
        out[r] = (Out*)p.out + p.targets[at + r] * p.n;
        scale[r] = p.scales ? p.scales[p.targets[at + r]] : 1.0f;
    }
    int64_t j = from;
    for (; j + C <= to; j += C) {
        float dots[R][C];
        dots_of<R, C>(w + j * p.size, x, p.size, dots);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) put(out[r][j + c], dots[r][c] * scale[r]);
    }
    for (; j < to; j++) {
        float dots[R][1];
        dots_of<R, 1>(w + j * p.size, x, p.size, dots);
        for (int r = 0; r < R; r++) put(out[r][j], dots[r][0] * scale[r]);
    }
}

template <class T, class Out>
inline void block_of(const Product& p, const Segment& s, int64_t from, int64_t to) {
    const T* w = (const T*)p.w + s.expert * p.n * p.size;
    // A handful of outputs at a time, so that their weights stay in the nearest cache for all pairs.
    for (int64_t j = from; j < to; j += 8) {
        const int64_t end = std::min(j + 8, to);
        int64_t at = s.first;
        for (; at + 3 <= s.last; at += 3) tile<3, T, Out>(p, w, at, j, end);
        if (s.last - at == 2) tile<2, T, Out>(p, w, at, j, end);
        if (s.last - at == 1) tile<1, T, Out>(p, w, at, j, end);
    }
}

}  // namespace

// out[targets[i]] = scales[targets[i]] * w[expert] x[rows[i]] for each sorted pair i of each segment.
// w: contiguous [experts, n, size]; x: rows `x_stride` apart; out: contiguous [pairs, n], of x's type or float32;
// scales: null for 1.
OCTAVO_API int32_t octavo_grouped_linear(const void* x, int64_t x_stride, const void* w, const int32_t* rows,
                                         const int32_t* targets, const void* segments, int64_t num_segments,
                                         const float* scales, void* out, int64_t n, int64_t size, int32_t dtype,
                                         int32_t out_dtype, int64_t threads) {
    refuse_recording();  // its pairs of rows and experts are the step's
    const Product p{x, w, rows, targets, scales, out, x_stride, n, size};
    if (out_dtype != dtype && out_dtype != FLOAT32) return -2;
    const bool known = with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        const int64_t blocks = (n + BLOCK - 1) / BLOCK;
        parallel_for(num_segments * blocks, threads, [&](int64_t item) {
            const Segment& s = ((const Segment*)segments)[item / blocks];
            const int64_t from = item % blocks * BLOCK, to = std::min(n, from + BLOCK);
            if (out_dtype == FLOAT32)
                block_of<T, float>(p, s, from, to);
            else
                block_of<T, T>(p, s, from, to);
        });
    });
    return known ? 0 : -1;
}
