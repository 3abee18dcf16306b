// A step's inputs from the tables of running requests, and its tokens back into them.
//
// Request i is in slot slots[i] and owns rows starts[i] .. starts[i + 1] - 1. See reference_batch.py.
#include "common.h"
#include "record.h"

using octavo::refuse_recording;  // none of these is part of a model's step

OCTAVO_API int32_t octavo_gather_rows(const int64_t* slots, const int32_t* starts, int64_t requests,
                                      int64_t* num_computed, const int32_t* token_table, int64_t table_stride,
                                      int32_t* token_ids, int64_t* positions, int64_t* ends, int32_t* seq_lens) {
    refuse_recording();
    for (int64_t i = 0; i < requests; i++) {
        const int64_t slot = slots[i], first = num_computed[slot], count = starts[i + 1] - starts[i];
        const int32_t* tokens = token_table + slot * table_stride + first;
        for (int64_t j = 0; j < count; j++) {
            token_ids[starts[i] + j] = tokens[j];
            positions[starts[i] + j] = first + j;
        }
        num_computed[slot] = ends[i] = first + count;
        seq_lens[i] = int32_t(first + count);
    }
    return 0;
}

OCTAVO_API int32_t octavo_map_blocks(const int64_t* slots, const int32_t* starts, const int64_t* ends,
                                     int64_t requests, const int32_t* block_table, int64_t table_stride,
                                     int64_t block_size, int64_t columns, int32_t* block_rows, int64_t rows_stride,
                                     int64_t* slot_mapping) {
    refuse_recording();
    for (int64_t i = 0; i < requests; i++) {
        const int32_t* table = block_table + slots[i] * table_stride;
        std::memcpy(block_rows + i * rows_stride, table, columns * sizeof(int32_t));
        const int64_t shift = ends[i] - starts[i + 1];
        for (int64_t row = starts[i]; row < starts[i + 1]; row++) {
            const int64_t position = row + shift;
            slot_mapping[row] = int64_t(table[position / block_size]) * block_size + position % block_size;
        }
    }
    return 0;
}

OCTAVO_API int32_t octavo_append_tokens(const int64_t* slots, const int64_t* ends, const int32_t* tokens,
                                        int64_t tokens_stride, int64_t requests, int32_t* token_table,
                                        int64_t table_stride) {
    refuse_recording();
    for (int64_t i = 0; i < requests; i++)
        token_table[slots[i] * table_stride + ends[i]] = tokens[i * tokens_stride];
    return 0;
}
