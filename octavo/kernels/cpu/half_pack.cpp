// Matrices of 16-bit floats into the layout of the kernels, and rows of them back into numbers.
#include "half.h"
#include "record.h"

using namespace octavo;

// Rows of a panel; 0 where the kernels don't run.
OCTAVO_API int32_t octavo_half_panel() {
#if OCTAVO_HALF
    return PANEL;
#else
    return 0;
#endif
}

#if OCTAVO_HALF

namespace {

template <class H>
void pack(const HalfMatrix& m, const uint16_t* source, int64_t rows, int64_t stride, int64_t first) {
    for (int64_t done = 0; done < rows;) {
        const int64_t panel = (first + done) / PANEL;
        const int lane = int((first + done) % PANEL);
        const int count = int(std::min<int64_t>(PANEL - lane, rows - done));
        uint16_t* out = m.data + panel * m.columns * PANEL;
        const uint16_t* in = source + done * stride;
        if (count == PANEL) {
            for (int64_t k = 0; k < m.columns; k++, out += PANEL)
                for (int i = 0; i < PANEL; i++) out[H::place(i)] = in[i * stride + k];
        } else {
            for (int64_t k = 0; k < m.columns; k++, out += PANEL)
                for (int i = 0; i < count; i++) out[H::place(lane + i)] = in[i * stride + k];
        }
        done += count;
    }
}

inline float widened(Brain, uint16_t x) { return to_float(bf16{x}); }
inline float widened(Half, uint16_t x) { return _cvtsh_ss(x); }

}  // namespace

// Puts `rows` rows of `columns` halves, `stride` apart, into the matrix from row `first` on.
OCTAVO_API void octavo_half_pack(const HalfMatrix* matrix, const uint16_t* source, int64_t rows, int64_t stride,
                                 int64_t first) {
    with_half(*matrix, [&](auto h) { pack<decltype(h)>(*matrix, source, rows, stride, first); });
}

// out[i] = row ids[i] of the matrix: out [n, columns], float32, contiguous. ids are not checked.
OCTAVO_API int32_t octavo_half_rows(const HalfMatrix* matrix, const int64_t* ids, int64_t n, float* out,
                                    int64_t threads) {
    const HalfMatrix m = *matrix;
    record_call([=] { return octavo_half_rows(matrix, ids, n, out, threads); });
    with_half(m, [&](auto h) {
        using H = decltype(h);
        parallel_rows(n, m.columns, threads, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                const uint16_t* in = m.data + ids[i] / PANEL * m.columns * PANEL + H::place(int(ids[i] % PANEL));
                for (int64_t k = 0; k < m.columns; k++) out[i * m.columns + k] = widened(h, in[k * PANEL]);
            }
        });
    });
    return 0;
}

#endif
