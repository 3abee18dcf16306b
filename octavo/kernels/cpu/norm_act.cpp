// RMSNorm and LayerNorm, alone and after a residual addition; gated activations; softcap.
//
// Results are rounded to the tensors' type where PyTorch's operations round (the row normed by RMSNorm
// before a weight of its type, the residual sum, the activation), all else is float32.
#include <cmath>
#include <type_traits>

#include "gate.h"
#include "record.h"

using namespace octavo;

namespace {

template <class T>
inline float sum_of_squares(const T* x, int64_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += to_float(x[i]) * to_float(x[i]);
    return sum;
}

// A weight of another type than the row's (float32, for a bfloat16 row) meets the row before it is rounded.
template <class T, class S>
inline void rms_row(const T* x, const S* weight, T* out, int64_t n, float eps) {
    const float r = 1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + eps);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float normed = to_float(x[i]) * r;
        if constexpr (std::is_same<T, S>::value) normed = rounded_to<T>(normed);
        put(out[i], normed * to_float(weight[i]));
    }
}

template <class T, class S>
inline void layer_row(const T* x, const S* weight, const S* bias, T* out, int64_t n, float eps) {
    float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += to_float(x[i]);
    const float mean = sum / float(n);
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < n; i++) squares += (to_float(x[i]) - mean) * (to_float(x[i]) - mean);
    const float r = 1.0f / std::sqrt(squares / float(n) + eps);
    if (bias) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) put(out[i], (to_float(x[i]) - mean) * r * to_float(weight[i]) + to_float(bias[i]));
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) put(out[i], (to_float(x[i]) - mean) * r * to_float(weight[i]));
    }
}

// sum += x
template <class T>
inline void add_row(const T* x, T* sum, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) put(sum[i], to_float(x[i]) + to_float(sum[i]));
}

// with_dtype for rows of one type and weights of the same or of float32: f(T{}, S{}).
template <class F>
inline bool with_dtypes(int32_t dtype, int32_t weight_dtype, const F& f) {
    bool known = false;
    with_dtype(dtype, [&](auto t) {
        if (weight_dtype == dtype)
            f(t, t), known = true;
        else if (weight_dtype == FLOAT32)
            f(t, float{}), known = true;
    });
    return known;
}

template <class G, class T>
inline void gate_row(const T* gate, const T* up, T* out, int64_t from, int64_t to) {
#pragma omp simd
    for (int64_t i = from; i < to; i++) {
        put(out[i], rounded_to<T>(gate_of<G>(to_float(gate[i]))) * to_float(up[i]));
    }
}

// Rows in pieces of columns: body(row, from, to). Few rows are cut too: a wide MLP's single row is worth
// two threads.
template <class Body>
inline void parallel_pieces(int64_t rows, int64_t n, int64_t cost, int64_t threads, const Body& body) {
    const int64_t pieces = rows >= threads ? 1 : std::min<int64_t>(threads, std::max<int64_t>(1, n / 1024));
    parallel_rows(rows * pieces, cost * n / pieces, threads, [&](int64_t first, int64_t last) {
        for (int64_t piece = first; piece < last; piece++) {
            const int64_t p = piece % pieces;
            body(piece / pieces, n * p / pieces, n * (p + 1) / pieces);
        }
    });
}

}  // namespace

// x: `rows` rows of `heads` vectors of n elements, vectors contiguous, rows `x_stride` apart.
// out: contiguous; may be x itself only if x is contiguous. weight: of x's type or float32.
OCTAVO_API int32_t octavo_rms_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t heads,
                                   int64_t n, int64_t x_stride, float eps, int32_t dtype, int32_t weight_dtype,
                                   int32_t threads) {
    record_call([=] {
        return octavo_rms_norm(x, weight, out, rows, heads, n, x_stride, eps, dtype, weight_dtype, threads);
    });
    bool known = with_dtypes(dtype, weight_dtype, [&](auto t, auto s) {
        using T = decltype(t);
        using S = decltype(s);
        parallel_rows(rows, heads * n, threads, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; r++)
                for (int64_t h = 0; h < heads; h++)
                    rms_row((const T*)x + r * x_stride + h * n, (const S*)weight, (T*)out + (r * heads + h) * n, n, eps);
        });
    });
    return known ? 0 : -1;
}

// residual += x, in place; out = rms_norm(residual). residual and out are contiguous.
OCTAVO_API int32_t octavo_add_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows,
                                       int64_t n, int64_t x_stride, float eps, int32_t dtype, int32_t weight_dtype,
                                       int32_t threads) {
    record_call([=] {
        return octavo_add_rms_norm(x, residual, weight, out, rows, n, x_stride, eps, dtype, weight_dtype, threads);
    });
    bool known = with_dtypes(dtype, weight_dtype, [&](auto t, auto s) {
        using T = decltype(t);
        using S = decltype(s);
        parallel_rows(rows, 2 * n, threads, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; r++) {
                T* sum = (T*)residual + r * n;
                add_row((const T*)x + r * x_stride, sum, n);
                rms_row(sum, (const S*)weight, (T*)out + r * n, n, eps);
            }
        });
    });
    return known ? 0 : -1;
}

// out = layer_norm(x) of `rows` rows `x_stride` apart; with a residual (contiguous), residual += x first and
// out = layer_norm(residual). bias: of the weight's type, or null.
OCTAVO_API int32_t octavo_layer_norm(const void* x, void* residual, const void* weight, const void* bias, void* out,
                                     int64_t rows, int64_t n, int64_t x_stride, float eps, int32_t dtype,
                                     int32_t weight_dtype, int32_t threads) {
    record_call([=] {
        return octavo_layer_norm(x, residual, weight, bias, out, rows, n, x_stride, eps, dtype, weight_dtype, threads);
    });
    bool known = with_dtypes(dtype, weight_dtype, [&](auto t, auto s) {
        using T = decltype(t);
        using S = decltype(s);
        parallel_rows(rows, 2 * n, threads, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; r++) {
                const T* row = (const T*)x + r * x_stride;
                if (residual) {
                    T* sum = (T*)residual + r * n;
                    add_row(row, sum, n);
                    row = sum;
                }
                layer_row(row, (const S*)weight, (const S*)bias, (T*)out + r * n, n, eps);
            }
        });
    });
    return known ? 0 : -1;
}

// out[r, i] = act(x[r, i]) * x[r, n + i]; out is contiguous.
OCTAVO_API int32_t octavo_gated_activation(const void* x, void* out, int64_t rows, int64_t n, int64_t x_stride,
                                           int32_t gate, int32_t dtype, int32_t threads) {
    record_call([=] { return octavo_gated_activation(x, out, rows, n, x_stride, gate, dtype, threads); });
    if (gate != SILU && gate != GELU_TANH) return -2;
    bool known = with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        parallel_pieces(rows, n, 4, threads, [&](int64_t r, int64_t from, int64_t to) {
            const T* row = (const T*)x + r * x_stride;
            if (gate == SILU)
                gate_row<Silu>(row, row + n, (T*)out + r * n, from, to);
            else
                gate_row<GeluTanh>(row, row + n, (T*)out + r * n, from, to);
        });
    });
    return known ? 0 : -1;
}

// x = cap * tanh(x / cap), in place; rows `x_stride` apart.
OCTAVO_API int32_t octavo_softcap(void* x, int64_t rows, int64_t n, int64_t x_stride, float cap, int32_t dtype,
                                  int32_t threads) {
    record_call([=] { return octavo_softcap(x, rows, n, x_stride, cap, dtype, threads); });
    const float inverse = 1.0f / cap;
    bool known = with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        parallel_pieces(rows, n, 4, threads, [&](int64_t r, int64_t from, int64_t to) {
            T* row = (T*)x + r * x_stride;
#pragma omp simd
            for (int64_t i = from; i < to; i++) put(row[i], cap * tanh_of<float, int32_t>(to_float(row[i]) * inverse));
        });
    });
    return known ? 0 : -1;
}
