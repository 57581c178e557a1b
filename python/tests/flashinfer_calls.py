"""Calls of libmla.compat.flashinfer, and what they must give."""

import ml_dtypes
import numpy as np
import pytest
from frameworks import TOLERANCE, Framework, float64
from libmla import Geometry
from libmla.compat.flashinfer import BatchMLAPagedAttentionWrapper
from problems import Problem, serving_problem

torch = pytest.importorskip("torch")


SMALL = Geometry(num_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, page_size=4, dtype="fp16")
TORCH = Framework("torch")
INDICES = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len")


def reference(problem, q_nope, q_pe, cache):
    """Out and base-2 LSE by torch in float64, from the index arrays."""
    q = torch.cat([torch.tensor(float64(part)) for part in (q_nope, q_pe)], dim=-1)
    cache = torch.tensor(float64(cache))
    indices = problem.indices()
    out = torch.zeros(q_nope.shape, dtype=torch.float64)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float64)
    for i, length in enumerate(indices["kv_len"]):
        rows = slice(*indices["qo_indptr"][i : i + 2])
        pages = indices["kv_indices"][slice(*indices["kv_indptr"][i : i + 2])]
        keys = cache[torch.tensor(pages, dtype=torch.long)].flatten(0, 1)[:length]
        scores = torch.einsum("thd,kd->thk", q[rows], keys) * problem.sm_scale
        if problem.causal:
            count = scores.shape[0]
            last = torch.arange(count) + int(length) - count  # the last key that each query sees
            hidden = torch.arange(int(length)) > last[:, None]
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        lse[rows] = torch.logsumexp(scores, dim=-1) * np.log2(np.e)
        weights = torch.softmax(scores, dim=-1).nan_to_num(0)
        out[rows] = weights @ keys[:, : problem.geometry.kv_lora_rank]
    return out.numpy(), lse.numpy()


def workspace_of(framework, size=1 << 20):
    return framework.from_numpy(np.zeros(size, np.int8))


def dtype_of(framework, dtype):
    """The framework's own name of an element type."""
    if framework.name == "numpy":
        return {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]


def plan(wrapper, problem, framework, device_indices=False, **changed):
    g = problem.geometry
    arrays = problem.indices()
    if device_indices:
        arrays = {name: framework.from_numpy(values) for name, values in arrays.items()}
    elif framework.name == "torch":
        arrays = {name: torch.from_numpy(values) for name, values in arrays.items()}
    dtype = dtype_of(framework, g.dtype)
    arguments = {
        "num_heads": g.num_heads,
        "head_dim_ckv": g.kv_lora_rank,
        "head_dim_kpe": g.qk_rope_head_dim,
        "page_size": g.page_size,
        "causal": problem.causal,
        "sm_scale": problem.sm_scale,
        "q_data_type": dtype,
        "kv_data_type": dtype,
        **changed,
    }
    wrapper.plan(*(arrays[name] for name in INDICES), **arguments)


def parts_of(problem, cache, separate):
    """ckv and kpe: slices of one cache row, or tensors of their own."""
    rank = problem.geometry.kv_lora_rank
    parts = cache[..., :rank], cache[..., rank:]
    if not separate:
        return parts
    return tuple(
        part.copy() if isinstance(part, np.ndarray) else part.contiguous() for part in parts
    )


def check(problem, out, lse, tensors, rows=slice(None)):
    expected = reference(problem, *tensors)
    tolerance = TOLERANCE[problem.geometry.dtype]
    np.testing.assert_allclose(float64(out)[rows], expected[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(float64(lse)[rows], expected[1], rtol=1e-4, atol=1e-4)


def planned_wrapper(framework, problem=None, **options):
    problem = problem or serving_problem(SMALL)
    wrapper = BatchMLAPagedAttentionWrapper(workspace_of(framework), **options)
    plan(wrapper, problem, framework)
    q_nope, q_pe, cache = problem.tensors(framework)
    return problem, wrapper, (q_nope, q_pe, *parts_of(problem, cache, separate=False)), cache


def decode(lengths, seed, queries=1):
    counts = [-(-length // 4) for length in lengths]
    order = list(np.random.default_rng(seed).permutation(64))
    return Problem(
        geometry=SMALL,
        queries=[queries] * len(lengths),
        lengths=lengths,
        pages=[[int(order.pop()) for _ in range(count)] for count in counts],
        num_pages=64,
        sm_scale=0.3,
        causal=True,
        seed=seed,
    )
