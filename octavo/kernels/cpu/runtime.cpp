// The library's threads, which are PyTorch's, and what it was built for.
#include <sched.h>

#include <atomic>

#include "common.h"
#include "record.h"
#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

Parallel omp_parallel = nullptr;

struct Shared {
    void (*call)(const void*, int64_t);
    const void* context;
    int64_t n;
    std::atomic<int64_t> next;
};

inline void work(Shared& s) {
    for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.n;) s.call(s.context, i);
}

// Waits awake for some ten microseconds, then lets other processes have the core between looks.
class Patience {
    int looks_ = 0;

public:
    void look() {
        if (++looks_ > 2000)
            sched_yield();
#if defined(__x86_64__)
        else
            _mm_pause();
#endif
    }
};

struct Team {
    void (*body)(const void*);
    const void* context;
    const void* leader;                             // whose thread runs the body
    alignas(64) std::atomic<uint32_t> posted{0};    // loops so far
    std::atomic<Shared*> loop{nullptr};             // the one that may be joined
    std::atomic<bool> over{false};
    alignas(64) std::atomic<int32_t> inside{0};     // helpers that may touch a loop

    void share(Shared& s) {
        loop.store(&s);
        posted.fetch_add(1, std::memory_order_release);
        work(s);
        // Who enters from here on finds no loop; who is inside has some of its work, or leaves.
        loop.store(nullptr);
        for (Patience p; inside.load() != 0;) p.look();
    }

    void help() {
        uint32_t seen = 0;
        for (Patience p; !over.load(std::memory_order_acquire);) {
            const uint32_t now = posted.load(std::memory_order_acquire);
            if (now == seen) {
                p.look();
                continue;
            }
            seen = now;
            inside.fetch_add(1);
            if (Shared* s = loop.load()) work(*s);
            inside.fetch_sub(1);
            p = Patience();
        }
    }
};

thread_local Team* team = nullptr;  // that this thread leads

}  // namespace

void octavo::run_parallel(int64_t n, int64_t threads, void (*call)(const void*, int64_t), const void* context) {
    threads = std::min(threads, n);
    if (threads <= 1 || !omp_parallel) {
        for (int64_t i = 0; i < n; i++) call(context, i);
        return;
    }
    note_loop();
    Shared shared{call, context, n, {0}};
    if (team) return team->share(shared);
    omp_parallel([](void* p) { work(*static_cast<Shared*>(p)); }, &shared, unsigned(threads), 0);
}

void octavo::run_with_team(int64_t threads, void (*body)(const void*), const void* context) {
    if (threads <= 1 || !omp_parallel || team) return body(context);
    Team t;
    t.body = body, t.context = context, t.leader = &team;
    omp_parallel(
        [](void* p) {
            Team& t = *static_cast<Team*>(p);
            if (t.leader != &team) return t.help();
            team = &t;
            t.body(t.context);
            team = nullptr;
            t.over.store(true, std::memory_order_release);
        },
        &t, unsigned(threads), 0);
}

// `parallel`: GOMP_parallel of the OpenMP runtime that PyTorch uses.
OCTAVO_API void octavo_set_omp_parallel(Parallel parallel) { omp_parallel = parallel; }

// Floats in a vector: 16 (AVX-512), 8 (AVX2) or 4.
OCTAVO_API int32_t octavo_vector_width() { return octavo::W; }
