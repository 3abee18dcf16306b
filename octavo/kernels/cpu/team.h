// Threads that stay at hand for a sequence of parallel loops.
#pragma once

#include <cstdint>

namespace octavo {

// Calls body(context) on this thread; until it returns, its parallel loops are shared with `threads` - 1
// others, which wait for them awake. A loop costs its posting then (tenths of a microsecond), not a wake-up,
// and waits for no thread that hasn't begun to work on it: one that the system runs late misses its share.
void run_with_team(int64_t threads, void (*body)(const void*), const void* context);

template <class Body>
inline void with_team(int64_t threads, const Body& body) {
    run_with_team(threads, [](const void* b) { (*static_cast<const Body*>(b))(); }, &body);
}

}  // namespace octavo
