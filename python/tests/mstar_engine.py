"""An engine around libmla.compat.mstar: its objects have the named attributes alone."""

import enum
from types import SimpleNamespace

import numpy as np
import pytest
from frameworks import TOLERANCE, float64

torch = pytest.importorskip("torch")

from libmla.compat.mstar import FlashInferMLAManager  # noqa: E402

HEADS, RANK, ROPE, PAGE, PAGES, SCALE = 2, 16, 8, 4, 48, 0.3
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAMES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


class KVLayout(enum.Enum):
    NHD = enum.auto()
    MLA = enum.auto()


class Row:
    """One stream in a step: `stored` tokens, then `appended` ones with as many queries."""

    def __init__(self, stored, appended, request=0, label="main"):
        self.stored, self.appended, self.request, self.label = stored, appended, request, label
        self.pages = []


def kv_config(**changed):
    return SimpleNamespace(
        **{
            "layout": KVLayout.MLA,
            "num_qo_heads": HEADS,
            "kv_lora_rank": RANK,
            "qk_rope_head_dim": ROPE,
            "page_size": PAGE,
            "max_num_pages": PAGES,
            "max_seq_len": 64,
            **changed,
        }
    )


def label_plan(rows, form=tuple):
    """What the KV resource plans for one label."""
    last = [(row.stored + row.appended) % PAGE or PAGE for row in rows]
    arrays = [
        np.cumsum([0, *(row.appended for row in rows)]),
        np.cumsum([0, *(len(row.pages) for row in rows)]),
        [page for row in rows for page in row.pages],
        last,
    ]
    tensors = [torch.tensor(np.array(array), dtype=torch.int32) for array in arrays]
    views = [
        SimpleNamespace(
            request_id=row.request,
            label=row.label,
            page_idxs=row.pages,
            length=row.stored + row.appended,
            to_compute=row.appended,
            start=0,
        )
        for row in rows
    ]
    return SimpleNamespace(cpu_indptrs=form(tensors), views=views)


def step_of(rows, causal=True, context_only=False, spans=None):
    spans = [row.appended for row in rows] if spans is None else spans
    segments = [
        SimpleNamespace(request_id=row.request, label=row.label, span=span)
        for row, span in zip(rows, spans, strict=False)
    ]
    return SimpleNamespace(causal=causal, context_only=context_only, segments=segments)


class Engine:
    """A manager and one layer, of which pages that no row has are NaN."""

    def __init__(self, device="cpu", dtype="fp32", cache_dtype=None, seed=0, **options):
        self.device, self.dtype = device, DTYPES[dtype]
        self.tolerance = max(TOLERANCE[dtype], TOLERANCE[cache_dtype or dtype])
        self.random = np.random.default_rng(seed)
        self.manager = FlashInferMLAManager(
            "kv_cache", torch.device(device), self.dtype, kv_config(), sm_scale=SCALE, **options
        )
        layer = torch.full((PAGES, PAGE, RANK + ROPE), torch.nan, device=device)
        self.layer = layer.to(DTYPES[cache_dtype or dtype])
        self.free = list(self.random.permutation(PAGES))

    def rows(self, *lengths, label="main"):
        """Rows of (stored, appended) tokens, in pages of their own that are filled."""
        rows = [Row(*both, request=i, label=label) for i, both in enumerate(lengths)]
        for row in rows:
            self.fill(row)
        return rows

    def fill(self, row):
        """Gives the row the pages that it lacks, and its tokens values."""
        length = row.stored + row.appended
        while len(row.pages) * PAGE < length:
            row.pages.append(int(self.free.pop()))
        values = self.random.standard_normal((length, RANK + ROPE))
        for i in range(length):
            where = row.pages[i // PAGE], i % PAGE
            self.layer[where] = torch.tensor(values[i]).to(self.layer)

    def context(self, plan, lease=None, slot=0, is_preplan=False):
        """`plan`: rows of the label "main", or the plan of every label."""
        plan = plan if isinstance(plan, dict) else {"main": label_plan(plan)}
        return SimpleNamespace(
            slot_lease=lease, slot=slot, is_preplan=is_preplan, plan_results={"kv_cache": plan}
        )

    def plan(self, rows, plan=None, lease=None, slot=0, is_preplan=False, **step):
        ctx = self.context(plan or rows, lease, slot, is_preplan)
        return self.manager.plan(step_of(rows, **step), ctx)

    def queries(self, num_tokens, dtype=None):
        values = self.random.standard_normal((num_tokens, HEADS, RANK + ROPE))
        return torch.tensor(values).to(self.device, dtype or self.dtype)

    def check(self, rows, counts=None, keys=None, causal=True, padding=0, label=None):
        """Runs `counts` queries a row over its first `keys` tokens; the padding stays empty."""
        counts = [row.appended for row in rows] if counts is None else counts
        keys = [row.stored + row.appended for row in rows] if keys is None else keys
        q = self.queries(sum(counts) + padding)
        out, lse = self.manager.run(
            q[..., :RANK], label, self.layer, q_pe=q[..., RANK:], return_lse=True
        )
        self.check_answer(q, out, lse, rows, counts, keys, causal)

    def check_answer(self, q, out, lse, rows, counts, keys, causal=True):
        assert out.dtype == q.dtype
        assert lse.dtype == torch.float32
        expected = torch.zeros(*q.shape[:2], RANK, dtype=torch.float64)
        expected_lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
        token, layer, q = 0, self.layer.cpu().double(), q.cpu().double()
        for row, count, length in zip(rows, counts, keys, strict=True):
            latents = layer[row.pages].flatten(0, 1)[:length]
            for j in range(count):
                seen = latents[: max(0, length - count + j + 1)] if causal else latents
                if len(seen):
                    scores = q[token] @ seen.T * SCALE
                    expected[token] = scores.softmax(dim=-1) @ seen[:, :RANK]
                    expected_lse[token] = scores.logsumexp(dim=-1)
                token += 1
        tolerance = self.tolerance
        np.testing.assert_allclose(float64(out), expected, rtol=tolerance, atol=tolerance)
        lse_tolerance = max(1e-4, 4 * tolerance if self.layer.dtype != self.dtype else 0)
        np.testing.assert_allclose(
            float64(lse), expected_lse, rtol=lse_tolerance, atol=lse_tolerance
        )


def lease(slot, bucket="decode"):
    return SimpleNamespace(slot=slot, bucket=bucket)
