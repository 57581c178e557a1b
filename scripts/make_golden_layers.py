#!/usr/bin/env python3
"""Makes the layer files of tests/layer/golden from the public `transformers` package.

    python3 -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers safetensors
    /tmp/golden/bin/python scripts/make_golden_layers.py --out tests/layer/golden [NAME...]

Each file holds a small random attention module (weights and `hidden_states` [T, hidden] in bf16)
and what it gives in one causal pass over positions 0 .. T-1, computed in float64 and rounded to
float32 (`attn_output` [T, hidden]). The metadata holds `model_type`, `scaling` (the softmax scale
that the module used) and `config` (JSON with the model's own key names).
"""

import argparse
import importlib
import json
import math
import pathlib
import zlib

import torch
import transformers
from safetensors.torch import save_file

SMALL = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=96,
             kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
FULL = dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=192,
            kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def yarn(theta, factor, context, mscale, mscale_all_dim):
    return dict(rope_type="yarn", rope_theta=theta, factor=factor, beta_fast=32, beta_slow=1,
                mscale=mscale, mscale_all_dim=mscale_all_dim,
                original_max_position_embeddings=context)


# name -> the module's package, its class, tokens, configuration, and what the written configuration
# says otherwise: keys that transformers' own configuration lacks, older spellings.
CASES = {
    "deepseek_v3_small": ("deepseek_v3", "DeepseekV3", 40, SMALL, {}),
    "deepseek_v3_yarn": ("deepseek_v3", "DeepseekV3", 150,
                         FULL | dict(rope_parameters=yarn(1e4, 40.0, 4096, 1.0, 1.0)), {}),
    "deepseek_v2_lite": ("deepseek_v2", "DeepseekV2", 90, FULL | dict(q_lora_rank=None), {}),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLite", 60,
                      FULL | dict(hidden_size=384, qk_nope_head_dim=192, v_head_dim=256), {}),
    # The latents are scaled by sqrt(hidden / rank).
    "longcat_flash": ("longcat_flash", "LongcatFlash", 40, SMALL | dict(head_dim=16),
                      dict(mla_scale_q_lora=True, mla_scale_kv_lora=True)),
    # Pairs (i, i + R/2); mscale differs from mscale_all_dim, so that cos and sin are scaled too. The
    # context is short, so that fast, slow and mixed frequencies all turn within T.
    "half_layout_yarn": ("deepseek_v3", "DeepseekV3", 48,
                         SMALL | dict(rope_interleave=False,
                                      max_position_embeddings=512,
                                      rope_parameters=yarn(1e4, 8.0, 64, 1.0, 0.6)), {}),
    # Older spelling, as Kimi K2 publishes it.
    "kimi_k2_old_keys": ("deepseek_v3", "DeepseekV3", 48,
                         SMALL | dict(max_position_embeddings=2048,
                                      rope_parameters=yarn(5e4, 32.0, 64, 1.0, 1.0)),
                         dict(model_type="kimi_k2", rope_parameters=None, rope_theta=5e4,
                              rope_scaling=dict(type="yarn", factor=32.0, beta_fast=32, beta_slow=1,
                                                mscale=1.0, mscale_all_dim=1.0,
                                                original_max_position_embeddings=64))),
    # No position encoding: no rope part at all, and a rope part that does not turn.
    "nope_width_0": ("deepseek_v3", "DeepseekV3", 40, SMALL | dict(qk_rope_head_dim=0), {}),
    "nope_not_turned": ("deepseek_v3", "DeepseekV3", 40, SMALL | dict(q_lora_rank=None),
                        dict(model_type="kimi_linear", mla_use_nope=True)),
}


def position_embeddings(module, classes, config, written, hidden, num_tokens):
    """cos and sin as the module takes them; the identity where nothing turns."""
    if written.get("mla_use_nope") or config.qk_rope_head_dim == 0:
        shape = (1, num_tokens, config.qk_rope_head_dim)
        return torch.ones(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    rotary = getattr(module, classes + "RotaryEmbedding")(config)
    return rotary(hidden, torch.arange(num_tokens)[None])


def random_weights(attention, generator):
    """Weights that keep activations near 1 and scores at a few units, and norms near 1."""
    for name, weight in attention.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        if "layernorm" in name:
            value = 1 + 0.1 * noise
        else:
            value = noise * 1.5 / math.sqrt(weight.shape[1])
        weight.data = value.to(torch.bfloat16).to(torch.float64)


def make(name, out):
    package, classes, num_tokens, values, written = CASES[name]
    config = getattr(transformers, classes + "Config")(
        vocab_size=128, num_hidden_layers=1, attn_implementation="eager", **values)
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    class_name = "LongcatFlashMLA" if classes == "LongcatFlash" else classes + "Attention"
    attention = getattr(module, class_name)(config, layer_idx=0).double().eval()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    random_weights(attention, generator)
    hidden = torch.randn(1, num_tokens, config.hidden_size, generator=generator,
                         dtype=torch.float64).to(torch.bfloat16).to(torch.float64)
    mask = torch.full((num_tokens, num_tokens), -math.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        output = attention(hidden_states=hidden, attention_mask=mask,
                           position_embeddings=position_embeddings(
                               module, classes, config, written, hidden, num_tokens))[0]
    config_json = config.to_dict() | written
    tensors = {key: value.to(torch.bfloat16) for key, value in attention.state_dict().items()}
    tensors["hidden_states"] = hidden[0].to(torch.bfloat16)
    tensors["attn_output"] = output[0].to(torch.float32)
    save_file({key: value.contiguous() for key, value in tensors.items()},
              out / f"{name}.safetensors",
              {"model_type": config_json["model_type"], "scaling": repr(float(attention.scaling)),
               "config": json.dumps(config_json)})
    print(f"{name}: T {num_tokens}, output std {output.std():.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all where none is given")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FOLDER")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    for name in arguments.names or CASES:
        make(name, arguments.out)


if __name__ == "__main__":
    main()
