// The library's threads, which are PyTorch's, and what it was built for.
#include <atomic>

#include "common.h"

namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

Parallel omp_parallel = nullptr;

struct Shared {
    void (*call)(const void*, int64_t);
    const void* context;
    int64_t n;
    std::atomic<int64_t> next;
};

}  // namespace

void octavo::run_parallel(int64_t n, int64_t threads, void (*call)(const void*, int64_t), const void* context) {
    threads = std::min(threads, n);
    if (threads <= 1 || !omp_parallel) {
        for (int64_t i = 0; i < n; i++) call(context, i);
        return;
    }
    Shared shared{call, context, n, {0}};
    omp_parallel(
        [](void* p) {
            Shared& s = *static_cast<Shared*>(p);
            for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.n;) s.call(s.context, i);
        },
        &shared, unsigned(threads), 0);
}

// `parallel`: GOMP_parallel of the OpenMP runtime that PyTorch uses.
OCTAVO_API void octavo_set_omp_parallel(Parallel parallel) { omp_parallel = parallel; }

// Floats in a vector: 16 (AVX-512), 8 (AVX2) or 4.
OCTAVO_API int32_t octavo_vector_width() { return octavo::W; }
