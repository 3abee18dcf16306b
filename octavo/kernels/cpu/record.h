// Calls of a step, recorded once and run again without the Python between them.
//
// A kernel that may be part of a recording begins with `record_call([=] { return kernel(its arguments); })`:
// while its thread records, the call is noted, and runs as ever. What its pointers point to must outlive the
// recording: structures that a caller makes anew for each call are captured by value.
#pragma once

#include <cstdint>
#include <functional>

namespace octavo {

bool is_recording();
void note_call(std::function<int32_t()> call);
void note_loop();  // that several threads share

template <class F>
inline void record_call(const F& call) {
    if (is_recording()) note_call(call);
}

// In a kernel whose arguments differ from step to step: a recording that meets it is void.
void refuse_recording();

}  // namespace octavo
