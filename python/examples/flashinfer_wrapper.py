"""The example of FlashInfer's documentation of its MLA wrapper, and what torch says to it."""

import libmla.compat.flashinfer as flashinfer
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
num_local_heads, batch_size, kv_len = 128, 114, 999
head_dim_ckv, head_dim_kpe, page_size = 512, 64, 1

mla_wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
    torch.empty(128 * 1024 * 1024, dtype=torch.int8).to(device), backend="fa2"
)
q_indptr = torch.arange(0, batch_size + 1).to(device).int()  # one query a request
kv_lens = torch.full((batch_size,), kv_len, dtype=torch.int32).to(device)
kv_indptr = torch.arange(0, batch_size + 1).to(device).int() * kv_len
kv_indices = torch.arange(0, batch_size * kv_len).to(device).int()
bf16 = {"dtype": torch.bfloat16, "device": device}
q_nope = torch.randn(batch_size, num_local_heads, head_dim_ckv, **bf16)
q_pe = torch.zeros(batch_size, num_local_heads, head_dim_kpe, **bf16)
ckv = torch.randn(batch_size * kv_len, page_size, head_dim_ckv, **bf16)
kpe = torch.zeros(batch_size * kv_len, page_size, head_dim_kpe, **bf16)
sm_scale = 1.0 / ((128 + 64) ** 0.5)  # of the head before absorption
mla_wrapper.plan(
    q_indptr,
    kv_indptr,
    kv_indices,
    kv_lens,
    num_local_heads,
    head_dim_ckv,
    head_dim_kpe,
    page_size,
    False,  # causal
    sm_scale,
    q_nope.dtype,
    ckv.dtype,
)
o = mla_wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=False)

keys = torch.cat([ckv, kpe], dim=-1).view(batch_size, kv_len, -1).float()
scores = torch.cat([q_nope, q_pe], dim=-1).float() @ keys.mT * sm_scale
expected = torch.softmax(scores, dim=-1) @ keys[..., :head_dim_ckv]
torch.testing.assert_close(o.float(), expected, rtol=2e-2, atol=2e-2)
print(f"{list(o.shape)} on {device}, as torch computes it")
