"""FlashMLA's dense decoding: its names, arguments, shapes, default scale and LSE.

    from libmla.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

What differs: every head width, page size, dtype and device that `libmla.supports` names is served,
a schedule follows its arguments instead of going stale, and calls are planned on the host, so that
they cannot be captured in a CUDA graph. Sparse attention and FP8 caches raise NotImplementedError.
"""

import collections
import weakref
from typing import Any, NamedTuple

import numpy as np

from .. import _torch_ops
from .._checks import integer, invalid, number
from .._module import torch
from .._records import CacheStrides, Geometry, Limits
from ..attention import PagedAttention
from ._arrays import check_tensors, host_copy, strides
from ._limits import limits_for
from ._refusals import not_implemented

if torch is None:
    raise ImportError("libmla.compat.flash_mla: torch is not installed")

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

_WHERE = "flash_mla_with_kvcache"


class _Cache(NamedTuple):
    """What a plan object is made for, beside its limits."""

    device: Any
    dtype: Any
    num_heads: int  # query heads of one key head
    rank: int
    rope: int
    page_size: int
    num_blocks: int
    page_stride: int
    row_stride: int


class _Shape(NamedTuple):
    """All of a call that its plan depends on, but for lengths and table."""

    cache: _Cache
    batch_size: int
    seq_len_q: int
    sm_scale: float
    causal: bool


class _HostCopy(NamedTuple):
    """A tensor's numbers, and PyTorch's count of writes to it when they were copied."""

    tensor: Any  # None: of the CPU, whose numbers are looked at
    num_writes: int | None  # None: not counted
    host: Any  # a tensor of the CPU

    @classmethod
    def of(cls, tensor: Any, kept: "_HostCopy | None") -> "_HostCopy":
        """A new copy, or the kept one where it is known to hold the same numbers."""
        if not tensor.is_cuda:
            if kept is not None and torch.equal(tensor, kept.host):
                return kept
            return cls(None, None, torch.from_numpy(host_copy(tensor)))
        num_writes = None if tensor.is_inference() else tensor._version
        is_same = kept is not None and tensor is kept.tensor and num_writes == kept.num_writes
        if kept is not None and is_same and num_writes is not None:
            return kept
        return cls(tensor, num_writes, torch.from_numpy(host_copy(tensor)))


class _Lent(NamedTuple):
    """A plan object, which serves one schedule at a time."""

    attention: PagedAttention
    cache: _Cache
    limits: Limits

    def serves(self, cache: _Cache, limits: Limits) -> bool:
        mine, needed = self.limits._fields(), limits._fields()
        return self.cache == cache and all(a >= b for a, b in zip(mine, needed, strict=True))


# Plan objects of schedules that are gone, the oldest dropped. Engines make a schedule for each
# step. A deque's own calls are atomic: schedules may end in any thread.
_idle: collections.deque[_Lent] = collections.deque(maxlen=8)


def _borrow(cache: _Cache, limits: Limits) -> _Lent:
    for _ in range(len(_idle)):
        try:
            lent = _idle.popleft()
        except IndexError:
            break
        if lent.serves(cache, limits):
            return lent
        _idle.append(lent)
    page, row = cache.page_stride, cache.row_stride
    kpe = {"kpe_page": page, "kpe_row": row} if cache.rope else {}
    attention = PagedAttention(
        device=cache.device,
        geometry=Geometry(
            num_heads=cache.num_heads,
            kv_lora_rank=cache.rank,
            qk_rope_head_dim=cache.rope,
            page_size=cache.page_size,
            dtype=cache.dtype,
        ),
        strides=CacheStrides(ckv_page=page, ckv_row=row, **kpe),
        num_pages=cache.num_blocks,
        limits=limits,
    )
    return _Lent(attention, cache, limits)


class FlashMLASchedMeta:
    """A schedule: what get_mla_metadata returns and calls of flash_mla_with_kvcache are given.

    Planned by its first call, of any arguments, and again by each call whose arguments, lengths or
    table are others. It keeps the lengths and the table of its last call alive. Calls with one
    schedule must not overlap; several schedules may be in use at once. A copy, deep or pickled
    ones too, is a new schedule.
    """

    def __init__(self) -> None:
        self._lent: _Lent | None = None
        self._give_back: weakref.finalize[..., FlashMLASchedMeta] | None = None
        self._shape: _Shape | None = None
        self._lengths: _HostCopy | None = None
        self._table: _HostCopy | None = None
        self._arrays: dict[str, Any] = {}
        self._some_see_nothing = False
        self._key = _torch_ops.register(self)

    def __reduce__(self) -> Any:
        """A copy is a new schedule: its first call plans it."""
        return FlashMLASchedMeta, ()

    def _follow(self, shape: _Shape, cache_seqlens: Any, block_table: Any) -> PagedAttention:
        """The plan object, planned for these arguments."""
        lengths = _HostCopy.of(cache_seqlens, self._lengths)
        table = _HostCopy.of(block_table, self._table)
        is_known = shape == self._shape and lengths is self._lengths and table is self._table
        if not is_known:
            arrays = _index_arrays(shape, lengths.host.numpy(), table.host.numpy())
            if shape != self._shape or not _equal(arrays, self._arrays):
                self._plan(shape, arrays)
            self._lengths, self._table = lengths, table
        assert self._lent is not None
        return self._lent.attention

    def _plan(self, shape: _Shape, arrays: dict[str, Any]) -> None:
        rows = shape.batch_size
        limits = limits_for(rows, rows * shape.seq_len_q, len(arrays["kv_indices"]))
        if self._lent is None or not self._lent.serves(shape.cache, limits):
            lent = _borrow(shape.cache, limits)  # where this is refused, the schedule keeps its own
            if self._give_back is not None:
                self._give_back()
            self._lent = lent
            self._give_back = weakref.finalize(self, _idle.append, self._lent)
            self._give_back.atexit = False
        self._shape = None  # no plan, should this one be refused
        self._lent.attention.plan(
            **arrays,
            qo_indptr=np.arange(rows + 1, dtype=np.int32) * np.int32(shape.seq_len_q),
            sm_scale=shape.sm_scale,
            causal=shape.causal,
        )
        self._shape, self._arrays = shape, arrays
        needed = shape.seq_len_q if shape.causal else 1
        self._some_see_nothing = bool((arrays["kv_len"] < needed).any())


def get_mla_metadata(
    cache_seqlens: Any = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    num_heads_per_head_k: int | None = None,
) -> tuple[FlashMLASchedMeta, None]:
    """A new schedule and None, which stands for the num_splits of older versions.

    Takes what every public version takes: no arguments, or the lengths and head counts. None of
    them is needed: the calls that the schedule is for have them all. Costs nothing. Raises
    NotImplementedError for is_fp8_kvcache and topk.
    """
    if is_fp8_kvcache:
        raise not_implemented("is_fp8_kvcache", "get_mla_metadata")
    if topk is not None:
        raise not_implemented("topk", "get_mla_metadata")
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
) -> tuple[Any, Any]:
    """Attends to paged latents; gives out and LSE.

    q              [batch, seq_len_q, heads_q, head_dim] bf16, fp16 or fp32
    k_cache        [blocks, block_size, heads_k, head_dim] of q's dtype, any block and row stride
    block_table    [batch, max_blocks] int32; entries past a request's last block may be anything
    cache_seqlens  [batch] int32, tokens cached, those of q included
    head_dim_v     columns of a cache row that are its value, 1 to head_dim; the rest is its key's
                   rotated part
    tile_scheduler_metadata, num_splits  as get_mla_metadata gave them
    softmax_scale  None: head_dim ** -0.5. That is FlashMLA's default, NOT a model's scale, which is
                   of the head before it is absorbed: 192 ** -0.5 for DeepSeek-V3, times its YaRN
                   factor squared. libmla's own interface has no default
    causal         query j of n, of a request with m tokens, sees tokens 0 .. m - n + j; else all

    out  [batch, seq_len_q, heads_q, head_dim_v] of q's dtype
    lse  [batch, heads_q, seq_len_q] fp32, natural; +inf (and zeros in out) where nothing is seen,
         as in FlashMLA. libmla's own is -inf there

    Lengths and table on a GPU are copied to the host, which waits for them, once for each change: a
    call copies one unless it gets the same tensor object as the call before and PyTorch counted no
    write to it since. Tensors made under inference_mode have no such count and are copied in every
    call. A write that PyTorch does not see (a kernel of one's own, a graph's replay) needs a new
    schedule. On the CPU they are looked at in every call. Equal numbers are not planned anew.

    Queued on the current stream. Under torch.compile it is the operator libmla::flash_mla, in which
    tensors are no longer the same objects. Raises ValueError, before anything is launched, and
    NotImplementedError: in a CUDA graph's capture, and for is_fp8_kvcache and the arguments after
    it.
    """
    _refuse_what_is_not_there(
        is_fp8_kvcache=is_fp8_kvcache or None,
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )
    schedule = tile_scheduler_metadata
    if not isinstance(schedule, FlashMLASchedMeta) or num_splits is not None:
        raise invalid(
            "tile_scheduler_metadata, num_splits",
            _WHERE,
            "what libmla's get_mla_metadata gave",
            (type(schedule).__name__, type(num_splits).__name__),
        )
    if isinstance(softmax_scale, bool):  # causal, where it is passed by position
        raise invalid("softmax_scale", _WHERE, "a number or None", softmax_scale)
    check_tensors(
        _WHERE, q=q, k_cache=k_cache, block_table=block_table, cache_seqlens=cache_seqlens
    )
    for name, indices in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if indices.dtype != torch.int32:
            raise invalid(name, _WHERE, "int32", indices.dtype)
    if q.dim() != 4:
        raise invalid("q.shape", _WHERE, "[batch, seq_len_q, heads_q, head_dim]", list(q.shape))
    batch, seq_len_q, heads_q, head_dim = q.shape
    integer(head_dim_v, "head_dim_v", _WHERE, 1, head_dim, f"1 to {head_dim}, head_dim")
    given = softmax_scale is not None
    scale = number(softmax_scale, "softmax_scale", _WHERE) if given else head_dim**-0.5
    out = q.new_empty(batch * seq_len_q, heads_q, head_dim_v)
    lse = q.new_empty(batch * seq_len_q, heads_q, dtype=torch.float32)
    arguments = q, k_cache, block_table, cache_seqlens, scale, causal, out, lse
    if _torch_ops.is_compiling():
        _flash_mla(schedule._key, *arguments)
    else:
        _attend(schedule, *arguments)
    if seq_len_q > 1:
        lse = lse.view(batch, seq_len_q, heads_q).transpose(1, 2).contiguous()
    return out.view(batch, seq_len_q, heads_q, head_dim_v), lse.view(batch, heads_q, seq_len_q)


def _attend(
    schedule: FlashMLASchedMeta,
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    scale: float,
    causal: bool,
    out: Any,
    lse: Any,
) -> None:
    """Writes out [tokens, heads_q, head_dim_v], and LSE [tokens, heads_q]."""
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise not_implemented("capture in a CUDA graph (libmla.PagedAttention has it)", _WHERE)
    shape = _shape_of(q, k_cache, out.shape[-1], scale, causal)
    attention = schedule._follow(shape, cache_seqlens, block_table)
    num_heads, widths = shape.cache.num_heads, [shape.cache.rank, shape.cache.rope]
    tokens = q.flatten(0, 1), out, lse
    for head_k in range(k_cache.shape[2]):
        queries, out_part, lse_part = tokens
        if k_cache.shape[2] > 1:
            heads = slice(head_k * num_heads, (head_k + 1) * num_heads)
            queries, out_part, lse_part = (tensor[:, heads] for tensor in tokens)
        q_nope, q_pe = queries.split_with_sizes(widths, -1)
        ckv, kpe = k_cache.select(2, head_k).split_with_sizes(widths, -1)
        attention.run(q_nope=q_nope, q_pe=q_pe, ckv=ckv, kpe=kpe, out=out_part, lse=lse_part)
    if schedule._some_see_nothing:
        lse.masked_fill_(torch.isneginf(lse), float("inf"))


@_torch_ops.operator(
    "flash_mla",
    "(SymInt key, Tensor q, Tensor k_cache, Tensor block_table, Tensor cache_seqlens,"
    " float scale, bool causal, Tensor(a!) out, Tensor(b!) lse)",
)
def _flash_mla(key: int, *arguments: Any) -> None:
    _attend(_torch_ops.find(key), *arguments)


def _refuse_what_is_not_there(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise not_implemented(name, _WHERE)


def _shape_of(q: Any, k_cache: Any, head_dim_v: int, scale: float, causal: bool) -> _Shape:
    batch, seq_len_q, heads_q, head_dim = q.shape
    if k_cache.dim() != 4 or k_cache.shape[3] != head_dim:
        expected = f"[blocks, block_size, heads_k, {head_dim}]"
        raise invalid("k_cache.shape", _WHERE, expected, list(k_cache.shape))
    if k_cache.dtype != q.dtype:
        raise invalid("k_cache.dtype", _WHERE, f"{q.dtype}, q's", k_cache.dtype)
    num_blocks, block_size, heads_k, _ = k_cache.shape
    page_stride, row_stride, *_ = strides(k_cache)
    integer(block_size, "k_cache.shape[1]", _WHERE, 1, expected="1 or more, the block size")
    if heads_k == 0 or heads_q % heads_k:
        raise invalid("heads_k", _WHERE, f"a divisor of heads_q, {heads_q}", heads_k)
    cache = _Cache(
        device=q.device,
        dtype=q.dtype,
        num_heads=heads_q // heads_k,
        rank=head_dim_v,
        rope=head_dim - head_dim_v,
        page_size=block_size,
        num_blocks=num_blocks,
        page_stride=page_stride,
        row_stride=row_stride,
    )
    return _Shape(cache, batch, seq_len_q, scale, causal)


def _index_arrays(shape: _Shape, lengths: np.ndarray, table: np.ndarray) -> dict[str, Any]:
    """The plan's page lists, of the entries of the table that lengths reach."""
    batch, page_size = shape.batch_size, shape.cache.page_size
    if lengths.shape != (batch,):
        raise invalid("cache_seqlens.shape", _WHERE, f"[{batch}]", list(lengths.shape))
    if table.ndim != 2 or len(table) != batch:
        raise invalid("block_table.shape", _WHERE, f"[{batch}, max_blocks]", list(table.shape))
    holds = table.shape[1] * page_size
    for i in np.flatnonzero((lengths < 0) | (lengths > holds)):
        raise invalid(f"cache_seqlens[{i}]", _WHERE, f"0 to {holds}, what a row lists", lengths[i])
    counts = -(-lengths // page_size)
    listed = np.arange(table.shape[1]) < counts[:, None]
    for i, j in np.argwhere(listed & ((table < 0) | (table >= shape.cache.num_blocks))):
        expected = f"0 to {shape.cache.num_blocks - 1}, the cache's blocks"
        raise invalid(f"block_table[{i}, {j}]", _WHERE, expected, table[i, j])
    kv_indptr = np.zeros(batch + 1, np.int32)
    np.cumsum(counts, out=kv_indptr[1:])
    return {"kv_indptr": kv_indptr, "kv_indices": table[listed], "kv_len": lengths}


def _equal(arrays: dict[str, Any], others: dict[str, Any]) -> bool:
    return all(np.array_equal(array, others[name]) for name, array in arrays.items())
