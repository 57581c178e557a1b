"""Paged MLA attention behind FlashInfer's plan and run."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ... import _torch_ops
from ..._arrays import DTypeLike, array_device, device_name, dtype_name, empty_like
from ..._checks import invalid, scale
from ..._module import Handle, torch
from ..._records import Bucket, CacheStrides, Geometry, Limits, LseBase
from ...attention import PagedAttention
from .._arrays import (
    Array,
    aligned_bytes,
    check_arrays,
    check_indices,
    check_rank,
    check_writable,
    host_copy,
    store,
    strides,
)
from .._refusals import not_implemented

_NAME = "BatchMLAPagedAttentionWrapper"
_PLAN, _RUN = f"{_NAME}.plan", f"{_NAME}.run"


@dataclass(frozen=True, eq=False)
class _Plan:
    """What plan was given."""

    geometry: Geometry
    indices: dict[str, np.ndarray]
    sm_scale: float
    causal: bool

    @property
    def num_rows(self) -> int:
        return len(self.indices["kv_len"])

    @property
    def num_tokens(self) -> int:
        return _last(self.indices["qo_indptr"])

    @property
    def num_listed_pages(self) -> int:
        return len(self.indices["kv_indices"])


class _Key(NamedTuple):
    """What an attention object is made for, beside the limits."""

    geometry: Geometry
    num_pages: int
    ckv_page: int
    ckv_row: int
    kpe_page: int
    kpe_row: int
    num_tokens: int | None  # of the bucket


class _Planned(NamedTuple):
    """An attention object and the plan that it holds."""

    attention: PagedAttention
    limits: Limits
    plan: _Plan

    @classmethod
    def of(cls, attention: PagedAttention, limits: Limits, plan: _Plan) -> "_Planned":
        """The object, planned. Raises ValueError: it keeps the plan before."""
        attention.plan(
            **plan.indices, sm_scale=plan.sm_scale, causal=plan.causal, lse_base=LseBase.TWO
        )
        return cls(attention, limits, plan)


class BatchMLAPagedAttentionWrapper(Handle):
    """Paged MLA attention: plan once a step, run once a layer.

    float_workspace_buffer  memory on the device of all tensors. On CUDA it is the scratch if it is
                            large enough; if not, the wrapper takes memory of its own. Wrappers that
                            share it must share a stream, as in FlashInfer. On the CPU it only names
                            the device, so that wrappers that share it may run on several threads
    use_cuda_graph          runs are captured; the batch size is that of the buffers. On the CPU it
                            is checked in the same way, and runs are not captured
    qo_indptr, kv_indptr    [batch_size + 1] int32 buffers, with use_cuda_graph only: as the two
                            others, they get what plan is given
    kv_indices              int32, as many entries as a plan may list
    kv_len_arr              [batch_size] int32
    backend                 "auto", "fa2" or "fa3": the first kernel that accepts the shape serves,
                            whatever the name

    The shape of the cache is known at the first run, which therefore allocates, and blocks: make
    it before the capture. Later ones do so for a cache of another shape, and plans, outside graph
    mode, beyond the default Limits and all plans before them. Raises ValueError (a buffer that is
    missing, of another size or cannot be written to), NotImplementedError (another backend). Calls
    on one object must not overlap.
    """

    def __init__(
        self,
        float_workspace_buffer: Array,
        use_cuda_graph: bool = False,
        qo_indptr: Array | None = None,
        kv_indptr: Array | None = None,
        kv_indices: Array | None = None,
        kv_len_arr: Array | None = None,
        backend: str = "auto",
    ) -> None:
        if backend not in ("auto", "fa2", "fa3"):
            raise not_implemented(f"backend {backend!r}", _NAME)
        check_arrays(_NAME, float_workspace_buffer=float_workspace_buffer)
        self.device = getattr(float_workspace_buffer, "device", "cpu")
        self._device = array_device(float_workspace_buffer)
        on_cuda = self._device[0] == 1
        self._workspace = aligned_bytes(float_workspace_buffer) if on_cuda else None
        self._limits = Limits()
        self._buffers: dict[str, Array] | None = None
        if use_cuda_graph:
            self._buffers = _checked_buffers(
                {
                    "qo_indptr": qo_indptr,
                    "kv_indptr": kv_indptr,
                    "kv_indices": kv_indices,
                    "kv_len_arr": kv_len_arr,
                }
            )
        self._plan: _Plan | None = None
        self._planned: dict[_Key, _Planned] = {}
        self._ran: set[_Key] = set()  # since the last plan
        self._key = _torch_ops.register(self)

    def plan(
        self,
        qo_indptr: Array,
        kv_indptr: Array,
        kv_indices: Array,
        kv_len_arr: Array,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: DTypeLike,
        kv_data_type: DTypeLike,
        use_profiler: bool = False,
    ) -> None:
        """Takes the requests of the next runs (B of them).

        qo_indptr     [B + 1] int32, first query token of each request
        kv_indptr     [B + 1] int32, offsets into kv_indices (pages, not tokens)
        kv_indices    [>= kv_indptr[B]] int32, page ids in token order
        kv_len_arr    [B] int32, keys of each request
        num_heads     query heads of this rank
        head_dim_ckv  columns of ckv, the value width
        head_dim_kpe  columns of kpe, 0 for none
        page_size     tokens of a page
        causal        query j of n, of a request with m keys, sees keys 0 .. m - n + j; else all m
        sm_scale      multiplies q . k; of the head width before absorption (192 ** -0.5)
        q_data_type, kv_data_type  of queries and cache, the same: fp32, bf16 or fp16

        Index arrays are on the host or on a device, from which each is copied to the host once,
        which waits for it. All may be changed once the call returns: runs and replays see what
        they held. In graph mode they are also copied into the caller's buffers.

        In graph mode a plan must suit the cache, geometry and tokens of every run before it, since
        their graphs would replay the plan before. Outside, pages that no cache of the runs before
        has may be those of a larger one, which the next run shows.

        Raises ValueError; what is wrong with the requests themselves is said by the first run that
        has their pages, later by plan, and the plan before then stays in use. NotImplementedError:
        FP8, queries and cache of two types, the profiler.
        """
        if use_profiler:
            raise not_implemented("use_profiler", _PLAN)
        given = {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_len_arr": kv_len_arr,
        }
        check_indices(_PLAN, **given)
        if self._buffers is not None:
            _check_capacity(self._buffers, given)
        offsets = host_copy(kv_indptr)
        plan = _Plan(
            geometry=Geometry(
                num_heads=num_heads,
                kv_lora_rank=head_dim_ckv,
                qk_rope_head_dim=head_dim_kpe,
                page_size=page_size,
                dtype=_one_dtype(q_data_type, kv_data_type),
            ),
            indices={
                "qo_indptr": host_copy(qo_indptr),
                "kv_indptr": offsets,
                "kv_indices": host_copy(kv_indices[: _last(offsets)]),
                "kv_len": host_copy(kv_len_arr),
            },
            sm_scale=scale(sm_scale, "sm_scale", _PLAN),
            causal=bool(causal),
        )
        limits = self._limits if self._buffers is not None else _covering(self._limits, plan)
        self._planned = self._taken(plan, limits)
        self._plan, self._limits = plan, limits
        self._ran.clear()
        if self._buffers is not None:
            for name, array in given.items():
                store(array, self._buffers[name])

    def run(
        self,
        q_nope: Array,
        q_pe: Array,
        ckv_cache: Array,
        kpe_cache: Array,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        profiler_buffer: Array | None = None,
        kv_len: Array | None = None,
        page_table: Array | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: Array | None = None,
        kpe_scale: float | None = None,
    ) -> Any:
        """Attends with the current plan (T query tokens, H heads); as often as wanted.

        q_nope      [T, H, head_dim_ckv], absorbed
        q_pe        [T, H, head_dim_kpe]
        ckv_cache   [num_pages, page_size, head_dim_ckv], read where it is; a slice of one cache row
                    and a tensor of its own are the same to it
        kpe_cache   [num_pages, page_size, head_dim_kpe], likewise
        out         [T, H, head_dim_ckv]; None: a new one like q_nope
        lse         [T, H] fp32, written where it is given; None: a new one where it is returned
        return_lse  returns (out, lse) in place of out
        return_lse_base_on_e  the LSE is in base e in place of base 2

        A row that sees no key gets zeros and LSE -inf. In graph mode T may be more than the plan's
        tokens, and the rows behind them get the same. On CUDA the work is queued on the current
        stream and can be captured in graph mode. Raises ValueError (a tensor does not match the
        plan), RuntimeError (no plan, a first run in a capture), NotImplementedError (the arguments
        that are not named here). Under torch.compile it is the operator libmla::flashinfer_mla_run.
        """
        for name, value in (
            ("profiler_buffer", profiler_buffer),
            ("kv_len, of the cutlass backend,", kv_len),
            ("page_table, of the cutlass backend,", page_table),
            ("o_scale, of FP8 outputs,", o_scale),
            ("ckv_scale, of FP8 caches,", ckv_scale),
            ("ckv_scale_arr, of FP8 caches,", ckv_scale_arr),
            ("kpe_scale, of FP8 caches,", kpe_scale),
        ):
            if value is not None:
                raise not_implemented(name, _RUN)
        arrays = {"q_nope": q_nope, "ckv_cache": ckv_cache}
        others = {"q_pe": q_pe, "kpe_cache": kpe_cache, "out": out, "lse": lse}
        arrays |= {name: array for name, array in others.items() if array is not None}
        check_arrays(_RUN, **arrays)
        check_rank(_RUN, 3, q_nope=q_nope, ckv_cache=ckv_cache)
        if out is None:
            out = empty_like(q_nope, q_nope.shape, _RUN)
        if lse is None and return_lse:
            lse = empty_like(q_nope, q_nope.shape[:2], _RUN, "float32")
        tensors = (q_nope, q_pe, ckv_cache, kpe_cache, out, lse)
        if _torch_ops.is_compiling():
            _run(self._key, *tensors, return_lse_base_on_e)
        else:
            self._run(*tensors, return_lse_base_on_e)
        return (out, lse) if return_lse else out

    def _run(
        self, q_nope: Any, q_pe: Any, ckv: Any, kpe: Any, out: Any, lse: Any, base_e: bool
    ) -> None:
        plan = self._plan
        if plan is None:
            raise RuntimeError(f"{_RUN}: plan: expected a plan before it, got none")
        rope = plan.geometry.qk_rope_head_dim
        if rope == 0:
            q_pe = kpe = None
        else:
            for name, array in (("q_pe", q_pe), ("kpe_cache", kpe)):
                if array is None:
                    raise invalid(name, _RUN, f"an array of {rope} columns, head_dim_kpe", None)
        key = self._key_of(plan, len(q_nope), ckv, kpe)
        planned = self._planned.get(key) or self._first(plan, key)
        planned.attention.run(q_nope=q_nope, q_pe=q_pe, ckv=ckv, kpe=kpe, out=out, lse=lse)
        self._planned[key] = planned
        self._ran.add(key)
        if base_e and lse is not None:
            lse *= math.log(2)

    def _taken(self, plan: _Plan, limits: Limits) -> dict[_Key, _Planned]:
        """The objects of earlier runs, holding the plan; where one refuses it, theirs again."""
        captured = self._buffers is not None
        asked = self._planned if captured else self._asked(plan)
        taken: dict[_Key, _Planned] = {}
        try:
            for key, planned in asked.items():
                if key.geometry != plan.geometry:
                    expected = f"{key.geometry}, of the runs before"
                    raise invalid("geometry", _PLAN, expected, plan.geometry)
                needed = planned.limits if captured else limits
                fits = planned.limits == needed
                attention = planned.attention if fits else self._make(key, needed)
                taken[key] = _Planned.of(attention, needed, plan)
        except Exception:
            for key in taken:
                _Planned.of(*asked[key])
            raise
        return taken

    def _asked(self, plan: _Plan) -> dict[_Key, _Planned]:
        """Outside graph mode, the objects that a plan must suit; the others are given back.

        Caches that have its pages, where there are such those that runs of the last plan used:
        another cache may be the one that it is for.
        """
        pages = plan.indices["kv_indices"]
        needed = int(pages.max()) + 1 if pages.size else 0
        able = {
            key: planned
            for key, planned in self._planned.items()
            if key.geometry == plan.geometry and key.num_pages >= needed
        }
        used = {key: planned for key, planned in able.items() if key in self._ran}
        return used or able

    def _first(self, plan: _Plan, key: _Key) -> _Planned:
        """A new object, of caches that no run under the plan or before it had."""
        if self._device[0] == 1 and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{_RUN}: capture: expected a run before it with tensors of the same shapes and"
                " strides, got the first one"
            )
        limits = self._limits_for(key.num_tokens)
        return _Planned.of(self._make(key, limits), limits, plan)

    def _key_of(self, plan: _Plan, num_tokens: int, ckv: Any, kpe: Any) -> _Key:
        page_size = plan.geometry.page_size
        return _Key(
            plan.geometry,
            len(ckv),
            *_page_and_row("ckv_cache", ckv, page_size),
            *((0, 0) if kpe is None else _page_and_row("kpe_cache", kpe, page_size)),
            None if self._buffers is None else num_tokens,
        )

    def _limits_for(self, num_tokens: int | None) -> Limits:
        """Of a bucket of so many tokens; None: as large as the plans were."""
        if self._buffers is None or num_tokens is None:
            return self._limits
        return Limits(
            max_rows=len(self._buffers["kv_len_arr"]),
            max_tokens=num_tokens,
            max_listed_pages=len(self._buffers["kv_indices"]),
        )

    def _make(self, key: _Key, limits: Limits) -> PagedAttention:
        captured = self._buffers is not None
        config: dict[str, Any] = {
            "geometry": key.geometry,
            "num_pages": key.num_pages,
            "device": device_name(self._device),
            "strides": CacheStrides(
                ckv_page=key.ckv_page,
                ckv_row=key.ckv_row,
                kpe_page=key.kpe_page,
                kpe_row=key.kpe_row,
            ),
            "limits": limits,
            "bucket": Bucket(limits.max_rows, limits.max_tokens) if captured else None,
            "capture": captured and self._device[0] == 1,
        }
        scratch = self._workspace
        if scratch is not None and PagedAttention.scratch_bytes(**config) > len(scratch):
            scratch = None
        return PagedAttention(**config, scratch=scratch)


@_torch_ops.operator(
    "flashinfer_mla_run",
    "(SymInt key, Tensor q_nope, Tensor? q_pe, Tensor ckv, Tensor? kpe, Tensor(a!) out,"
    " Tensor(b!)? lse, bool base_e)",
)
def _run(
    key: int, q_nope: Any, q_pe: Any, ckv: Any, kpe: Any, out: Any, lse: Any, base_e: bool
) -> None:
    _torch_ops.find(key)._run(q_nope, q_pe, ckv, kpe, out, lse, base_e)


def _last(offsets: np.ndarray) -> int:
    """The last entry of an index array, 0 where that is no place."""
    return max(0, int(offsets.flat[-1])) if offsets.size else 0


def _one_dtype(queries: DTypeLike, cache: DTypeLike) -> str:
    for name, dtype in (("q_data_type", queries), ("kv_data_type", cache)):
        if "float8" in str(dtype):
            raise not_implemented(f"{name} {dtype}", _PLAN)
    names = dtype_name(queries), dtype_name(cache)
    if names[0] != names[1]:
        raise not_implemented(f"q_data_type {names[0]} with kv_data_type {names[1]}", _PLAN)
    return names[0]


def _checked_buffers(buffers: dict[str, Array]) -> dict[str, Array]:
    for name, buffer in buffers.items():
        if buffer is None:
            raise invalid(name, _NAME, "a buffer, with use_cuda_graph", None)
    check_indices(_NAME, **buffers)
    check_writable(_NAME, **buffers)
    sizes = {name: len(buffer) for name, buffer in buffers.items()}
    for name in ("qo_indptr", "kv_indptr"):
        if sizes[name] != sizes["kv_len_arr"] + 1:
            expected = f"{sizes['kv_len_arr'] + 1} entries, one more than kv_len_arr"
            raise invalid(name, _NAME, expected, sizes[name])
    return buffers


def _check_capacity(buffers: dict[str, Array], arrays: dict[str, Array]) -> None:
    """Raises ValueError where the buffers cannot take what plan was given."""
    for name, array in arrays.items():
        held = len(buffers[name])
        if name == "kv_indices" and len(array) > held:
            raise invalid(name, _PLAN, f"at most the buffer's {held} entries", len(array))
        if name != "kv_indices" and len(array) != held:
            raise invalid(name, _PLAN, f"the buffer's {held} entries", len(array))


def _covering(limits: Limits, plan: _Plan) -> Limits:
    """The limits, doubled until the plan is within them."""

    def cover(limit: int, needed: int) -> int:
        return limit if needed <= limit else 1 << (needed - 1).bit_length()

    return dataclasses.replace(
        limits,
        max_rows=cover(limits.max_rows, plan.num_rows),
        max_tokens=cover(limits.max_tokens, plan.num_tokens),
        max_listed_pages=cover(limits.max_listed_pages, plan.num_listed_pages),
    )


def _page_and_row(name: str, cache: Array, page_size: int) -> tuple[int, int]:
    """Strides of pages and rows in elements; of a dimension of 1 entry, as if without gaps."""
    if len(cache.shape) != 3:
        raise invalid(name, _RUN, "3 dimensions", len(cache.shape))
    page, row, _ = strides(cache)
    if page_size == 1:
        row = page if len(cache) > 1 else cache.shape[2]
    return (page if len(cache) > 1 else page_size * row), row
