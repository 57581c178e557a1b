"""Microseconds of the host in the calls of the Python package, over a batch of one token.

    python python/bench/host_time.py [--device cpu] [--json FILE] [--note TEXT]

On the CPU one processor is used, and the time of a run has the attention itself in it, over three
keys of 24 columns. On CUDA runs are queued, and the queue is emptied between rounds, outside of the
measured time.
"""

import argparse
import datetime
import json
import os
import platform
import time
from pathlib import Path

import libmla
import numpy as np
import torch
from libmla import AttentionStep, Geometry, KvStep, Limits, PagedAttention, Segment, Step
from libmla.compat import flash_mla, flashinfer, mstar

HEADS, PAGE, PAGES = 4, 4, 8


class Batch:
    """One token of one request with three keys, in tensors of PyTorch."""

    def __init__(self, device):
        self.device = device
        on_cuda = device.startswith("cuda")
        self.dtype = torch.bfloat16 if on_cuda else torch.float32
        self.rank, self.rope = (512, 64) if on_cuda else (16, 8)
        options = {"dtype": self.dtype, "device": device}
        self.q = torch.randn(1, HEADS, self.rank + self.rope, **options)
        self.cache = torch.randn(PAGES, PAGE, self.rank + self.rope, **options)
        self.q_nope, self.q_pe = self.q.split([self.rank, self.rope], -1)
        self.ckv, self.kpe = self.cache.split([self.rank, self.rope], -1)
        self.out = torch.empty(1, HEADS, self.rank, **options)
        self.lse = torch.empty(1, HEADS, device=device)
        self.qo_indptr = self.kv_indptr = torch.tensor([0, 1], dtype=torch.int32)
        self.kv_indices = self.kv_len = torch.tensor([3], dtype=torch.int32)

    def arrays(self, names, convert):
        return {name: convert(getattr(self, name)) for name in names.split()}

    def shape(self):
        return {"kv_lora_rank": self.rank, "qk_rope_head_dim": self.rope, "page_size": PAGE}


def attention_calls(batch, convert):
    """PagedAttention with the arrays that `convert` makes of PyTorch's."""
    attention = PagedAttention(
        geometry=Geometry(num_heads=HEADS, **batch.shape(), dtype=batch.dtype),
        num_pages=PAGES,
        device=batch.device,
        limits=Limits(max_rows=8, max_tokens=8, max_listed_pages=64),
    )
    indices = batch.arrays("qo_indptr kv_indptr kv_indices kv_len", convert)
    tensors = batch.arrays("q_nope q_pe ckv kpe out lse", convert)
    return {
        "PagedAttention.plan": lambda: attention.plan(**indices, sm_scale=1.0),
        "PagedAttention.run": lambda: attention.run(**tensors),
    }


def resource_calls(batch):
    """The resources of an engine, in a step of one row."""
    pool = libmla.LatentPool(
        num_pages=PAGES, **batch.shape(), dtype=batch.dtype, device=batch.device
    )
    kv = libmla.KvResource(pool)
    attention = libmla.AttentionResource(kv, num_heads=HEADS, sm_scale=1.0)
    runner = libmla.StepRunner([kv, attention])
    kv.open(0)
    rows = batch.ckv[0, :1], batch.kpe[0, :1]
    queries = batch.arrays("q_nope q_pe out lse", lambda tensor: tensor)

    def plan():
        runner.abandon()
        step = Step({"kv": KvStep(segments=[Segment(0, 1)]), "attention": AttentionStep()})
        runner.admit(step)
        runner.plan(step)

    step = Step({"kv": KvStep(), "attention": AttentionStep()})
    runner.admit(step)  # which the first plan abandons
    return {
        "Step, StepRunner.admit, plan, abandon": plan,
        "KvResource.write": lambda: kv.write(0, *rows),
        "AttentionResource.run": lambda: attention.run(**queries, layer=0),
    }


def compatible_calls(batch):
    """The interfaces of libmla.compat, with outputs of their own where those have them."""
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(
        torch.empty(1 << 24, dtype=torch.uint8, device=batch.device)
    )
    arrays = batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_len
    widths = HEADS, batch.rank, batch.rope, PAGE
    engine = mstar.FlashInferMLAWrapper(
        None, *widths, sm_scale=1.0, max_num_pages=PAGES, device=batch.device
    )
    schedule, _ = flash_mla.get_mla_metadata()
    q, cache = batch.q[:, None], batch.cache[:, :, None]
    table = batch.kv_indices[None].to(batch.device)
    lengths = batch.kv_len.to(batch.device)
    parts = batch.q_nope, batch.q_pe
    return {
        "flashinfer plan": lambda: wrapper.plan(
            *arrays, *widths, False, 1.0, batch.dtype, batch.dtype
        ),
        "flashinfer run": lambda: wrapper.run(*parts, batch.ckv, batch.kpe, out=batch.out),
        "mstar plan": lambda: engine.plan(*arrays, dtype=batch.dtype),
        "mstar run": lambda: engine.run(*parts, batch.cache),
        "flash_mla_with_kvcache, planned": lambda: flash_mla.flash_mla_with_kvcache(
            q, cache, table, lengths, batch.rank, schedule
        ),
    }


def measure(call, device, rounds, repeats):
    """Microseconds of a call: quartiles over rounds of so many repeats."""
    times = []
    for _ in range(rounds + 1):  # the first warms up
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - begin) / repeats * 1e6)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
    first, median, third = np.percentile(times[1:], [25, 50, 75])
    return {"median_us": median, "first_quartile_us": first, "third_quartile_us": third}


def main():
    """Measures every call and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="where the figures go, too")
    parser.add_argument("--note", default="", help="kept in the figures")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=200, help="calls of a round")
    options = parser.parse_args()
    on_cuda = options.device.startswith("cuda")
    if not on_cuda:  # before the threads of the CPU are started
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        torch.set_num_threads(1)

    batch = Batch(options.device)
    groups = {"torch": attention_calls(batch, lambda tensor: tensor)}
    if not on_cuda:
        groups["numpy"] = attention_calls(batch, lambda tensor: tensor.numpy())
    groups["torch"] |= resource_calls(batch) | compatible_calls(batch)
    results = []
    for arrays, calls in groups.items():
        for name, call in calls.items():
            times = measure(call, options.device, options.rounds, options.repeats)
            results.append({"call": name, "arrays": arrays, **times})
            print(f"{times['median_us']:8.2f} us  {name} ({arrays})")
    figures = {
        "version": libmla.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "note": options.note,
        "device": torch.cuda.get_device_name(options.device) if on_cuda else processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "rounds": options.rounds,
        "repeats": options.repeats,
        "results": results,
    }
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def processor():
    """The CPU's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


if __name__ == "__main__":
    main()
