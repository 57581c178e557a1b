"""The wrapper of libmla.compat.mstar by itself."""

import pytest

torch = pytest.importorskip("torch")

from libmla.compat.mstar import FlashInferMLAWrapper  # noqa: E402
from mstar_engine import (  # noqa: E402
    HEADS,
    NAMES,
    PAGE,
    PAGES,
    RANK,
    ROPE,
    SCALE,
    Engine,
    label_plan,
)


class Wrapper:
    """A FlashInferMLAWrapper over an engine's layer."""

    def __init__(self, engine, **options):
        self.engine = engine
        self.wrapper = FlashInferMLAWrapper(
            torch.empty(1024, dtype=torch.uint8, device=engine.device),
            num_qo_heads=HEADS,
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
            page_size=PAGE,
            sm_scale=SCALE,
            device=torch.device(engine.device),
            **options,
        )

    def plan(self, rows, **options):
        arrays = label_plan(rows).cpu_indptrs
        self.wrapper.plan(*arrays, **{"dtype": self.engine.dtype, **options})

    def check(self, rows, causal=True):
        q = self.engine.queries(sum(row.appended for row in rows))
        layer = self.engine.layer
        out, lse = self.wrapper.run(q[..., :RANK], q[..., RANK:], layer, return_lse=True)
        only = self.wrapper.run(q[..., :RANK], q[..., RANK:], layer)
        assert torch.equal(only, out)
        counts = [row.appended for row in rows]
        keys = [row.stored + row.appended for row in rows]
        self.engine.check_answer(q, out, lse, rows, counts, keys, causal)


def test_the_wrapper_by_itself(engine):
    wrapper = Wrapper(engine)
    for lengths, causal in ([(5, 1), (9, 2)], True), ([(5, 4), (0, 0), (3, 60)], False):
        rows = engine.rows(*lengths)
        wrapper.plan(rows, causal=causal)
        wrapper.check(rows, causal)


def test_the_wrapper_takes_arrays_of_the_device_and_dtypes_by_name(engine):
    wrapper, rows = Wrapper(engine, max_num_pages=PAGES), engine.rows((5, 1), (9, 2))
    arrays = [array.to(engine.device) for array in label_plan(rows).cpu_indptrs]
    named = dict(zip(NAMES, arrays, strict=True))
    wrapper.wrapper.plan(**named, dtype=torch.bfloat16, kv_dtype=torch.float32)
    wrapper.check(rows)


def test_the_wrapper_in_graph_mode_has_rows_for_life(engine):
    wrapper = Wrapper(engine, batch_size=2, max_num_pages=PAGES, use_cuda_graph=True)
    rows = engine.rows((5, 1), (9, 2), (3, 3))
    for some in (rows[:2], rows[:1], rows[1:]):
        wrapper.plan(some)
        wrapper.check(some)
        assert wrapper.wrapper.kv_len_buf.shape == (2,)
    with pytest.raises(ValueError, match=r"PagedAttention::plan: .*expected .*, got"):
        wrapper.plan(rows)
    wrapper.check(rows[1:])


def test_the_wrapper_refuses(engine):
    with pytest.raises(ValueError, match=r"batch_size, max_num_pages: expected both"):
        Wrapper(engine, use_cuda_graph=True)
    wrapper, rows = Wrapper(engine), engine.rows((5, 1), (9, 2))
    wrapper.plan(rows, window_left=None, non_blocking=False)
    with pytest.raises(NotImplementedError, match=r"FlashInferMLAWrapper.plan: window_left is not"):
        wrapper.plan(rows, window_left=3)
    with pytest.raises(NotImplementedError, match="FP8"):
        Wrapper(engine).plan(rows, kv_dtype=torch.float8_e4m3fn)
    arrays = list(label_plan(rows).cpu_indptrs)
    arrays[0] = arrays[0].long()
    with pytest.raises(ValueError, match=r"qo_indptr: expected one dimension, int32, got \[3\] in"):
        wrapper.wrapper.plan(*arrays)
    arrays = list(label_plan(rows).cpu_indptrs)
    arrays[3][1] = PAGE + 1
    with pytest.raises(ValueError, match=r"kv_last_page_len\[1\]: expected .*, got 5"):
        wrapper.wrapper.plan(*arrays)
    wrapper.check(rows)


@pytest.mark.cuda
def test_a_captured_wrapper_is_not_made_anew():
    engine = Engine("cuda:0")
    wrapper = Wrapper(engine, batch_size=2, max_num_pages=PAGES, use_cuda_graph=True)
    rows = engine.rows((5, 1), (9, 1))
    wrapper.plan(rows)
    wrapper.check(rows)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        q = torch.zeros(2, HEADS, RANK + ROPE, device="cuda")
        wrapper.wrapper.run(q[..., :RANK], q[..., RANK:], engine.layer)
    more = engine.rows((5, 2), (9, 1))
    with pytest.raises(ValueError, match=r"PagedAttention::plan: .*expected .*, got"):
        wrapper.plan(more)
    wrapper.check(rows)
