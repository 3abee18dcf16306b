// RMSNorm, RMSNorm after a residual addition, and SwiGLU's activation.
//
// Results are rounded to the tensors' type where PyTorch's operations round (the normed row before
// the weight, the residual sum, the activation), all else is float32.
#include <cmath>

#include "common.h"

using namespace octavo;

namespace {

template <class T>
inline float sum_of_squares(const T* x, int64_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += to_float(x[i]) * to_float(x[i]);
    return sum;
}

template <class T>
inline void scale_row(const T* x, const T* weight, T* out, int64_t n, float eps) {
    const float r = 1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + eps);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) put(out[i], rounded_to<T>(to_float(x[i]) * r) * to_float(weight[i]));
}

}  // namespace

// x: `rows` rows of `heads` vectors of n elements, vectors contiguous, rows `x_stride` apart.
// out: contiguous; may be x itself only if x is contiguous.
OCTAVO_API int32_t octavo_rms_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t heads,
                                   int64_t n, int64_t x_stride, float eps, int32_t dtype, int32_t threads) {
    bool known = with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        parallel_rows(rows, heads * n, threads, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; r++)
                for (int64_t h = 0; h < heads; h++)
                    scale_row((const T*)x + r * x_stride + h * n, (const T*)weight,
                              (T*)out + (r * heads + h) * n, n, eps);
        });
    });
    return known ? 0 : -1;
}

// residual += x, in place; out = rms_norm(residual). residual and out are contiguous.
OCTAVO_API int32_t octavo_add_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows,
                                       int64_t n, int64_t x_stride, float eps, int32_t dtype, int32_t threads) {
    bool known = with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        parallel_rows(rows, 2 * n, threads, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; r++) {
                const T* a = (const T*)x + r * x_stride;
                T* sum = (T*)residual + r * n;
#pragma omp simd
                for (int64_t i = 0; i < n; i++) put(sum[i], to_float(a[i]) + to_float(sum[i]));
                scale_row(sum, (const T*)weight, (T*)out + r * n, n, eps);
            }
        });
    });
    return known ? 0 : -1;
}

// out[r, i] = silu(x[r, i]) * x[r, n + i]; out is contiguous.
OCTAVO_API int32_t octavo_silu_and_mul(const void* x, void* out, int64_t rows, int64_t n, int64_t x_stride,
                                       int32_t dtype, int32_t threads) {
    // Few rows are cut into pieces too: a wide MLP's single row is worth two threads.
    const int64_t pieces = rows >= threads ? 1 : std::min<int64_t>(threads, std::max<int64_t>(1, n / 1024));
    bool known = with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        parallel_rows(rows * pieces, 4 * n / pieces, threads, [&](int64_t first, int64_t last) {
            for (int64_t piece = first; piece < last; piece++) {
                const int64_t r = piece / pieces, p = piece % pieces;
                const T* gate = (const T*)x + r * x_stride;
                T* o = (T*)out + r * n;
#pragma omp simd
                for (int64_t i = n * p / pieces; i < n * (p + 1) / pieces; i++) {
                    float g = to_float(gate[i]);
                    // Below -87 exp(-g) would leave float32's range; silu is 0 there to within 1e-35.
                    float e = exp2_of<float, int32_t>((g < -87.0f ? 87.0f : -g) * LOG2_E);
                    put(o[i], rounded_to<T>(g / (1.0f + e)) * to_float(gate[n + i]));
                }
            }
        });
    });
    return known ? 0 : -1;
}
