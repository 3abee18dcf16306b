// Recordings: see record.h.
#include "record.h"

#include <memory>
#include <vector>

#include "common.h"
#include "team.h"

namespace {

struct Recording {
    std::vector<std::function<int32_t()>> calls;
    std::vector<int64_t> loops_before;  // parallel loops of the calls before each
    int64_t loops = 0;
    bool refused = false;

    int64_t loops_in(size_t first, size_t last) const {
        auto before = [&](size_t i) { return i < calls.size() ? loops_before[i] : loops; };
        return before(last) - before(first);
    }
};

thread_local Recording* current = nullptr;

}  // namespace

bool octavo::is_recording() { return current != nullptr; }
void octavo::note_call(std::function<int32_t()> call) {
    current->calls.push_back(std::move(call));
    current->loops_before.push_back(current->loops);
}
void octavo::note_loop() {
    if (current) current->loops++;
}
void octavo::refuse_recording() {
    if (current) current->refused = true;
}

// Begins to record this thread's calls; octavo_recording_end must follow on the same thread.
OCTAVO_API void* octavo_recording_begin() { return current = new Recording; }
// Calls noted so far.
OCTAVO_API int64_t octavo_recording_size(const void* recording) {
    return int64_t(static_cast<const Recording*>(recording)->calls.size());
}
// 0, or -1 if a kernel was called that cannot be recorded.
OCTAVO_API int32_t octavo_recording_end(const void* recording) {
    current = nullptr;
    return static_cast<const Recording*>(recording)->refused ? -1 : 0;
}
OCTAVO_API void octavo_recording_free(void* recording) { delete static_cast<Recording*>(recording); }

// Runs calls first .. last, in order, with all threads at hand if they had more than one parallel loop. The
// first status that is not 0 ends it.
OCTAVO_API int32_t octavo_recording_replay(const void* recording, int64_t first, int64_t last, int64_t threads) {
    const Recording& r = *static_cast<const Recording*>(recording);
    const auto& calls = r.calls;
    int32_t status = 0;
    octavo::with_team(r.loops_in(size_t(first), size_t(last)) > 1 ? threads : 1, [&] {
        for (int64_t i = first; i < last && !status; i++) status = calls[size_t(i)]();
    });
    return status;
}
