"""A serving engine in eager PyTorch: continuous batching over one pool, each step planned once."""

import libmla
import torch
from libmla import AttentionStep, KvStep, Segment, Step

LAYERS, HEADS, RANK, ROPE, PROMPT, REPLY = 4, 16, 512, 64, 100, 8
device = "cuda" if torch.cuda.is_available() else "cpu"

pool = libmla.LatentPool(
    num_layers=LAYERS,
    num_pages=48,
    page_size=16,
    kv_lora_rank=RANK,
    qk_rope_head_dim=ROPE,
    device=device,
)
kv = libmla.KvResource(pool)
attention = libmla.AttentionResource(kv, num_heads=HEADS, sm_scale=192**-0.5)
runner = libmla.StepRunner([kv, attention])


def model(num_tokens):
    """Stands for a model: each layer makes its latents and queries, writes and attends."""
    for layer in range(LAYERS):
        latent = torch.randn(num_tokens, RANK + ROPE, device=device).bfloat16()
        q = torch.randn(num_tokens, HEADS, RANK + ROPE, device=device).bfloat16()
        kv.write(layer, latent[:, :RANK], latent[:, RANK:])
        out = attention.run(q_nope=q[..., :RANK], q_pe=q[..., RANK:], layer=layer)
    hidden = out.flatten(1)
    last = hidden.new_empty(len(running), hidden.shape[1])
    attention.select_last_hidden(hidden, last)  # one row a request, for the sampler
    return last


waiting = list(range(20))
running = {}  # request -> tokens that it still computes: its prompt, then one at a time
room = 8  # requests at a time
done = steps = 0
while waiting or running:
    while waiting and len(running) < room:
        kv.open(waiting[0], PROMPT)
        running[waiting.pop(0)] = PROMPT
    step = Step(
        {
            "kv": KvStep(segments=[Segment(request, span) for request, span in running.items()]),
            "attention": AttentionStep(),
        }
    )
    if not runner.admit(step):  # pages are short: the latest request waits again
        request = list(running)[-1]
        kv.remove(request)
        del running[request]
        waiting.insert(0, request)
        room = len(running)
        continue
    runner.plan(step)
    model(sum(running.values()))
    runner.commit()
    steps += 1
    for request in list(running):
        running[request] = 1
        if kv.length(request) == PROMPT + REPLY:
            kv.remove(request)
            del running[request]
            done, room = done + 1, 8

assert kv.check().free == pool.num_pages
print(f"{done} requests in {steps} steps by {attention.kernel} on {pool.device}")
