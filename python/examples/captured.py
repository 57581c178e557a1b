"""A decode loop in captured graphs: one for each bucket and slot, replayed for every later step."""

import libmla
import torch
from libmla import AttentionStep, Bucket, KvStep, Segment, SlotLease, Step

LAYERS, HEADS, RANK, ROPE, PROMPT = 4, 16, 512, 64, 100
BUCKETS = [Bucket(num_rows=n, num_tokens=n) for n in (1, 2, 4, 8)]

pool = libmla.LatentPool(
    num_layers=LAYERS,
    num_pages=128,
    page_size=16,
    kv_lora_rank=RANK,
    qk_rope_head_dim=ROPE,
    device="cuda",
)
kv = libmla.KvResource(pool)
attention = libmla.AttentionResource(kv, num_heads=HEADS, sm_scale=192**-0.5, capture=True)
runner = libmla.StepRunner([kv, attention])
runner.size_graph_buffers([(bucket, 128) for bucket in BUCKETS])

# What captured steps read and write stays where it is.
latent = torch.randn(LAYERS, 800, RANK + ROPE, device="cuda").bfloat16()
query = torch.randn(LAYERS, 800, HEADS, RANK + ROPE, device="cuda").bfloat16()
out = torch.zeros(LAYERS, 800, HEADS, RANK, device="cuda").bfloat16()


def model(num_tokens):
    """Stands for a model: each layer writes its latents and attends."""
    for layer in range(LAYERS):
        rows, q = latent[layer, :num_tokens], query[layer, :num_tokens]
        kv.write(layer, rows[:, :RANK], rows[:, RANK:])
        attention.run(
            q_nope=q[..., :RANK], q_pe=q[..., RANK:], out=out[layer, :num_tokens], layer=layer
        )


def plan(spans, lease):
    """Plans a step that appends so many rows to each request."""
    segments = [Segment(request, span) for request, span in spans.items()]
    step = Step({"kv": KvStep(segments=segments), "attention": AttentionStep()})
    assert runner.admit(step)
    runner.plan(step, lease)


graphs = {}
requests = list(range(8))
for request in requests:
    kv.open(request, PROMPT)
plan(dict.fromkeys(requests, PROMPT), None)  # the prefill runs eagerly
model(len(requests) * PROMPT)
runner.commit()

for step, active in enumerate([8, 8, 7, 5, 4, 2, 2, 1]):  # some end early
    while len(requests) > active:
        kv.remove(requests.pop())
    bucket = next(bucket for bucket in BUCKETS if bucket.num_rows >= len(requests))
    lease = SlotLease(slot=step % 2, walk="decode", bucket=bucket)
    plan(dict.fromkeys(requests, 1), lease)
    if (lease.slot, bucket) not in graphs:
        graphs[lease.slot, bucket] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[lease.slot, bucket]):
            model(bucket.num_tokens)
    graphs[lease.slot, bucket].replay()

    replayed = out[:, :active].clone()
    model(bucket.num_tokens)  # the same plan once more, eagerly: the very same bits
    assert torch.equal(out[:, :active], replayed)
    runner.commit()

print(f"{step + 1} steps in {len(graphs)} graphs by {attention.kernel} on {pool.device}")
