import libmla
import torch

# One request with 100 tokens in two pages of a cache layer [128 pages, 64 tokens, 512 + 64], of
# which the last 4 ask. The scale is that of the model's head before it is absorbed.
geometry = libmla.Geometry(num_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, page_size=64)
cache, q = torch.randn(128, 64, 576).bfloat16(), torch.randn(4, 16, 576).bfloat16()
attention = libmla.PagedAttention(geometry=geometry, num_pages=128, device=cache.device)
attention.plan(
    qo_indptr=[0, 4], kv_indptr=[0, 2], kv_indices=[7, 3], kv_len=[100], sm_scale=192**-0.5
)
(q_nope, q_pe), (ckv, kpe) = q.split([512, 64], -1), cache.split([512, 64], -1)
print(attention.kernel, attention.run(q_nope=q_nope, q_pe=q_pe, ckv=ckv, kpe=kpe).shape)
