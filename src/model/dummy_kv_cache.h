// Plausible KV contents for measurements on contexts that nobody computed: entries of random sign
// and about unit size, index keys that differ. What attention makes of them differs between
// sequences, so that dummy weights route their tokens to different experts, as real ones do.
#pragma once

#include "device/device.h"
#include "kv_cache/kv_layout.h"
#include "model/model.h"

namespace fathom::model {

// Fills blocks and window pages of a GPU's pools (official numerics), in stream order. State slots
// are left as they are: zeros are a valid state. Bug when the stream is a CPU's: zeros do there.
void FillDummyKvCache(const config::ModelConfig& config, const kv_cache::KvLayout& layout,
                      kv_cache::IndexKeyDType index_dtype, const KvCacheView& kv,
                      int64_t num_blocks, int64_t num_window_pages, device::Stream& stream);

}  // namespace fathom::model
