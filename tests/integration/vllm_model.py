"""A tiny Llama with random weights and a tokenizer of its own: enough for a real vLLM engine, made in a second.

The weights are wide (standard deviation 0.5) so that the output depends on the whole context: a wrong KV block shows.
"""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARY = 512
LENGTH = 2048


def make_model(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    hidden, layers, heads, head, inner = 64, 2, 2, 32, 128
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": head, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.5

    tensors = {
        "model.embed_tokens.weight": weights(VOCABULARY, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": weights(VOCABULARY, hidden),
    }
    shapes = {
        "self_attn.q_proj": (heads * head, hidden), "self_attn.k_proj": (heads * head, hidden),
        "self_attn.v_proj": (heads * head, hidden), "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    for layer in range(layers):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = weights(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
    save_file(tensors, str(folder / "model.safetensors"))

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"t{number}": number for number in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "model_max_length": LENGTH,
            }
        )
    )
    return folder
