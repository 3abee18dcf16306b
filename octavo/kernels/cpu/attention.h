// What the attention kernels share.
#pragma once

#include <cstdint>

// One step's batch, as ops.py fills it: see AttentionMetadata.
struct AttentionBatch {
    const int32_t *query_start, *seq_lens, *block_table;
    int64_t table_stride, requests;
    int64_t threads;
};
