// Arg max over the vocabulary, plain and with Gumbel noise (an exact draw from softmax(logits / T)).
//
// Noise is a function of (row's two keys, token id) alone, so that a seeded draw depends neither on
// the batch nor on the machine. NaN wins, as in NumPy; of equal values the lowest id wins.
#include <cmath>
#include <vector>

#include "common.h"

using namespace octavo;

namespace {

constexpr int64_t CHUNK = 8192;  // ids per piece of work
constexpr int64_t TILE = 512;    // ids whose noisy logits lie in a buffer at a time

struct Best {
    float value;
    int64_t id;  // -1: nothing yet
};

// Does (v, id) beat `best`, given that id is greater than best.id?
inline bool beats(float v, const Best& best) {
    if (best.id < 0) return true;
    return v > best.value || (v != v && best.value == best.value);
}

// Scans n values for the first greatest one, or the first NaN. Most tiles hold nothing that beats
// what earlier ones did: those are settled by their greatest value alone.
inline void scan(const float* x, int64_t n, int64_t id0, Best& best) {
    if (best.value != best.value) return;
    if (n >= W && best.id >= 0) {
        vf top = load(x);
        vi odd = top != top;
        for (int64_t i = W; i <= n - W; i += W) {
            vf v = load(x + i);
            top = vmax(v, top);
            odd |= v != v;
        }
        vf last = load(x + n - W);
        top = vmax(last, top);
        odd |= last != last;
        bool beaten = false;
        for (int j = 0; j < W; j++) beaten |= odd[j] != 0 || top[j] > best.value;
        if (!beaten) return;
    }
    for (int64_t i = 0; i < n; i++)
        if (beats(x[i], best)) best = {x[i], id0 + i};
}

template <class T>
inline void plain_tile(const T* x, int64_t n, float* out) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) out[i] = to_float(x[i]);
}

// logit / T + Gumbel(key, id): a 32-bit mix of the id under two keys, to a uniform number in (0, 1),
// to an exponential one, to Gumbel's.
template <class T>
inline void noisy_tile(const T* x, int64_t n, uint32_t id0, float temperature, uint32_t k0, uint32_t k1, float* out) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        uint32_t h = (id0 + uint32_t(i)) * 0x9E3779B1u + k0;
        h ^= h >> 16;
        h *= 0x21f0aaadu;
        h ^= h >> 15;
        h ^= k1;
        h *= 0x735a2d97u;
        h ^= h >> 15;
        float u = (float(int32_t(h >> 9)) + 0.5f) * 1.1920928955078125e-7f;
        float e = -log_of(u);
        out[i] = to_float(x[i]) / temperature - log_of(e);
    }
}

// fill(row, id0, n, buffer) gives n values of a row; result[row] = id of the greatest.
template <class Fill>
void arg_max(int64_t rows, int64_t vocab, int64_t* result, int32_t threads, const Fill& fill) {
    const int64_t chunks = (vocab + CHUNK - 1) / CHUNK;
    static thread_local std::vector<Best> scratch;
    scratch.assign(size_t(rows * chunks), Best{0, -1});
    Best* found = scratch.data();
    parallel_for(rows * chunks, rows * vocab < 8192 ? 1 : threads, [&](int64_t item) {
        const int64_t row = item / chunks, first = item % chunks * CHUNK, last = std::min(vocab, first + CHUNK);
        alignas(64) float buffer[TILE];
        Best best{0, -1};
        for (int64_t id = first; id < last; id += TILE) {
            const int64_t n = std::min(TILE, last - id);
            fill(row, id, n, buffer);
            scan(buffer, n, id, best);
        }
        found[item] = best;
    });
    for (int64_t row = 0; row < rows; row++) {
        Best best = found[row * chunks];
        for (int64_t c = 1; c < chunks; c++)
            if (beats(found[row * chunks + c].value, best)) best = found[row * chunks + c];
        result[row] = best.id;
    }
}

}  // namespace

// logits: [rows, vocab], rows `stride` apart. result: int64 [rows].
OCTAVO_API int32_t octavo_argmax(const void* logits, int64_t* result, int64_t rows, int64_t vocab, int64_t stride,
                                 int32_t dtype, int32_t threads) {
    bool known = with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        arg_max(rows, vocab, result, threads, [=](int64_t row, int64_t id, int64_t n, float* out) {
            plain_tile((const T*)logits + row * stride + id, n, out);
        });
    });
    return known ? 0 : -1;
}

// temperature: float32 [rows]; a row whose temperature is not above 0 is taken greedily. k0, k1: [rows],
// the lower 32 bits of each key (int64 if `wide_keys`, else 32 bits).
OCTAVO_API int32_t octavo_gumbel_argmax(const void* logits, const float* temperature, const void* k0, const void* k1,
                                        int32_t wide_keys, int64_t* result, int64_t rows, int64_t vocab,
                                        int64_t stride, int32_t dtype, int32_t threads) {
    auto key = [=](const void* k, int64_t row) {
        return wide_keys ? uint32_t(((const int64_t*)k)[row]) : ((const uint32_t*)k)[row];
    };
    bool known = with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        arg_max(rows, vocab, result, threads, [=](int64_t row, int64_t id, int64_t n, float* out) {
            const T* x = (const T*)logits + row * stride + id;
            if (temperature[row] > 0)
                noisy_tile(x, n, uint32_t(id), temperature[row], key(k0, row), key(k1, row), out);
            else
                plain_tile(x, n, out);
        });
    });
    return known ? 0 : -1;
}
