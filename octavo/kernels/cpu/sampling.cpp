// Arg max over the vocabulary, plain and with Gumbel noise (an exact draw from softmax(logits / T)).
//
// Noise is a function of (row's two keys, token id) alone, so that a seeded draw depends neither on
// the batch nor on the machine. NaN wins, as in NumPy; of equal values the lowest id wins.
#include <cmath>
#include <vector>

#include "common.h"
#include "record.h"

using namespace octavo;

namespace {

constexpr int64_t CHUNK = 8192;  // ids per piece of work, where a row is shared between threads
constexpr int64_t TILE = 512;    // ids whose noisy logits lie in a buffer at a time
constexpr int64_t GLANCE = 128;  // values that are looked at together before each alone

struct Best {
    float value;
    int64_t id;  // -1: nothing yet
};

// Does (v, id) beat `best`, given that id is greater than best.id?
inline bool beats(float v, const Best& best) {
    if (best.id < 0) return true;
    return v > best.value || (v != v && best.value == best.value);
}

// Scans up to GLANCE values for the first greatest one, or the first NaN. Most hold nothing that beats
// what came before: those are settled by their greatest value alone.
inline void glance(const float* x, int64_t n, int64_t id0, Best& best) {
    if (best.value != best.value) return;
    if (n >= 4 * W && best.id >= 0) {
        vf top[4];
        vi odd = {};
        auto see = [&](int j, const float* p) {
            vf v = load(p);
            top[j] = vmax(v, top[j]);
            odd |= v != v;
        };
        for (int j = 0; j < 4; j++) top[j] = splat(best.value);
        for (int64_t i = 0; i + 4 * W <= n; i += 4 * W)
            for (int j = 0; j < 4; j++) see(j, x + i + j * W);
        for (int j = 0; j < 4; j++) see(j, x + n - (j + 1) * W);  // what the loop left, and some again
        vf most = vmax(vmax(top[0], top[1]), vmax(top[2], top[3]));
        vi beaten = odd | (most > splat(best.value));
        int32_t any = 0;
        for (int j = 0; j < W; j++) any |= beaten[j];
        if (!any) return;
    }
    for (int64_t i = 0; i < n; i++)
        if (beats(x[i], best)) best = {x[i], id0 + i};
}

inline void scan(const float* x, int64_t n, int64_t id0, Best& best) {
    for (int64_t i = 0; i < n; i += GLANCE) glance(x + i, std::min(GLANCE, n - i), id0 + i, best);
}

inline const float* plain_tile(const float* x, int64_t, float*) { return x; }
inline const float* plain_tile(const bf16* x, int64_t n, float* buffer) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) buffer[i] = to_float(x[i]);
    return buffer;
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

// fill(row, id0, n, buffer) gives n values of a row, in the buffer or elsewhere; result[row] = id of the
// greatest. Less than `minimum` values altogether stay on the calling thread.
template <class Fill>
void arg_max(int64_t rows, int64_t vocab, int64_t minimum, int64_t* result, int32_t threads, const Fill& fill) {
    const int64_t size = rows >= 2 * threads ? vocab : CHUNK, chunks = (vocab + size - 1) / size;
    static thread_local std::vector<Best> scratch;
    scratch.assign(size_t(rows * chunks), Best{0, -1});
    Best* found = scratch.data();
    parallel_for(rows * chunks, rows * vocab < minimum ? 1 : threads, [&](int64_t item) {
        const int64_t row = item / chunks, first = item % chunks * size, last = std::min(vocab, first + size);
        alignas(64) float buffer[TILE];
        Best best{0, -1};
        for (int64_t id = first; id < last; id += TILE) {
            const int64_t n = std::min(TILE, last - id);
            scan(fill(row, id, n, buffer), n, id, best);
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
    refuse_recording();
    bool known = with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        arg_max(rows, vocab, 65536, result, threads, [=](int64_t row, int64_t id, int64_t n, float* out) {
            return plain_tile((const T*)logits + row * stride + id, n, out);
        });
    });
    return known ? 0 : -1;
}

// temperature: float32 [rows]; a row whose temperature is not above 0 is taken greedily. k0, k1: [rows],
// the lower 32 bits of each key (int64 if `wide_keys`, else 32 bits).
OCTAVO_API int32_t octavo_gumbel_argmax(const void* logits, const float* temperature, const void* k0, const void* k1,
                                        int32_t wide_keys, int64_t* result, int64_t rows, int64_t vocab,
                                        int64_t stride, int32_t dtype, int32_t threads) {
    refuse_recording();
    auto key = [=](const void* k, int64_t row) {
        return wide_keys ? uint32_t(((const int64_t*)k)[row]) : ((const uint32_t*)k)[row];
    };
    bool known = with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        arg_max(rows, vocab, 8192, result, threads, [=](int64_t row, int64_t id, int64_t n, float* out) {
            const T* x = (const T*)logits + row * stride + id;
            if (!(temperature[row] > 0)) return plain_tile(x, n, out);
            noisy_tile(x, n, uint32_t(id), temperature[row], key(k0, row), key(k1, row), out);
            return (const float*)out;
        });
    });
    return known ? 0 : -1;
}
