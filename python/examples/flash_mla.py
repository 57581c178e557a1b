"""The decoding loop of FlashMLA's README, and what torch says to it."""

import torch
from libmla.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

device = "cuda" if torch.cuda.is_available() else "cpu"
num_layers, batch, s_q, h_q, h_kv, d, dv, block_size, max_blocks = 3, 4, 2, 16, 1, 576, 512, 64, 8
bf16 = {"dtype": torch.bfloat16, "device": device}
q = torch.randn(num_layers, batch, s_q, h_q, d, **bf16)
kvcache = torch.randn(num_layers, batch * max_blocks, block_size, h_kv, d, **bf16)
block_table = torch.randperm(batch * max_blocks).view(batch, max_blocks).int().to(device)
cache_seqlens = torch.tensor([2, 64, 200, 500], dtype=torch.int32, device=device)

tile_scheduler_metadata, num_splits = get_mla_metadata(cache_seqlens, s_q * h_q // h_kv, h_kv)
num_steps = 3

for _ in range(num_steps):
    for i in range(num_layers):
        o_i, lse_i = flash_mla_with_kvcache(
            q[i],
            kvcache[i],
            block_table,
            cache_seqlens,
            dv,
            tile_scheduler_metadata,
            num_splits,
            causal=True,
        )
        for row, length in enumerate(cache_seqlens.tolist()):
            keys = kvcache[i][block_table[row].long()].flatten(0, 2)[:length].float()
            scores = q[i][row].float().transpose(0, 1) @ keys.T * d**-0.5
            seen = torch.ones(s_q, length, dtype=torch.bool, device=device).tril(length - s_q)
            scores = scores.masked_fill(~seen, float("-inf"))
            expected = (scores.softmax(dim=-1) @ keys[:, :dv]).transpose(0, 1)
            torch.testing.assert_close(o_i[row].float(), expected, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(lse_i[row], scores.logsumexp(dim=-1), rtol=1e-4, atol=1e-3)
    cache_seqlens += 1  # the schedule follows

print(f"{num_steps} steps of {num_layers} layers on {device}, as torch computes them")
