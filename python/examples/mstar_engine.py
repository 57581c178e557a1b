"""A small engine over the MLA manager: a prefill, then decode steps that are planned early."""

import enum
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from libmla.compat.mstar import FlashInferMLAManager, flashinfer_mla_supports

HEADS, RANK, ROPE, PAGE, PAGES, SCALE = 16, 512, 64, 64, 32, 192**-0.5
device = "cuda" if torch.cuda.is_available() else "cpu"
KVLayout = enum.Enum("KVLayout", ["NHD", "MLA"])
assert flashinfer_mla_supports(RANK, ROPE)


@dataclass
class Request:
    """The engine's account of one stream."""

    request_id: int
    length: int = 0
    pages: tuple = ()


def kv_plan(requests, spans):
    """What the engine's KV resource plans for the label "main"."""
    views, free = [], set(range(PAGES)) - {page for r in requests for page in r.pages}
    for request, span in zip(requests, spans, strict=True):
        while len(request.pages) * PAGE < request.length + span:
            request.pages = (*request.pages, free.pop())
        views.append(
            SimpleNamespace(
                request_id=request.request_id,
                label="main",
                page_idxs=request.pages,
                length=request.length + span,
                to_compute=span,
                start=0,
            )
        )
    arrays = (
        torch.tensor([0, *spans]).cumsum(0),
        torch.tensor([0, *(len(view.page_idxs) for view in views)]).cumsum(0),
        torch.tensor([page for view in views for page in view.page_idxs]),
        torch.tensor([view.length % PAGE or PAGE for view in views]),
    )
    return {"main": SimpleNamespace(cpu_indptrs=[array.int() for array in arrays], views=views)}


config = SimpleNamespace(
    layout=KVLayout.MLA,
    num_qo_heads=HEADS,
    kv_lora_rank=RANK,
    qk_rope_head_dim=ROPE,
    page_size=PAGE,
    max_num_pages=PAGES,
    max_seq_len=PAGE * PAGES,
)
manager = FlashInferMLAManager(
    "kv_cache", torch.device(device), torch.bfloat16, config, sm_scale=SCALE
)
layer = torch.randn(PAGES, PAGE, RANK + ROPE, device=device).bfloat16()  # written by the model
step = SimpleNamespace(causal=True, context_only=False, segments=[])  # as the KV plan has them


def plan(plan_of_kv, slot, is_preplan=False):
    """Plans a step under a lease of the slot."""
    context = SimpleNamespace(
        slot_lease=SimpleNamespace(slot=slot, bucket=None),
        slot=slot,
        is_preplan=is_preplan,
        plan_results={"kv_cache": plan_of_kv},
    )
    return manager.plan(step, context)


def run(requests, spans):
    """Attends with random queries and asks torch about the last one of each request."""
    q = torch.randn(sum(spans), HEADS, RANK + ROPE, device=device).bfloat16()
    out = manager.run(q[..., :RANK], kv_cache_layer=layer, q_pe=q[..., RANK:])
    last = manager.select_last_hidden(out)
    queries = manager.select_last_hidden(q)
    for i, (request, span) in enumerate(zip(requests, spans, strict=True)):
        keys = layer[list(request.pages)].flatten(0, 1)[: request.length + span].float()
        scores = queries[i].float() @ keys.T * SCALE
        expected = scores.softmax(dim=-1) @ keys[:, :RANK]
        torch.testing.assert_close(last[i].float(), expected, rtol=2e-2, atol=2e-2)
        request.length += span


requests, spans = [Request(i) for i in range(3)], [100, 7, 64]
plan(kv_plan(requests, spans), slot=0)
for number in range(1, 6):
    ahead = [
        Request(request.request_id, request.length + span, request.pages)
        for request, span in zip(requests, spans, strict=True)
    ]
    ones = [1] * len(requests)
    next_plan = kv_plan(ahead, ones)
    early = plan(next_plan, slot=number % 2, is_preplan=True)  # while the step before it runs
    run(requests, spans)
    assert plan(next_plan, slot=number % 2) is early  # promoted: no work
    requests, spans = ahead, ones
run(requests, spans)
print(f"{number} decode steps of {len(requests)} requests on {device}, lengths", end=" ")
print([request.length for request in requests])
