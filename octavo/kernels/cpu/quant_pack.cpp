// Quantized matrices into the layout of the kernels, and rows of them back into numbers.
#include "quant.h"
#include "record.h"

using namespace octavo;

// Rows of a panel: 8, or 16 with AVX-512 VNNI; 0 where the kernels don't run.
OCTAVO_API int32_t octavo_quant_lanes() {
#if OCTAVO_QUANT
    return LANES;
#else
    return 0;
#endif
}

#if OCTAVO_QUANT

namespace {

// The bits of one lane and column of a block. `q` is unsigned, or signed for 8 bits.
template <class F>
inline void put_bits(uint8_t* block, int lane, int column, uint8_t q) {
    const int quad = column / 4, at = lane * 4 + column % 4;
    if (F::bits == 8) {
        block[quad * VECTOR + at] = q ^ SIGN;
        return;
    }
    block[quad % 4 * VECTOR + at] |= uint8_t((q & 15) << (quad / 4 * 4));
    if (F::bits == 5) block[4 * VECTOR + at] |= uint8_t((q >> 4 & 1) << quad);
    if (F::bits == 6) block[(4 + quad / 4) * VECTOR + at] |= uint8_t((q >> 4 & 3) << (2 * (quad % 4)));
}

template <class F>
inline int32_t get_bits(const uint8_t* block, int lane, int column) {
    const int quad = column / 4, at = lane * 4 + column % 4;
    if (F::bits == 8) return int8_t(block[quad * VECTOR + at] ^ SIGN);
    int32_t q = block[quad % 4 * VECTOR + at] >> (quad / 4 * 4) & 15;
    if (F::bits == 5) q |= (block[4 * VECTOR + at] >> quad & 1) << 4;
    if (F::bits == 6) q |= (block[(4 + quad / 4) * VECTOR + at] >> (2 * (quad % 4)) & 3) << 4;
    return q;
}

template <class F>
void pack_panel(const uint8_t* q, const uint16_t* scale, const uint16_t* minimum, int64_t rows, int64_t columns,
                int64_t panel, uint8_t* out) {
    const int64_t blocks = columns / BLOCK, groups = columns / F::group;
    const int lanes = int(std::min<int64_t>(LANES, rows - panel * LANES));
    std::memset(out, 0, size_t(blocks * F::bytes));
    for (int lane = 0; lane < lanes; lane++) {
        const int64_t row = panel * LANES + lane;
        uint8_t* block = out;
        for (int64_t b = 0; b < blocks; b++, block += F::bytes) {
            for (int c = 0; c < BLOCK; c++) put_bits<F>(block, lane, c, q[row * columns + b * BLOCK + c]);
            for (int g = 0; g < F::groups; g++) {
                const int64_t from = row * groups + b * F::groups + g;
                std::memcpy(block + F::scales_at + (g * LANES + lane) * 2, scale + from, 2);
                if (F::minimum) std::memcpy(block + F::minima_at + (g * LANES + lane) * 2, minimum + from, 2);
            }
        }
    }
}

inline float half_at(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
}

template <class F, class T>
void unpack_row(const QuantPart& part, int64_t row, int64_t columns, T* out) {
    const int64_t blocks = (columns + BLOCK - 1) / BLOCK;
    const uint8_t* block = part.data + row / LANES * blocks * F::bytes;
    const int lane = int(row % LANES);
    for (int64_t b = 0; b < blocks; b++, block += F::bytes) {
        const int n = int(std::min<int64_t>(BLOCK, columns - b * BLOCK));
        for (int c = 0; c < n; c++) {
            const int at = (c / F::group * LANES + lane) * 2;
            float x = half_at(block + F::scales_at + at) * float(get_bits<F>(block, lane, c) - part.zero);
            if (F::minimum) x += half_at(block + F::minima_at + at);
            put(out[b * BLOCK + c], x);
        }
    }
}

}  // namespace

// Bytes of a part's panels; -1: no such format.
OCTAVO_API int64_t octavo_quant_bytes(const QuantPart* part, int64_t columns) {
    int64_t bytes = -1;
    with_format(*part, [&](auto f) { bytes = panels_of(part->rows) * (columns / BLOCK) * decltype(f)::bytes; });
    return bytes;
}

// q: [rows, columns], scale and minimum (null if the format has none): float16 [rows, columns / group], all
// contiguous; columns: a multiple of 32. out: octavo_quant_bytes.
OCTAVO_API int32_t octavo_quant_pack(const QuantPart* part, int64_t columns, const uint8_t* q, const uint16_t* scale,
                                     const uint16_t* minimum, uint8_t* out, int64_t threads) {
    const bool known = with_format(*part, [&](auto f) {
        using F = decltype(f);
        const int64_t size = columns / BLOCK * F::bytes;
        parallel_for(panels_of(part->rows), threads, [&](int64_t panel) {
            pack_panel<F>(q, scale, minimum, part->rows, columns, panel, out + panel * size);
        });
    });
    return known ? 0 : -1;
}

// out[i] = row ids[i] of the matrix; out: contiguous [n, columns].
OCTAVO_API int32_t octavo_quant_rows(const QuantMatrix* m, const int64_t* ids, int64_t n, void* out, int32_t dtype,
                                     int64_t threads) {
    record_call([=] { return octavo_quant_rows(m, ids, n, out, dtype, threads); });
    const bool known = with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        parallel_rows(n, m->columns, threads, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++)
                for (int64_t p = 0; p < m->num_parts; p++) {
                    const QuantPart& part = m->parts[p];
                    const int64_t row = ids[i] - part.target;
                    if (row >= 0 && row < part.rows)
                        with_format(part, [&](auto f) {
                            unpack_row<decltype(f)>(part, row, m->columns, (T*)out + i * m->columns);
                        });
                }
        });
    });
    return known ? 0 : -1;
}

#endif
