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
#include <type_traits>
#include <vector>

#include "gate.h"
#include "quant.h"
#include "record.h"

#if OCTAVO_QUANT

using namespace octavo;

namespace {

constexpr int64_t CHUNK_ROWS = 64;     // rows of x of a piece of work
constexpr int MOST = 4;                // rows of a tile
constexpr int64_t ITEM_BYTES = 32768;  // of weights, likewise

// 32 columns of a row of x.
struct alignas(64) XBlock {
    int8_t q[BLOCK];
    float scale;
    float sums[3];     // scale times those below
    int32_t isums[3];  // of columns 0-15, 16-31, and all
};
static_assert(sizeof(XBlock) == 64, "a line of the cache");

// ------------------------------------------------------------------------------------- instructions

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define OCTAVO_VNNI 1
typedef __m512i iv;
typedef __m512 fv;
inline iv load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline iv all(int32_t x) { return _mm512_set1_epi32(x); }
inline iv all_bytes(char x) { return _mm512_set1_epi8(x); }
inline iv both(iv a, iv b) { return _mm512_and_si512(a, b); }
inline iv either(iv a, iv b) { return _mm512_or_si512(a, b); }
inline iv differ(iv a, iv b) { return _mm512_xor_si512(a, b); }
inline iv add(iv a, iv b) { return _mm512_add_epi32(a, b); }
template <int N>
inline iv shift(iv a) {  // right by N, left by -N
    return N > 0 ? _mm512_srli_epi16(a, N > 0 ? N : 0) : N < 0 ? _mm512_slli_epi16(a, N < 0 ? -N : 0) : a;
}
inline iv dot(iv sum, iv w, iv x) { return _mm512_dpbusd_epi32(sum, w, x); }
inline fv floats(iv a) { return _mm512_cvtepi32_ps(a); }
inline fv halves(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline fv spread(float x) { return _mm512_set1_ps(x); }
inline fv fma(fv a, fv b, fv c) { return _mm512_fmadd_ps(a, b, c); }
inline fv times(fv a, fv b) { return _mm512_mul_ps(a, b); }
inline fv no_floats() { return _mm512_setzero_ps(); }
inline void put_floats(float* p, fv a) { _mm512_storeu_ps(p, a); }
#else
typedef __m256i iv;
typedef __m256 fv;
inline iv load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline iv all(int32_t x) { return _mm256_set1_epi32(x); }
inline iv all_bytes(char x) { return _mm256_set1_epi8(x); }
inline iv both(iv a, iv b) { return _mm256_and_si256(a, b); }
inline iv either(iv a, iv b) { return _mm256_or_si256(a, b); }
inline iv differ(iv a, iv b) { return _mm256_xor_si256(a, b); }
inline iv add(iv a, iv b) { return _mm256_add_epi32(a, b); }
template <int N>
inline iv shift(iv a) {
    return N > 0 ? _mm256_srli_epi16(a, N > 0 ? N : 0) : N < 0 ? _mm256_slli_epi16(a, N < 0 ? -N : 0) : a;
}
inline fv floats(iv a) { return _mm256_cvtepi32_ps(a); }
inline fv halves(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline fv spread(float x) { return _mm256_set1_ps(x); }
inline fv fma(fv a, fv b, fv c) { return _mm256_fmadd_ps(a, b, c); }
inline fv times(fv a, fv b) { return _mm256_mul_ps(a, b); }
inline fv no_floats() { return _mm256_setzero_ps(); }
inline void put_floats(float* p, fv a) { _mm256_storeu_ps(p, a); }
#if defined(__AVXVNNI__)
#define OCTAVO_VNNI 1
inline iv dot(iv sum, iv w, iv x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#elif defined(OCTAVO_IMITATE_VNNI)  // for tests on a machine without: the same sums, slowly
#define OCTAVO_VNNI 1
inline iv dot(iv sum, iv w, iv x) {
    const iv low = _mm256_madd_epi16(both(w, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    return add(sum, add(low, _mm256_madd_epi16(shift<8>(w), _mm256_srai_epi16(x, 8))));
}
#else
#define OCTAVO_VNNI 0
#endif
#endif

inline iv quad_of(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return all(x);
}

// ------------------------------------------------------------------------------------ x to 8 bits

// A row's block: q = round(x * 127 / largest), ties to even. NaN and infinity make the scale a NaN.
template <class T>
inline void quantize_block(const T* x, int64_t n, XBlock& out) {
    alignas(64) float wide[BLOCK] = {};
    alignas(64) int32_t ints[BLOCK];
#pragma omp simd
    for (int64_t i = 0; i < n; i++) wide[i] = to_float(x[i]);
    int32_t top = 0;  // of the magnitudes' bits, which are ordered as they are, with NaN above infinity
#pragma omp simd reduction(max : top)
    for (int i = 0; i < BLOCK; i++) top = std::max(top, bits_as<int32_t>(wide[i]) & 0x7fffffff);
    const float most = bits_as<float>(top);
    const bool finite = top < 0x7f800000, tiny = most < 1e-30f;
    const float inverse = !finite || tiny ? 0.0f : 127.0f / most;
    out.scale = !finite ? bits_as<float>(0x7fc00000) : tiny ? 0.0f : most / 127.0f;
    int32_t first = 0, second = 0;
#pragma omp simd
    for (int i = 0; i < BLOCK; i++)
        ints[i] = finite ? int32_t(__builtin_rintf(wide[i] * inverse)) : 0;
#pragma omp simd reduction(+ : first, second)
    for (int i = 0; i < BLOCK / 2; i++) first += ints[i], second += ints[i + BLOCK / 2];
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) out.q[i] = int8_t(ints[i]);
    out.isums[0] = first, out.isums[1] = second, out.isums[2] = first + second;
    for (int i = 0; i < 3; i++) out.sums[i] = out.scale * float(out.isums[i]);
}

template <class T>
inline void quantize_row(const T* x, int64_t columns, XBlock* out) {
    for (int64_t at = 0; at < columns; at += BLOCK) quantize_block(x + at, std::min<int64_t>(BLOCK, columns - at), *out++);
}

// ------------------------------------------------------------------------------------------- tiles

// Quad J of a block: unsigned bytes (signed for 8 bits).
template <class F, int J>
inline iv weights(const uint8_t* block, iv low) {
    if constexpr (F::bits == 8) return load_bytes(block + J * VECTOR);
    const iv v = load_bytes(block + J % 4 * VECTOR);
    const iv nibbles = both(J < 4 ? v : shift<4>(v), low);
    if constexpr (F::bits == 5)
        return either(nibbles, both(shift<J - 4>(load_bytes(block + 4 * VECTOR)), all_bytes(16)));
    if constexpr (F::bits == 6)
        return either(nibbles, both(shift<2 * (J % 4) - 4>(load_bytes(block + (4 + J / 4) * VECTOR)), all_bytes(48)));
    return nibbles;
}

// Sums of products of one group of a block, for P panels and M rows: the integers that scale times x's scale
// multiplies. `block`: of the first panel, the others `size` bytes apart.
template <class F, int M, int P>
struct GroupSums {
    iv sums[P][M];

    // Products of two bytes that fit 16 bits: pairs of 127 * 15 (or 31, or 63) added up so often.
    static constexpr int SAFE = F::bits == 4 ? 8 : F::bits == 5 ? 4 : F::bits == 6 ? 2 : 1;

    inline void start(const XBlock* const* x, int64_t b, int g, int32_t zero) {
        for (int m = 0; m < M; m++) {
            iv first = all(0);
            if (F::bits == 8) {
                if (OCTAVO_VNNI) first = all(-128 * x[m][b].isums[2]);
            } else if (!F::minimum) {
                first = all(-zero * x[m][b].isums[F::groups == 1 ? 2 : g]);
            }
            for (int p = 0; p < P; p++) sums[p][m] = first;
        }
    }

#if OCTAVO_VNNI
    template <int J, int END>
    inline void quads(const uint8_t* block, int64_t size, const XBlock* const* x, int64_t b, iv low) {
        if constexpr (J < END) {
            iv w[P];
            for (int p = 0; p < P; p++) {
                w[p] = weights<F, J>(block + p * size, low);
                if (F::bits == 8) w[p] = differ(w[p], all_bytes(-128));
            }
            for (int m = 0; m < M; m++) {
                const iv quad = quad_of(x[m][b].q + 4 * J);
                for (int p = 0; p < P; p++) sums[p][m] = dot(sums[p][m], w[p], quad);
            }
            quads<J + 1, END>(block, size, x, b, low);
        }
    }
#else
    template <int J, int END>
    inline void quads(const uint8_t* block, int64_t size, const XBlock* const* x, int64_t b, iv low) {
        if constexpr (J < END) {
            constexpr int STOP = J + SAFE < END ? J + SAFE : END;
            const iv ones = _mm256_set1_epi16(1);
            if constexpr (F::bits == 8) {
                iv w[P], magnitude[P];
                for (int p = 0; p < P; p++) {
                    w[p] = weights<F, J>(block + p * size, low);
                    magnitude[p] = _mm256_abs_epi8(w[p]);
                }
                for (int m = 0; m < M; m++) {
                    const iv quad = quad_of(x[m][b].q + 4 * J);
                    for (int p = 0; p < P; p++) {
                        const iv two = _mm256_maddubs_epi16(magnitude[p], _mm256_sign_epi8(quad, w[p]));
                        sums[p][m] = add(sums[p][m], _mm256_madd_epi16(two, ones));
                    }
                }
            } else {
                iv narrow[P][M];
                pairs<J, J, STOP>(block, size, x, b, low, narrow);
                for (int p = 0; p < P; p++)
                    for (int m = 0; m < M; m++)
                        sums[p][m] = add(sums[p][m], _mm256_madd_epi16(narrow[p][m], ones));
            }
            quads<STOP, END>(block, size, x, b, low);
        }
    }

    template <int FIRST, int J, int STOP>
    inline void pairs(const uint8_t* block, int64_t size, const XBlock* const* x, int64_t b, iv low,
                      iv (*narrow)[M]) {
        if constexpr (J < STOP) {
            iv w[P];
            for (int p = 0; p < P; p++) w[p] = weights<F, J>(block + p * size, low);
            for (int m = 0; m < M; m++) {
                const iv quad = quad_of(x[m][b].q + 4 * J);
                for (int p = 0; p < P; p++) {
                    const iv two = _mm256_maddubs_epi16(w[p], quad);
                    narrow[p][m] = J == FIRST ? two : _mm256_add_epi16(narrow[p][m], two);
                }
            }
            pairs<FIRST, J + 1, STOP>(block, size, x, b, low, narrow);
        }
    }
#endif
};

// out[p][m][lane] = row `lane` of panel p times row m of x: P panels `size` bytes apart, M rows.
template <class F, int M, int P>
inline void tile(const uint8_t* w, int64_t size, int32_t zero, const XBlock* const* x, int64_t blocks,
                 float (*out)[M][LANES]) {
    fv acc[P][M];
    for (int p = 0; p < P; p++)
        for (int m = 0; m < M; m++) acc[p][m] = no_floats();
    const iv low = all_bytes(15);
    for (int64_t b = 0; b < blocks; b++, w += F::bytes) {
        auto group = [&](auto which) {
            constexpr int G = decltype(which)::value, AT = F::groups == 1 ? 2 : G;
            GroupSums<F, M, P> s;
            s.start(x, b, G, zero);
            s.template quads<G * F::quads, (G + 1) * F::quads>(w, size, x, b, low);
            for (int p = 0; p < P; p++) {
                const uint8_t* block = w + p * size;
                const fv scale = halves(block + F::scales_at + G * 2 * LANES);
                for (int m = 0; m < M; m++) {
                    acc[p][m] = fma(floats(s.sums[p][m]), times(scale, spread(x[m][b].scale)), acc[p][m]);
                    if (F::minimum) {
                        const fv minimum = halves(block + F::minima_at + G * 2 * LANES);
                        acc[p][m] = fma(minimum, spread(x[m][b].sums[AT]), acc[p][m]);
                    }
                }
            }
        };
        group(std::integral_constant<int, 0>{});
        if constexpr (F::groups == 2) group(std::integral_constant<int, 1>{});
    }
    for (int p = 0; p < P; p++)
        for (int m = 0; m < M; m++) put_floats(out[p][m], acc[p][m]);
}

// ----------------------------------------------------------------------------------------- products

struct Product {
    const QuantMatrix* matrix;
    const XBlock* x;
    const void* bias;  // null: none
    void* out;
    int64_t out_stride;
    int32_t gate;  // -1: none
};

template <class T>
inline void finish(const Product& p, const float* sums, int64_t row, int64_t column, int64_t lanes) {
    T* out = (T*)p.out + row * p.out_stride + column;
    const T* bias = p.bias ? (const T*)p.bias + column : nullptr;
    for (int64_t i = 0; i < lanes; i++) put(out[i], bias ? sums[i] + to_float(bias[i]) : sums[i]);
}

// out[column..] = act(gate) * up of one panel, with the bias of both and rounded as the separate operations
// round.
template <class G, class T>
inline void finish_gated(const Product& p, const float* gate, const float* up, int64_t row, int64_t column,
                         int64_t half) {
    T* out = (T*)p.out + row * p.out_stride + column;
    alignas(64) float g[LANES], u[LANES];
    std::memcpy(g, gate, sizeof g);
    std::memcpy(u, up, sizeof u);
    if (p.bias) {
        const T* bias = (const T*)p.bias + column;
        for (int i = 0; i < LANES; i++) g[i] += to_float(bias[i]), u[i] += to_float(bias[half + i]);
    }
#pragma omp simd
    for (int i = 0; i < LANES; i++)
        put(out[i], rounded_to<T>(gate_of<G>(rounded_to<T>(g[i]))) * rounded_to<T>(u[i]));
}

// Panels first .. last of a part for M rows of x from `row` on.
template <class F, class T, int M>
inline void some_rows(const Product& p, const QuantPart& part, int64_t first, int64_t last, int64_t row) {
    const int64_t blocks = p.matrix->blocks, size = blocks * F::bytes;
    const XBlock* x[M];
    for (int m = 0; m < M; m++) x[m] = p.x + (row + m) * blocks;
    if (p.gate >= 0) {
        const int64_t half = p.matrix->rows / 2, up = half / LANES * size;
        for (int64_t panel = first; panel < last; panel++) {
            alignas(64) float sums[2][M][LANES];
            tile<F, M, 2>(part.data + panel * size, up, part.zero, x, blocks, sums);
            for (int m = 0; m < M; m++) {
                const int64_t column = panel * LANES;
                if (p.gate == SILU)
                    finish_gated<Silu, T>(p, sums[0][m], sums[1][m], row + m, column, half);
                else
                    finish_gated<GeluTanh, T>(p, sums[0][m], sums[1][m], row + m, column, half);
            }
        }
        return;
    }
    auto panels = [&](auto count, int64_t panel) {
        constexpr int P = decltype(count)::value;
        alignas(64) float sums[P][M][LANES];
        tile<F, M, P>(part.data + panel * size, size, part.zero, x, blocks, sums);
        for (int i = 0; i < P; i++)
            for (int m = 0; m < M; m++) {
                const int64_t at = (panel + i) * LANES;
                finish<T>(p, sums[i][m], row + m, part.target + at, std::min<int64_t>(LANES, part.rows - at));
            }
    };
    constexpr int P = 2;
    int64_t panel = first;
    for (; panel + P <= last; panel += P) panels(std::integral_constant<int, P>{}, panel);
    for (; panel < last; panel++) panels(std::integral_constant<int, 1>{}, panel);
}

template <class F, class T>
inline void rows_of_panels(const Product& p, const QuantPart& part, int64_t first, int64_t last, int64_t row,
                           int64_t end) {
    while (row < end) {
        const int64_t m = std::min<int64_t>(MOST, end - row);
        switch (m) {
            case 1: some_rows<F, T, 1>(p, part, first, last, row); break;
            case 2: some_rows<F, T, 2>(p, part, first, last, row); break;
            case 3: some_rows<F, T, 3>(p, part, first, last, row); break;
            default: some_rows<F, T, MOST>(p, part, first, last, row);
        }
        row += m;
    }
}

template <class T>
void multiply(const Product& p, int64_t rows, int64_t threads) {
    for (int64_t i = 0; i < p.matrix->num_parts; i++) {
        const QuantPart& part = p.matrix->parts[i];
        with_format(part, [&](auto f) {
            using F = decltype(f);
            const int64_t panels = panels_of(p.gate >= 0 ? part.rows / 2 : part.rows);
            const int64_t size = p.matrix->blocks * F::bytes;
            // A piece of the weights stays in the second-level cache while tiles of x pass it, each of which
            // stays in the first-level cache meanwhile; and it is large enough to pay for a turn.
            const int64_t at_once = std::max<int64_t>(2, ITEM_BYTES / size / 2 * 2);
            const int64_t pieces = (panels + at_once - 1) / at_once, chunks = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
            parallel_for(pieces * chunks, threads, [&](int64_t item) {
                const int64_t first = item % pieces * at_once, row = item / pieces * CHUNK_ROWS;
                const int64_t last = std::min(panels, first + at_once), end = std::min(rows, row + CHUNK_ROWS);
                rows_of_panels<F, T>(p, part, first, last, row, end);
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
