"""Attention problems and their answer in float64, by plain loops over each request's own keys."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from libmla import Geometry


@dataclass
class Problem:
    """A batch over a cache whose unused pages are NaN."""

    geometry: Geometry
    queries: list[int]  # of each request
    lengths: list[int]  # keys of each request
    pages: list[list[int]]
    num_pages: int
    sm_scale: float
    causal: bool
    seed: int

    def indices(self):
        """qo_indptr, kv_indptr, kv_indices, kv_len: int32."""
        starts = np.cumsum([0, *self.queries]), np.cumsum([0, *map(len, self.pages)])
        listed = [page for pages in self.pages for page in pages]
        return {
            name: np.array(values, np.int32)
            for name, values in zip(
                ("qo_indptr", "kv_indptr", "kv_indices", "kv_len"),
                (*starts, listed, self.lengths),
                strict=True,
            )
        }

    def tensors(self, framework):
        """q_nope, q_pe and the cache, rounded to the geometry's dtype."""
        g, random = self.geometry, np.random.default_rng(self.seed)
        tokens = sum(self.queries)
        cache = np.full((self.num_pages, g.page_size, g.latent_width), np.nan)
        for pages, length in zip(self.pages, self.lengths, strict=True):
            for position in range(length):
                row = random.standard_normal(g.latent_width)
                cache[pages[position // g.page_size], position % g.page_size] = row
        shape = (tokens, g.num_heads)
        return (
            framework.array(random.standard_normal((*shape, g.kv_lora_rank)), g.dtype),
            framework.array(random.standard_normal((*shape, g.qk_rope_head_dim)), g.dtype),
            framework.array(cache, g.dtype),
        )

    def answer(self, q_nope, q_pe, cache):
        """Out and natural LSE in float64, from float64 inputs."""
        g = self.geometry
        out, lse, token = np.zeros(q_nope.shape), np.full(q_nope.shape[:2], -np.inf), 0
        for count, length, pages in zip(self.queries, self.lengths, self.pages, strict=True):
            keys = cache[pages].reshape(-1, g.latent_width)[:length]
            for j in range(count):
                seen = keys[: max(0, length - count + j + 1)] if self.causal else keys
                if len(seen):
                    query = np.concatenate([q_nope[token], q_pe[token]], axis=1)
                    scores = query @ seen.T * self.sm_scale
                    top = scores.max(axis=1, keepdims=True)
                    weights = np.exp(scores - top)
                    total = weights.sum(axis=1, keepdims=True)
                    out[token] = weights / total @ seen[:, : g.kv_lora_rank]
                    lse[token] = (np.log(total) + top)[:, 0]
                token += 1
        return out, lse


@st.composite
def problems(draw, dtypes=("fp32", "bf16", "fp16")):
    """Problems of any small shape, empty requests and rope width 0 among them."""
    geometry = Geometry(
        num_heads=draw(st.integers(1, 5)),
        kv_lora_rank=draw(st.sampled_from([1, 7, 16, 40])),
        qk_rope_head_dim=draw(st.sampled_from([0, 1, 8])),
        page_size=draw(st.sampled_from([1, 3, 16])),
        dtype=draw(st.sampled_from(dtypes)),
    )
    batch = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=4))
    counts = [-(-length // geometry.page_size) for _, length in batch]
    num_pages = sum(counts) + draw(st.integers(1, 3))
    free = iter(draw(st.permutations(range(num_pages))))
    return Problem(
        geometry=geometry,
        queries=[queries for queries, _ in batch],
        lengths=[length for _, length in batch],
        pages=[[next(free) for _ in range(count)] for count in counts],
        num_pages=num_pages,
        sm_scale=draw(st.sampled_from([0.05, 0.3])),
        causal=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def serving_problem(geometry, seed=0):
    """A prefill, a decode, a verify of 3 drafts and a request without keys."""
    lengths = [40, 130, 70, 0]
    counts = [-(-length // geometry.page_size) for length in lengths]
    order = list(np.random.default_rng(seed).permutation(sum(counts) + 2))
    return Problem(
        geometry=geometry,
        queries=[40, 1, 4, 1],
        lengths=lengths,
        pages=[[int(order.pop()) for _ in range(count)] for count in counts],
        num_pages=sum(counts) + 2,
        sm_scale=0.1,
        causal=True,
        seed=seed,
    )
