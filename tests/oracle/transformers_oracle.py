"""The `transformers` implementation of DeepSeek-V4 in FP32 on a checkpoint of the official format.

It is the outside opinion for fp32 numerics: weights are dequantized exactly, nothing else rounds.
It has no drafts. Names are mapped here rather than by its loader, which expects quantized layers.

    python transformers_oracle.py CHECKPOINT --tokens 5,17,3
"""

from __future__ import annotations

import argparse

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from checkpoint import Checkpoint
from numerics_model import Choices, judge

LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight":
        "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
}
MODEL_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}


def transformers_config(config: dict) -> DeepseekV4Config:
    config = dict(config)
    config.pop("quantization_config", None)
    config.pop("torch_dtype", None)
    scaling = config.pop("rope_scaling")
    partial = config["qk_rope_head_dim"] / config["head_dim"]
    config["rope_parameters"] = {
        "main": {"rope_type": "default", "rope_theta": config["rope_theta"],
                 "partial_rotary_factor": partial},
        "compress": {"rope_type": "yarn", "rope_theta": config["compress_rope_theta"],
                     "partial_rotary_factor": partial, "attention_factor": 1.0,
                     "factor": scaling["factor"],
                     "original_max_position_embeddings":
                         scaling["original_max_position_embeddings"],
                     "beta_fast": scaling["beta_fast"], "beta_slow": scaling["beta_slow"]},
    }
    result = DeepseekV4Config(**config)
    result._attn_implementation = "eager"
    result._experts_implementation = "eager"
    return result


def state_dict(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    state = {new: checkpoint.values(old) for old, new in MODEL_NAMES.items()}
    for layer in range(checkpoint.config["num_hidden_layers"]):
        source, target = f"layers.{layer}.", f"model.layers.{layer}."
        for old, new in LAYER_NAMES.items():
            if source + old in checkpoint:
                state[target + new] = checkpoint.values(source + old)
        experts = [f"{source}ffn.experts.{e}." for e in
                   range(checkpoint.config["n_routed_experts"])]
        state[target + "mlp.experts.gate_up_proj"] = torch.stack([
            torch.cat((checkpoint.values(e + "w1.weight"), checkpoint.values(e + "w3.weight")))
            for e in experts])
        state[target + "mlp.experts.down_proj"] = torch.stack(
            [checkpoint.values(e + "w2.weight") for e in experts])
    return state


class TransformersOracle:
    def __init__(self, checkpoint: Checkpoint):
        self.config = checkpoint.config
        self.model = DeepseekV4ForCausalLM(transformers_config(checkpoint.config)).float().eval()
        self.model.load_state_dict(state_dict(checkpoint), strict=True)
        self._choices = Choices()
        self._force_routing: dict[int, torch.Tensor] = {}
        self._force_index: dict[int, torch.Tensor] = {}
        self._index_scores: dict[int, torch.Tensor] = {}
        for layer, block in enumerate(self.model.model.layers):
            if not block.mlp.is_hash:
                block.mlp.gate.register_forward_hook(self._routing_hook(layer))
            indexer = getattr(block.self_attn.compressor, "indexer", None)
            if indexer is not None:
                indexer.scorer.register_forward_hook(self._scores_hook(layer))
                indexer.register_forward_hook(self._index_hook(layer))

    def _routing_hook(self, layer: int):
        def hook(router, _, output):
            logits, weights, free = output
            scores = router.score_fn(logits)
            used = self._force_routing.get(layer, free).long()
            biased = scores + router.e_score_correction_bias
            self._choices.routing[layer] = judge(biased, used, free)
            if layer not in self._force_routing:
                return None
            chosen = scores.gather(1, used)
            weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
            return logits, weights * router.routed_scaling_factor, used

        return hook

    def _scores_hook(self, layer: int):
        def hook(_, __, output):
            self._index_scores[layer] = output[0]

        return hook

    def _index_hook(self, layer: int):
        def hook(indexer, _, output):
            scores, free = self._index_scores[layer], output[0]
            tokens, entries = scores.shape
            hidden = torch.arange(entries) >= (torch.arange(tokens)[:, None] + 1) // 4
            used = self._force_index.get(layer, free).long()
            self._choices.index[layer] = judge(
                scores.masked_fill(hidden, -torch.inf), used, free)
            return used[None] if layer in self._force_index else None

        return hook

    @torch.no_grad()
    def forward(self, tokens, force_routing=None, force_index=None):
        """Logits [T, vocab] and Choices, as numerics_model.Model.forward."""
        self._choices = Choices()
        self._force_routing, self._force_index = force_routing or {}, force_index or {}
        ids = torch.as_tensor(tokens, dtype=torch.int64)[None]
        logits = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits, self._choices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--tokens", required=True, help="comma-separated token ids")
    args = parser.parse_args()
    tokens = [int(t) for t in args.tokens.split(",")]
    logits, choices = TransformersOracle(Checkpoint(args.checkpoint)).forward(tokens)
    logprobs = logits.log_softmax(-1)
    for position, token in enumerate(tokens[1:]):
        print(position + 1, token, f"{logprobs[position, token].item():.6f}")
    for kind in ("routing", "index"):
        for layer, choice in getattr(choices, kind).items():
            print(f"{kind} layer {layer}: smallest gap {choice.gap.min().item():.3g}")


if __name__ == "__main__":
    main()
