"""fathom-tiny's sizes, as the official config.json names them. The kernel-critical ones are those of the real models."""
import json
import pathlib

LAYERS = [0, 0, 4, 128, 4, 128, 4]
CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 256,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 128,
    "initializer_range": 0.02,
    "max_position_embeddings": 16384,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": len(LAYERS),
    "num_hash_layers": 2,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
                            "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 4, "original_max_position_embeddings": 4096,
                     "type": "yarn"},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 3072,
    "compress_rope_theta": 160000,
    "compress_ratios": LAYERS + [0],
}
# What a config.json adds, or replaces, for the folder with a DSpark draft.
DSPARK = {"dspark_block_size": 5, "dspark_markov_rank": 64, "dspark_target_layer_ids": [4, 5, 6],
          "dspark_noise_token_id": 2, "n_mtp_layers": 2, "num_nextn_predict_layers": 2, "compress_ratios": LAYERS + [0, 0]}
GENERATION = {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0,
              "top_p": 1.0, "transformers_version": "4.46.3"}


def added(content):
    return {"__type": "AddedToken", "content": content, "lstrip": False, "normalized": True, "rstrip": False,
            "single_word": False}


TOKENIZER = {"add_bos_token": False, "add_eos_token": False, "bos_token": added("<｜begin▁of▁sentence｜>"),
             "clean_up_tokenization_spaces": False, "eos_token": added("<｜end▁of▁sentence｜>"), "legacy": True,
             "model_max_length": CONFIG["max_position_embeddings"], "pad_token": added("<｜end▁of▁sentence｜>"),
             "sp_model_kwargs": {}, "unk_token": None, "tokenizer_class": "PreTrainedTokenizerFast"}


def write(folder, changes=()):
    folder = pathlib.Path(folder)
    for name, value in (("config", CONFIG | dict(changes)), ("generation_config", GENERATION), ("tokenizer_config", TOKENIZER)):
        (folder / f"{name}.json").write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(pathlib.Path(__file__).resolve().parents[2] / "models" / "fathom-tiny")
