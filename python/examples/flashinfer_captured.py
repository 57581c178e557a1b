"""FlashInfer's wrapper in graph mode: one captured decode of 4 requests, replayed as they grow."""

import torch
from libmla.compat.flashinfer import BatchMLAPagedAttentionWrapper

HEADS, RANK, ROPE, PAGE, BATCH, MAX_PAGES = 16, 512, 64, 64, 4, 32
bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
int32 = {"dtype": torch.int32, "device": "cuda"}

wrapper = BatchMLAPagedAttentionWrapper(
    torch.empty(128 << 20, dtype=torch.uint8, device="cuda"),
    use_cuda_graph=True,
    qo_indptr=torch.empty(BATCH + 1, **int32),
    kv_indptr=torch.empty(BATCH + 1, **int32),
    kv_indices=torch.empty(MAX_PAGES, **int32),
    kv_len_arr=torch.empty(BATCH, **int32),
)
q_nope, q_pe = torch.randn(BATCH, HEADS, RANK, **bf16), torch.randn(BATCH, HEADS, ROPE, **bf16)
cache = torch.randn(MAX_PAGES, PAGE, RANK + ROPE, **bf16)  # passed as slices, never joined
ckv, kpe = cache[..., :RANK], cache[..., RANK:]
out = torch.empty_like(q_nope)
pages = torch.randperm(MAX_PAGES, dtype=torch.int32).view(BATCH, -1)  # 8 of each request


def plan(lengths):
    """Host tensors are read where they are."""
    counts = [-(-length // PAGE) for length in lengths]
    wrapper.plan(
        torch.arange(BATCH + 1, dtype=torch.int32),
        torch.tensor([0, *counts]).cumsum(0).int(),
        torch.cat([row[:count] for row, count in zip(pages, counts, strict=True)]),
        torch.tensor(lengths, dtype=torch.int32),
        *(HEADS, RANK, ROPE, PAGE),
        causal=True,
        sm_scale=192**-0.5,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )


lengths = [1, 100, 200, 300]
plan(lengths)
wrapper.run(q_nope, q_pe, ckv, kpe, out=out)  # the first run allocates: before the capture
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    wrapper.run(q_nope, q_pe, ckv, kpe, out=out)

for _ in range(5):
    lengths = [length + 40 for length in lengths]
    plan(lengths)
    graph.replay()
    for i, length in enumerate(lengths):
        keys = cache[pages[i].cuda()].flatten(0, 1)[:length].float()
        scores = torch.cat([q_nope[i], q_pe[i]], dim=-1).float() @ keys.T * 192**-0.5
        expected = torch.softmax(scores, dim=-1) @ keys[:, :RANK]
        torch.testing.assert_close(out[i].float(), expected, rtol=2e-2, atol=2e-2)
print(f"5 replays, up to {max(lengths)} keys a request")
