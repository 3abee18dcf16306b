// The most that the processor's dot products of bytes do: sixteen independent sums, nothing loaded.
#include <immintrin.h>

#include <cstdint>

// Multiplications and additions of `turns` turns; 0 where there is no such instruction for 512 bits.
extern "C" __attribute__((visibility("default"))) int64_t dot_turns(int64_t turns) {
#if defined(__AVX512VNNI__)
    __m512i sums[16] = {}, w = _mm512_set1_epi8(3), x = _mm512_set1_epi8(2);
    for (int64_t i = 0; i < turns; i++) {
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) asm volatile("vpdpbusd %1, %2, %0" : "+v"(sums[j]) : "v"(x), "v"(w));
    }
    return turns * 16 * 64 * 2;
#else
    return turns * 0;
#endif
}
