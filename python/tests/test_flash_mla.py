"""libmla.compat.flash_mla by what the documentation of FlashMLA says."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
from frameworks import TOLERANCE, float64
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from libmla.compat import flash_mla  # noqa: E402  # it needs PyTorch
from libmla.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata  # noqa: E402

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Batch:
    """Requests over a cache of NaN but for their own tokens, and a table of junk past them."""

    def __init__(
        self,
        device,
        lengths,
        seq_len_q=1,
        heads_q=4,
        heads_k=1,
        head_dim=24,
        head_dim_v=16,
        block_size=4,
        max_blocks=12,
        dtype="fp32",
        seed=0,
    ):
        random = np.random.default_rng(seed)
        self.device, self.dtype, self.head_dim_v = device, dtype, head_dim_v
        batch, num_blocks = len(lengths), len(lengths) * max_blocks + 1
        table = random.permutation(num_blocks)[: batch * max_blocks].reshape(batch, max_blocks)
        cache = np.full((num_blocks, block_size, heads_k, head_dim), np.nan)
        for row, length in zip(table, lengths, strict=True):
            for i in range(length):
                values = random.standard_normal((heads_k, head_dim))
                cache[row[i // block_size], i % block_size] = values
            row[-(-length // block_size) :] = 2_000_000_000
        q = random.standard_normal((batch, seq_len_q, heads_q, head_dim))
        self.q, self.k_cache = self._tensor(q), self._tensor(cache)
        self.block_table = torch.tensor(table, dtype=torch.int32, device=device)
        self.cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)

    def _tensor(self, values):
        return torch.tensor(values).to(self.device, DTYPES[self.dtype])

    def attend(self, schedule=None, **options):
        schedule = schedule or get_mla_metadata()[0]
        return flash_mla_with_kvcache(
            self.q,
            self.k_cache,
            self.block_table,
            self.cache_seqlens,
            self.head_dim_v,
            schedule,
            **options,
        )

    def reference(self, causal=False, softmax_scale=None):
        """Out [batch, seq_len_q, heads_q, head_dim_v] and LSE [batch, heads_q, seq_len_q]."""
        q, cache = self.q.cpu().double(), self.k_cache.cpu().double()
        batch, seq_len_q, heads_q, head_dim = q.shape
        out = torch.zeros(batch, seq_len_q, heads_q, self.head_dim_v, dtype=torch.float64)
        lse = torch.full((batch, heads_q, seq_len_q), torch.inf, dtype=torch.float64)
        for i, length in enumerate(self.cache_seqlens.tolist()):
            blocks = self.block_table[i, : -(-length // cache.shape[1])].cpu().long()
            keys = cache[blocks].flatten(0, 1)[:length]
            keys = keys.repeat_interleave(heads_q // cache.shape[2], dim=1)
            for j in range(seq_len_q):
                seen = keys[: max(0, length - seq_len_q + j + 1)] if causal else keys
                if len(seen):
                    scores = torch.einsum("hd,khd->hk", q[i, j], seen)
                    scores *= head_dim**-0.5 if softmax_scale is None else softmax_scale
                    lse[i, :, j] = scores.logsumexp(dim=-1)
                    values = seen[..., : self.head_dim_v]
                    out[i, j] = torch.einsum("hk,khd->hd", scores.softmax(dim=-1), values)
        return out, lse

    def check(self, answer, **options):
        out, lse = answer
        expected = self.reference(**options)
        assert out.dtype == self.q.dtype
        assert lse.dtype == torch.float32
        assert lse.is_contiguous()
        assert out.shape == expected[0].shape
        tolerance = TOLERANCE[self.dtype]
        np.testing.assert_allclose(float64(out), expected[0], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(float64(lse), expected[1], rtol=1e-4, atol=1e-4)


@st.composite
def shapes(draw):
    heads_k = draw(st.sampled_from([1, 1, 2]))
    head_dim_v = draw(st.sampled_from([1, 7, 16]))
    return {
        "lengths": draw(st.lists(st.integers(0, 30), max_size=4)),
        "seq_len_q": draw(st.integers(1, 3)),
        "heads_q": heads_k * draw(st.integers(1, 3)),
        "heads_k": heads_k,
        "head_dim": head_dim_v + draw(st.sampled_from([0, 1, 8])),
        "head_dim_v": head_dim_v,
        "block_size": draw(st.sampled_from([3, 16])),
        "dtype": draw(st.sampled_from(list(DTYPES))),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


# A function-scoped fixture is the same for every case here: it only names the framework.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=shapes(),
    options=st.fixed_dictionaries(
        {"causal": st.booleans(), "softmax_scale": st.sampled_from([None, 0.05])}
    ),
)
def test_any_shape_matches_float64(torch_framework, shape, options):
    batch = Batch(torch_framework.device, **shape)
    batch.check(batch.attend(**options), **options)


def test_deepseek_shape(torch_framework):
    """As the README has it: seq_len_q of speculative decoding, blocks of 64, 512 + 64."""
    batch = Batch(
        torch_framework.device,
        [70, 1, 500],
        seq_len_q=2,
        heads_q=16,
        head_dim=576,
        head_dim_v=512,
        block_size=64,
        dtype="bf16",
    )
    batch.check(batch.attend(causal=True), causal=True)


def test_default_scale_is_of_the_query_width(torch_framework):
    batch = Batch(torch_framework.device, [9])
    default = batch.attend()
    named = batch.attend(softmax_scale=24**-0.5)
    assert all(map(torch.equal, default, named))


def test_a_query_that_sees_nothing(torch_framework):
    batch = Batch(torch_framework.device, [0, 1, 4], seq_len_q=2)
    out, lse = batch.attend(causal=True)
    assert not out[0].any()
    assert torch.isposinf(lse[0]).all()
    assert not out[1, 0].any()
    assert torch.isposinf(lse[1, :, 0]).all()
    assert torch.isfinite(lse[1, :, 1]).all()
    assert torch.isfinite(lse[2]).all()


@pytest.mark.parametrize(
    "arguments",
    [
        lambda lengths: ((), {}),
        lambda lengths: ((lengths, 8, 1), {}),
        lambda lengths: ((lengths, 8, 1, 4, False, None), {}),
        lambda lengths: ((lengths,), {"num_heads_per_head_k": 8, "num_heads_k": 1}),
        lambda lengths: (
            (),
            {"cache_seqlens": lengths, "num_q_tokens_per_head_k": 8, "num_heads_k": 1},
        ),
    ],
    ids=["none", "first", "sparse", "first by name", "second by name"],
)
def test_every_generation_of_get_mla_metadata(torch_framework, arguments):
    batch = Batch(torch_framework.device, [5, 20], seq_len_q=2)
    positional, named = arguments(batch.cache_seqlens)
    metadata, num_splits = get_mla_metadata(*positional, **named)
    answer = flash_mla_with_kvcache(
        batch.q,
        batch.k_cache,
        batch.block_table,
        batch.cache_seqlens,
        batch.head_dim_v,
        metadata,
        num_splits,
        causal=True,
    )
    batch.check(answer, causal=True)


def test_arguments_stand_in_the_public_order():
    assert list(inspect.signature(flash_mla_with_kvcache).parameters) == [
        "q",
        "k_cache",
        "block_table",
        "cache_seqlens",
        "head_dim_v",
        "tile_scheduler_metadata",
        "num_splits",
        "softmax_scale",
        "causal",
        "is_fp8_kvcache",
        "indices",
        "attn_sink",
        "extra_k_cache",
        "extra_indices_in_kvcache",
        "topk_length",
        "extra_topk_length",
    ]


def test_a_schedule_follows_lengths_and_table_changed_in_place(torch_framework):
    batch = Batch(torch_framework.device, [5, 20])
    filled = Batch(torch_framework.device, [48, 48])
    batch.k_cache, batch.block_table = filled.k_cache, filled.block_table
    schedule, _ = get_mla_metadata()
    for change in (
        lambda: None,
        lambda: batch.cache_seqlens.add_(1),
        lambda: batch.cache_seqlens.copy_(torch.tensor([0, 48])),
        lambda: batch.block_table.copy_(batch.block_table.flip(0)),
        lambda: None,
    ):
        change()
        batch.check(batch.attend(schedule))


def test_a_schedule_follows_other_tensors_and_shapes(torch_framework):
    schedule, _ = get_mla_metadata()
    for lengths, options in (
        ([5, 20], {}),
        ([6, 20], {}),
        ([7, 3, 40], {}),
        ([7] * 70, {"seed": 1}),
        ([7, 3], {"heads_q": 3}),
        ([7, 3], {"seq_len_q": 3}),
        ([7, 3], {"block_size": 16}),
        ([7, 3], {"dtype": "fp16"}),
    ):
        batch = Batch(torch_framework.device, lengths, **options)
        for causal in (False, True):
            batch.check(batch.attend(schedule, causal=causal), causal=causal)


def test_schedules_in_use_at_once(torch_framework):
    batches = [Batch(torch_framework.device, [5 + i, 20], seed=i) for i in range(3)]
    schedules = [get_mla_metadata()[0] for _ in batches]
    for _ in range(2):
        for batch, schedule in zip(batches, schedules, strict=True):
            batch.check(batch.attend(schedule))


def test_a_schedule_for_each_step_makes_no_object_anew(torch_framework, monkeypatch):
    flash_mla._idle.clear()
    made = []
    make = flash_mla.PagedAttention
    monkeypatch.setattr(
        flash_mla, "PagedAttention", lambda **options: made.append(1) or make(**options)
    )
    batch = Batch(torch_framework.device, [5, 20])
    for _ in range(3):
        schedule, _ = get_mla_metadata()
        batch.check(batch.attend(schedule))
        del schedule
    assert len(made) == 1


def test_a_copy_is_kept_while_no_write_is_counted(monkeypatch):
    monkeypatch.setattr(flash_mla, "host_copy", lambda tensor: np.zeros(1))

    def tensor(**changed):
        return SimpleNamespace(
            **{"is_cuda": True, "is_inference": lambda: False, "_version": 3, **changed}
        )

    counted = tensor()
    kept = flash_mla._HostCopy.of(counted, None)
    assert flash_mla._HostCopy.of(counted, kept) is kept
    assert flash_mla._HostCopy.of(tensor(), kept) is not kept
    counted._version += 1
    assert flash_mla._HostCopy.of(counted, kept) is not kept
    uncounted = tensor(is_inference=lambda: True)
    kept = flash_mla._HostCopy.of(uncounted, None)
    assert flash_mla._HostCopy.of(uncounted, kept) is not kept


def test_tensors_of_the_cpu_are_looked_at_in_each_call():
    lengths = torch.tensor([5, 20], dtype=torch.int32)
    kept = flash_mla._HostCopy.of(lengths, None)
    assert flash_mla._HostCopy.of(lengths.clone(), kept) is kept
    lengths[1] = 21
    assert flash_mla._HostCopy.of(lengths, kept) is not kept
    assert flash_mla._HostCopy.of(lengths[:1], kept) is not kept


def copies(monkeypatch):
    """Counts the copies to the host."""
    copied = []
    copy = flash_mla.host_copy
    monkeypatch.setattr(flash_mla, "host_copy", lambda array: copied.append(1) or copy(array))
    return copied


@pytest.mark.cuda
def test_one_copy_of_a_change_for_all_layers(monkeypatch):
    batch = Batch("cuda:0", [5, 20])
    batch.attend()
    copied = copies(monkeypatch)
    schedule, _ = get_mla_metadata()
    for step in range(1, 4):
        for _ in range(5):
            batch.attend(schedule)
        assert len(copied) == 1 + step  # the table once, lengths in each step
        batch.cache_seqlens.sub_(1)


@pytest.mark.cuda
def test_tensors_without_a_count_of_writes_are_copied_in_each_call(monkeypatch):
    with torch.inference_mode():
        batch = Batch("cuda:0", [5, 20])
        schedule, _ = get_mla_metadata()
        copied = copies(monkeypatch)
        for i in range(3):
            batch.check(batch.attend(schedule))
            batch.cache_seqlens.sub_(1)
            assert len(copied) == 2 * (i + 1)


@pytest.mark.cuda
def test_capture_is_refused_by_name():
    batch = Batch("cuda:0", [5, 20])
    schedule, _ = get_mla_metadata()
    batch.attend(schedule)
    with (
        pytest.raises(NotImplementedError, match=r"^flash_mla_with_kvcache: capture in a CUDA"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        batch.attend(schedule)
    batch.check(batch.attend(schedule))


def test_lengths_on_the_host_beside_a_cache_on_the_device(torch_framework):
    batch = Batch(torch_framework.device, [5, 20])
    batch.cache_seqlens, batch.block_table = batch.cache_seqlens.cpu(), batch.block_table.cpu()
    schedule, _ = get_mla_metadata()
    batch.check(batch.attend(schedule))
    batch.cache_seqlens.numpy()[:] = 4  # a write that PyTorch does not count
    batch.check(batch.attend(schedule))


def test_slices_of_larger_tensors(torch_framework):
    batch = Batch(torch_framework.device, [5, 20])
    expected = batch.attend()
    wide = torch.zeros(*batch.q.shape[:3], 30, device=torch_framework.device)
    wide[..., 3:27] = batch.q
    pool = torch.zeros(len(batch.k_cache), 2, 4, 1, 30, device=torch_framework.device)
    pool[:, 1, ..., :24] = batch.k_cache
    batch.q, batch.k_cache = wide[..., 3:27], pool[:, 1, ..., :24]
    assert all(map(torch.equal, batch.attend(), expected))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(torch_framework, backend):
    torch._dynamo.reset()
    batch = Batch(torch_framework.device, [5, 20], seq_len_q=2)
    schedule, _ = get_mla_metadata()

    def layer(q):
        out, lse = flash_mla_with_kvcache(
            q * 2,
            batch.k_cache,
            batch.block_table,
            batch.cache_seqlens,
            16,
            schedule,
            causal=True,
        )
        return out + 1, lse

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    assert all(map(torch.equal, compiled(batch.q), layer(batch.q)))
    batch.cache_seqlens.sub_(2)
    assert all(map(torch.equal, compiled(batch.q), layer(batch.q)))


@pytest.mark.parametrize(
    "name",
    [
        "is_fp8_kvcache",
        "indices",
        "attn_sink",
        "extra_k_cache",
        "extra_indices_in_kvcache",
        "topk_length",
        "extra_topk_length",
    ],
)
def test_what_is_not_there_is_refused_by_name(name):
    value = True if name == "is_fp8_kvcache" else torch.zeros(1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=f"^flash_mla_with_kvcache: {name} is not"):
        Batch("cpu", [5]).attend(**{name: value})


def test_metadata_of_what_is_not_there():
    with pytest.raises(NotImplementedError, match=r"^get_mla_metadata: is_fp8_kvcache is not"):
        get_mla_metadata(None, 1, 1, 1, True)
    with pytest.raises(NotImplementedError, match=r"^get_mla_metadata: topk is not"):
        get_mla_metadata(None, 1, 1, 1, False, 2048)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"cache_seqlens": torch.tensor([5, 20])},
            r"cache_seqlens: expected int32, got torch\.int64",
        ),
        (
            {"cache_seqlens": torch.tensor([5, 49]).int()},
            r"cache_seqlens\[1\]: expected 0 to 48, what a row lists, got 49",
        ),
        ({"cache_seqlens": torch.tensor([-1, 5]).int()}, r"cache_seqlens\[0\]: .*, got -1"),
        (
            {"cache_seqlens": torch.tensor([5, 20, 3]).int()},
            r"cache_seqlens\.shape: expected \[2\], got \[3\]",
        ),
        (
            {"block_table": torch.full((2, 12), 25).int()},
            r"block_table\[0, 0\]: expected 0 to 24, the cache's blocks, got 25",
        ),
        ({"block_table": torch.zeros(2, 12)}, "block_table: expected int32, got torch.float32"),
        ({"q": torch.zeros(2, 1, 4, 20)}, r"k_cache.shape: expected \[.*, 20\], got \[25, 4, 1"),
        ({"q": torch.zeros(2, 4, 24)}, r"q.shape: expected \[batch, .*\], got \[2, 4, 24\]"),
        ({"q": torch.zeros(2, 1, 4, 24).half()}, r"k_cache.dtype: expected torch.float16, q's"),
        ({"k_cache": torch.zeros(25, 4, 3, 24)}, r"heads_k: expected a divisor of heads_q, 4"),
        ({"head_dim_v": 25}, r"head_dim_v: expected 1 to 24, head_dim, got 25"),
    ],
)
def test_a_refusal_keeps_the_schedule_usable(change, message):
    batch = Batch("cpu", [5, 20])
    schedule, _ = get_mla_metadata()
    batch.attend(schedule)
    before = dict(vars(batch))
    vars(batch).update(change)
    with pytest.raises(ValueError, match=f"^flash_mla_with_kvcache: {message}"):
        batch.attend(schedule)
    vars(batch).update(before)
    batch.check(batch.attend(schedule))


def test_an_object_that_is_refused_leaves_the_schedule_its_own(monkeypatch):
    batch, other = Batch("cpu", [5, 20]), Batch("cpu", [5, 20], heads_q=3)
    schedule, _ = get_mla_metadata()
    batch.attend(schedule)

    def refuse(*_):
        raise ValueError("no object")

    with monkeypatch.context() as patch:
        patch.setattr(flash_mla, "_borrow", refuse)
        with pytest.raises(ValueError, match="no object"):
            other.attend(schedule)
    longer, second = Batch("cpu", [9, 40], seed=3), get_mla_metadata()[0]
    longer.check(longer.attend(second))
    batch.check(batch.attend(schedule))


def test_a_plan_that_is_refused_leaves_no_wrong_one():
    batch, other = Batch("cpu", [5, 20]), Batch("cpu", [5, 20], heads_q=3)
    schedule, _ = get_mla_metadata()
    batch.attend(schedule)
    with pytest.raises(ValueError, match=r"sm_scale: expected .*, got 0"):
        other.attend(schedule, softmax_scale=0.0)
    batch.check(batch.attend(schedule))


def test_a_cache_without_blocks():
    batch = Batch("cpu", [0, 0])
    shape = (0, *batch.k_cache.shape[1:])
    batch.k_cache = torch.from_numpy(np.zeros(shape, np.float32))  # of strides 0, NumPy's
    out, lse = batch.attend()
    assert not out.any()
    assert torch.isposinf(lse).all()


@pytest.mark.filterwarnings("error")
def test_a_block_size_of_0_is_refused():
    batch = Batch("cpu", [0, 0])
    batch.k_cache = batch.k_cache[:, :0]
    with pytest.raises(ValueError, match=r"mla_with_kvcache: k_cache\.shape\[1\]: .*, got 0"):
        batch.attend()


def test_wrong_scales_and_schedules_are_refused():
    batch = Batch("cpu", [5])
    with pytest.raises(ValueError, match="softmax_scale: expected a number or None, got True"):
        batch.attend(softmax_scale=True)
    with pytest.raises(ValueError, match=r"sm_scale: expected .*, got 0"):
        batch.attend(softmax_scale=0.0)
    with pytest.raises(ValueError, match=r"tile_scheduler_metadata, num_splits: .*, got .*Tensor"):
        batch.attend(torch.ones(1))
    with pytest.raises(ValueError, match=r"tile_scheduler_metadata, num_splits: .*, got .*Tensor"):
        batch.attend(num_splits=torch.zeros(1))
