#include "model/cuda_prologue.h"

namespace fathom::model {
namespace {

using config::LayerKind;

// Of rows that hold c, then z.
kernels::CudaCompressor Compressor(const CudaCompressorWeights& w, const float* rows,
                                   const kernels::PagedEntries& cache, std::byte* state) {
  const int64_t width = w.wkv.rows;
  return {.c = rows,
          .z = rows + width,
          .row_stride = 2 * width,
          .ape = w.ape,
          .norm = w.norm,
          .cache = cache,
          .state = state};
}

}  // namespace

kernels::CudaAttentionPrologueParams PrologueParams(const CudaContext& context,
                                                    const CudaLayer& layer, const LayerCache& cache,
                                                    const kernels::Fp8Tiles& qr) {
  const config::ModelConfig& c = context.config;
  const CudaWorkspace& ws = context.ws;
  const CudaBlockWeights& w = layer.w;
  const LayerKind kind = c.layer_kind(layer.idx);
  kernels::CudaAttentionPrologueParams p{
      .batch = layer.step.batch,
      .norm_eps = static_cast<float>(c.rms_norm_eps),
      .angles = kind == LayerKind::kWindow ? ws.angles_plain : ws.angles_compressed,
      .num_queries = layer.share.batch.num_tokens,
      .qr = ws.qr,
      .qr_stride = c.q_lora_rank,
      .q_lora_rank = c.q_lora_rank,
      .q_norm = w.q_norm,
      .q = qr,
      .kv = ws.kv,
      .kv_stride = c.head_dim,
      .kv_norm = w.kv_norm,
      .fresh = reinterpret_cast<uint8_t*>(ws.kv),
      .pages = cache.window,
      .ratio = cache.ratio,
      .main = {},
      .index = {},
      .slot_bytes = context.layout.state.slot_bytes,
      .frequencies = ws.frequencies + 32,
      .index_dtype = context.index_dtype};
  if (kind != LayerKind::kWindow) {
    p.main = Compressor(w.compressor, ws.compressed, cache.compressed, cache.compressor_state);
  }
  if (kind == LayerKind::kC4) {
    p.index =
        Compressor(w.index_compressor, ws.index_compressed, cache.index_keys, cache.index_state);
  }
  return p;
}

}  // namespace fathom::model
