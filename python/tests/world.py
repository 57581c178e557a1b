"""One object of each class with a planned step of one token, and good arguments for its calls."""

import pytest
from libmla import (
    AttentionResource,
    AttentionStep,
    Geometry,
    KvResource,
    KvStep,
    LatentPool,
    PagedAttention,
    Segment,
    Step,
    StepRunner,
)

torch = pytest.importorskip("torch")

from libmla.compat import flash_mla, flashinfer, mstar  # noqa: E402  # they need PyTorch


class World:
    """One object of each class, with a step of one row planned, and good arguments."""

    def __init__(self):
        self.geometry = Geometry(
            num_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, page_size=4, dtype="fp32"
        )
        self.pool = LatentPool(
            num_pages=4, page_size=4, kv_lora_rank=16, qk_rope_head_dim=8, dtype="fp32"
        )
        self.kv = KvResource(self.pool)
        self.resource = AttentionResource(self.kv, num_heads=2, sm_scale=1.0)
        self.runner = StepRunner([self.kv, self.resource])
        self.kv.open(7)
        self.kv.open(8)
        self.step = Step({"kv": KvStep(segments=[Segment(7, 1)]), "attention": AttentionStep()})
        self.runner.admit(self.step)
        self.runner.plan(self.step)
        self.attention = PagedAttention(geometry=self.geometry, num_pages=5)
        self.indices = {
            "qo_indptr": [0, 1],
            "kv_indptr": [0, 1],
            "kv_indices": [2],
            "kv_len": [3],
        }
        self.attention.plan(**self.indices, sm_scale=1.0)
        self.q_nope, self.q_pe = torch.zeros(1, 2, 16), torch.zeros(1, 2, 8)
        cache = torch.zeros(5, 4, 24)
        self.ckv, self.kpe = cache[..., :16], cache[..., 16:]
        self.ckv_rows, self.kpe_rows = torch.zeros(1, 16), torch.zeros(1, 8)
        self.out, self.lse = torch.zeros(1, 2, 16), torch.zeros(1, 2)

    def queries(self):
        return {"q_nope": self.q_nope, "q_pe": self.q_pe, "out": self.out, "lse": self.lse}


def flash_mla_call(world):
    schedule, _ = flash_mla.get_mla_metadata()
    return {
        "q": torch.zeros(1, 1, 2, 24),
        "k_cache": torch.zeros(2, 4, 1, 24),
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "cache_seqlens": torch.ones(1, dtype=torch.int32),
        "head_dim_v": 16,
        "tile_scheduler_metadata": schedule,
    }


def flashinfer_plan(world):
    return {
        "qo_indptr": torch.tensor([0, 1], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 1], dtype=torch.int32),
        "kv_indices": torch.tensor([2], dtype=torch.int32),
        "kv_len_arr": torch.tensor([3], dtype=torch.int32),
        "num_heads": 2,
        "head_dim_ckv": 16,
        "head_dim_kpe": 8,
        "page_size": 4,
        "causal": False,
        "sm_scale": 1.0,
        "q_data_type": torch.float32,
        "kv_data_type": torch.float32,
    }


def flashinfer_wrapper(planned=True):
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.zeros(64))
    if planned:
        wrapper.plan(**flashinfer_plan(None))
        world = World()
        wrapper.run(world.q_nope, world.q_pe, world.ckv, world.kpe)
    return wrapper


def mstar_wrapper(planned=True):
    wrapper = mstar.FlashInferMLAWrapper(None, 2, 16, 8, 4, 1.0, device="cpu")
    if planned:
        wrapper.plan(**mstar_plan(None))
    return wrapper


def mstar_plan(world):
    return {
        "qo_indptr": torch.tensor([0, 1], dtype=torch.int32),
        "paged_kv_indptr": torch.tensor([0, 1], dtype=torch.int32),
        "paged_kv_indices": torch.tensor([2], dtype=torch.int32),
        "paged_kv_last_page_len": torch.tensor([3], dtype=torch.int32),
        "dtype": torch.float32,
    }
