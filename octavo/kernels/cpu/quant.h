// Quantized matrices as the CPU kernels hold them: weight = scale * (q - zero), or scale * q + minimum, with
// a scale (and a minimum) per row and group of 16 or 32 columns; float16. GGUF's types are all of this form.
//
// A panel is LANES rows; its columns go in blocks of 32, each with its scales beside it, so that a product
// reads one stream from front to back. Inside a block, bytes lie by fours of columns ("quads"): vector j
// holds columns 4j .. 4j+3 of the panel's rows, 4 bytes each, which is what the processor's dot products of
// bytes take and leaves one sum per row. Of a block:
//
//   8 bits: 8 vectors of bytes, signed, or with 128 added where the dot product takes unsigned ones (VNNI);
//   4 bits: 4 vectors, vector i with quad i in the low and quad i + 4 in the high half of each byte;
//   5 bits: the lower 4 bits so, then a vector whose bit j is the fifth of quad j;
//   6 bits: the lower 4 bits so, then two vectors, vector h with bits 2i, 2i+1 for quad 4h + i;
//   then float16 scales [32 / group, LANES], then minima alike.
#pragma once

#include "common.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define OCTAVO_QUANT 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define OCTAVO_QUANT 1
#endif

// Rows of one matrix in one format, as quant.py fills it.
struct QuantPart {
    const uint8_t* data;  // panels
    int64_t rows;
    int64_t target;  // of its first row in the whole matrix
    int32_t bits, group, has_minimum, zero;
};

// A matrix [rows, columns] of one or several parts; blocks: of 32 columns, the last padded with zeros.
struct QuantMatrix {
    const QuantPart* parts;
    int64_t num_parts, rows, columns, blocks;
};

#if OCTAVO_QUANT
#include <immintrin.h>

namespace octavo {

constexpr int BLOCK = 32, QUADS = 8;

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define OCTAVO_VNNI 1
constexpr int LANES = 16;
#else
#if defined(__AVXVNNI__) || defined(OCTAVO_IMITATE_VNNI)  // the latter for tests on a machine without
#define OCTAVO_VNNI 1
#else
#define OCTAVO_VNNI 0
#endif
constexpr int LANES = 8;
#endif
constexpr uint8_t SIGN = OCTAVO_VNNI ? 128 : 0;  // that a byte of 8 bits is stored with, by exclusive or
constexpr int VECTOR = 4 * LANES;  // bytes

template <int BITS, int GROUP, bool MINIMUM>
struct Format {
    static constexpr int bits = BITS, group = GROUP;
    static constexpr bool minimum = MINIMUM;
    static constexpr int groups = BLOCK / GROUP;
    static constexpr int quads = QUADS / groups;                // of a group
    static constexpr int scales_at = BLOCK / 8 * BITS * LANES;  // bytes
    static constexpr int minima_at = scales_at + groups * 2 * LANES;
    static constexpr int bytes = minima_at + (MINIMUM ? groups * 2 * LANES : 0);  // of a block
};

// Calls f(Format) for a part's format; false for one that there is none of.
template <class F>
inline bool with_format(const QuantPart& p, const F& f) {
    switch (p.bits * 1000 + p.group * 10 + (p.has_minimum != 0)) {
        case 4320: return f(Format<4, 32, false>{}), true;
        case 4321: return f(Format<4, 32, true>{}), true;
        case 5320: return f(Format<5, 32, false>{}), true;
        case 5321: return f(Format<5, 32, true>{}), true;
        case 8320: return f(Format<8, 32, false>{}), true;
        case 4160: return f(Format<4, 16, false>{}), true;
        case 4161: return f(Format<4, 16, true>{}), true;
        case 6160: return f(Format<6, 16, false>{}), true;
    }
    return false;
}

inline int64_t panels_of(int64_t rows) { return (rows + LANES - 1) / LANES; }

}  // namespace octavo
#endif
