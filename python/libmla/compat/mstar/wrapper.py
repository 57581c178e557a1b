"""The MLA attention of a serving engine whose resources plan each step: its names over libmla.

    from libmla.compat.mstar import FlashInferMLAManager, flashinfer_mla_supports

Every latent shape that `libmla.supports` accepts runs on a kernel. The engine's own objects are
read as they are, by their attributes:

    kv_config  layout (an enum whose name is MLA), num_qo_heads, kv_lora_rank, qk_rope_head_dim,
               page_size, max_num_pages, max_seq_len
    step       causal, context_only, segments (each with request_id, label, span)
    ctx        slot_lease (None, or with slot and bucket), slot, is_preplan, and plan_results: the
               plan of each resource by its key
    KV plan    a mapping from each label to an object with
               cpu_indptrs: qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
               host int32 tensors, in this order or by these names
               views: one a row, with request_id, label, page_idxs, length, to_compute, start
"""

import collections
import dataclasses
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import _torch_ops
from .._arrays import dtype_name, invalid, to_torch
from .._module import torch
from .._records import Bucket, CacheStrides, Geometry, Limits
from ..attention import PagedAttention, supports
from ._arrays import host_copy
from ._limits import NOTHING, limits_for
from ._refusals import not_implemented

if torch is None:
    raise ImportError("libmla.compat.mstar: torch is not installed")

__all__ = ["FlashInferMLAManager", "FlashInferMLAWrapper", "flashinfer_mla_supports"]

# FlashInfer's names of its kernels, which choose nothing here; another name is a kernel of libmla.
_BACKENDS = ("auto", "fa2", "fa3", "cutlass")
_NAMES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
_WRAPPER, _MANAGER = "FlashInferMLAWrapper", "FlashInferMLAManager"


def flashinfer_mla_supports(kv_lora_rank: int, qk_rope_head_dim: int) -> bool:
    """Whether a kernel serves the latent shape: true of every shape within libmla's limits.

    Of the GPU where PyTorch sees one, else of the CPU, which captures no graphs.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    geometry = Geometry(
        num_heads=1, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim, page_size=1
    )
    return bool(supports(geometry, device=device))


class _Indices(NamedTuple):
    """The index arrays of one label (B rows), host int32."""

    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    kv_last_page_len: np.ndarray
    """1 to page_size; of a row without pages whatever it may be."""

    @property
    def num_rows(self) -> int:
        return len(self.qo_indptr) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.qo_indptr[-1])

    @property
    def num_pages(self) -> np.ndarray:
        """Of each row."""
        return np.diff(self.kv_indptr)

    def equals(self, other: "_Indices") -> bool:
        return all(map(np.array_equal, self, other))


class _Plan(NamedTuple):
    """What a wrapper was last asked to plan."""

    indices: _Indices
    causal: bool


class _Holder(NamedTuple):
    """What a plan object is made for."""

    num_pages: int
    dtype: str
    strides: CacheStrides
    limits: Limits


class FlashInferMLAWrapper:
    """One plan over the pages of a cache, and its runs.

    workspace_buffer  not needed: the wrapper owns its scratch
    num_qo_heads      query heads of this rank
    kv_lora_rank, qk_rope_head_dim, page_size  of the cache
    sm_scale          of the head before it is absorbed (192 ** -0.5); has no default
    batch_size        rows of a plan under CUDA graphs, fixed for the wrapper's life; plans may have
                      fewer
    max_num_pages     pages of the cache, and no plan may list others; None: as many as a layer has
    device            "cuda", "cpu" or a torch.device
    use_cuda_graph    needs batch_size and max_num_pages; index buffers keep their addresses, and a
                      run may be captured after one of the same shape that was not
    backend           FlashInfer's names choose nothing; a kernel's name of libmla chooses that one
    max_listed_pages  page ids of a plan under CUDA graphs; None: max_num_pages

    Raises ValueError: a value out of range, no kernel. Calls on one wrapper must not overlap.
    """

    def __init__(
        self,
        workspace_buffer: Any,
        num_qo_heads: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        page_size: int,
        sm_scale: float,
        batch_size: int | None = None,
        max_num_pages: int | None = None,
        device: Any = "cuda",
        use_cuda_graph: bool = False,
        backend: str = "auto",
        *,
        max_listed_pages: int | None = None,
    ) -> None:
        if sm_scale is None or not 0 < sm_scale < math.inf:
            raise invalid("sm_scale", _WRAPPER, "above 0, as 192 ** -0.5 (no default)", sm_scale)
        if use_cuda_graph and (batch_size is None or max_num_pages is None):
            got = (batch_size, max_num_pages)
            raise invalid("batch_size, max_num_pages", _WRAPPER, "both, for CUDA graphs", got)
        self._device = torch.device(device)
        self._geometry = Geometry(
            num_heads=num_qo_heads,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            page_size=page_size,
        )
        self._kernel_asked = "" if backend in _BACKENDS else backend
        support = supports(self._geometry, device=self._device, kernel=self._kernel_asked)
        if not support:
            raise ValueError(f"{_WRAPPER}: {support.reason}")
        self._kernel = support.kernel
        self._sm_scale = sm_scale
        self._max_num_pages = max_num_pages
        self._batch_size = batch_size if use_cuda_graph else None
        self._max_listed_pages = max_listed_pages or max_num_pages
        width = self._geometry.latent_width
        self._holder = _Holder(
            max_num_pages or 0,
            self._geometry.dtype,
            self._strides(page_size * width, width),
            NOTHING,
        )
        self._attention: PagedAttention | None = None
        self._planned: _Plan | None = None
        self._key = _torch_ops.register(self)
        self._is_captured = False
        if self._batch_size is not None:
            rows = self._batch_size
            self._qo_indptr = torch.zeros(rows + 1, dtype=torch.int32, device=self._device)
            self._kv_len = torch.zeros(rows, dtype=torch.int32, device=self._device)
        self._staged = torch.cuda.Event() if self._device.type == "cuda" else None

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        causal: bool = True,
        dtype: Any = torch.bfloat16,
        kv_dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        """Plans B rows; tensors of a device are copied to the host, which waits for them.

        qo_indptr               [B + 1] int32, first query of each row, from 0
        paged_kv_indptr         [B + 1] int32, offsets into paged_kv_indices
        paged_kv_indices        int32 page ids in token order
        paged_kv_last_page_len  [B] int32, 1 to page_size; anything for a row without pages, which
                                has no tokens
        causal                  query j of n, of a row with m tokens, sees 0 .. m - n + j; else all
        dtype, kv_dtype         of queries and cache, kv_dtype None: dtype; what runs then bring is
                                taken as it is

        Other keywords must be None or False. Raises ValueError, after which the plan before it is
        still in use, and NotImplementedError: an FP8 cache, another keyword.
        """
        for name, value in kwargs.items():
            if value is not None and value is not False:
                raise not_implemented(name, f"{_WRAPPER}.plan")
        arrays = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        indices, holder = _indices(arrays), self._holder
        if self._attention is None:
            holder = holder._replace(dtype=_dtype_name(kv_dtype or dtype))
        if not self._is_captured:
            holder = self._grown(holder, indices)
        self._put(_Plan(indices, causal), holder)

    def _grown(self, holder: _Holder, indices: _Indices) -> _Holder:
        """The same with room for a plan."""
        if self._batch_size is None:
            sizes = indices.num_rows, indices.num_tokens, len(indices.kv_indices)
            limits = limits_for(*sizes, holder.limits)
        else:
            limits = Limits(
                max_rows=self._batch_size,
                max_tokens=max(holder.limits.max_tokens, indices.num_tokens, 1),
                max_listed_pages=self._max_listed_pages or 0,
            )
        num_pages = holder.num_pages
        if self._max_num_pages is None:
            num_pages = max(num_pages, int(indices.kv_indices.max(initial=-1)) + 1)
        return holder._replace(limits=limits, num_pages=num_pages)

    def _put(self, plan: _Plan, holder: _Holder) -> None:
        """Plans into an object for such a holder: the one in use, where it is that."""
        attention = self._attention
        if attention is None or holder != self._holder:
            attention = self._make(holder)
        indices = plan.indices
        attention.plan(
            qo_indptr=indices.qo_indptr,
            kv_indptr=indices.kv_indptr,
            kv_indices=indices.kv_indices,
            kv_last_page_len=indices.kv_last_page_len,
            sm_scale=self._sm_scale,
            causal=plan.causal,
        )
        self._attention, self._holder, self._planned = attention, holder, plan
        if self._batch_size is not None:
            self._qo_indptr.copy_(to_torch(attention.qo_indptr_buf))
            self._kv_len.copy_(to_torch(attention.kv_len_buf))
        if self._staged is not None:
            self._staged.record(torch.cuda.current_stream(self._device))

    def _make(self, holder: _Holder) -> PagedAttention:
        bucket = None
        if self._batch_size is not None:
            bucket = Bucket(self._batch_size, holder.limits.max_tokens)
        return PagedAttention(
            geometry=dataclasses.replace(self._geometry, dtype=holder.dtype),
            num_pages=holder.num_pages,
            device=self._device,
            strides=holder.strides,
            limits=holder.limits,
            bucket=bucket,
            capture=bucket is not None and self._device.type == "cuda",
            kernel=self._kernel_asked,
        )

    def _strides(self, page: int, row: int) -> CacheStrides:
        kpe = {"kpe_page": page, "kpe_row": row} if self._geometry.qk_rope_head_dim else {}
        return CacheStrides(ckv_page=page, ckv_row=row, **kpe)

    def run(self, q_nope: Any, q_pe: Any, kv_cache_layer: Any, return_lse: bool = False) -> Any:
        """Attends; gives out and, with return_lse, the LSE beside it.

        q_nope          [T, H, kv_lora_rank], absorbed. T: the plan's tokens, or more: rows past the
                        plan's get zeros and LSE -inf
        q_pe            [T, H, qk_rope_head_dim]; None or empty at width 0
        kv_cache_layer  [pages, page_size, latent], any page and row stride

        out  [T, H, kv_lora_rank] of q_nope's dtype; lse [T, H] fp32, natural

        Queries of another dtype than the cache's are rounded to that, and the output to theirs. The
        first run over a layer of another dtype, other strides or fewer pages than before makes the
        plan object anew. Queued on the current stream. Raises ValueError (a tensor does not fit),
        RuntimeError (no plan; captured before a run of this shape that was not). Under
        torch.compile it is the operator libmla::mstar_run.
        """
        out = q_nope.new_empty(q_nope.shape)
        lse = q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32) if return_lse else None
        if _torch_ops.is_compiling():
            _run(self._key, q_nope, q_pe, kv_cache_layer, out, lse)
        else:
            self._run(q_nope, q_pe, kv_cache_layer, out, lse)
        return out if lse is None else (out, lse)

    def _run(self, q_nope: Any, q_pe: Any, layer: Any, out: Any, lse: Any) -> None:
        rank, has_rope = self._geometry.kv_lora_rank, self._geometry.qk_rope_head_dim > 0
        if has_rope and q_pe is None:
            raise invalid("q_pe", f"{_WRAPPER}.run", "the rotated part of the queries", None)
        attention = self._fit(len(q_nope), layer)
        layer = layer[: self._holder.num_pages]
        live = self._num_live(len(q_nope))
        if live < len(q_nope):
            out[live:] = 0
            if lse is not None:
                lse[live:] = -math.inf
        result = out[:live].to(layer.dtype)  # out's own memory, where the dtypes agree
        attention.run(
            q_nope=q_nope[:live].to(layer.dtype),
            q_pe=q_pe[:live].to(layer.dtype) if has_rope else None,
            ckv=layer[..., :rank],
            kpe=layer[..., rank:] if has_rope else None,
            out=result,
            lse=None if lse is None else lse[:live],
        )
        if result.dtype != out.dtype:
            out[:live] = result

    def _fit(self, num_tokens: int, layer: Any) -> PagedAttention:
        """The plan object, made anew where it is not for this layer and, in a graph, tokens."""
        if self._planned is None:
            raise _out_of_order("run", "plan", "a plan before it")
        holder = self._holder
        if layer.dim() == 3:  # else the run refuses it
            holder = holder._replace(
                num_pages=self._max_num_pages or len(layer),
                dtype=_dtype_name(layer.dtype),
                strides=self._strides(layer.stride(0), layer.stride(1)),
            )
        if num_tokens > holder.limits.max_tokens and self._batch_size is not None:
            limits = dataclasses.replace(holder.limits, max_tokens=num_tokens)
            holder = holder._replace(limits=limits)
        if _is_capturing(self._device):
            is_bucket = self._batch_size is not None and num_tokens == holder.limits.max_tokens
            if holder != self._holder or not is_bucket:
                expected = "use_cuda_graph, and a run of this shape that is not captured before it"
                raise _out_of_order("run", "capture", expected)
            self._is_captured = True
        if holder != self._holder and not self._is_captured:
            self._put(self._planned, holder)
        return self._current("run")

    def _num_live(self, num_tokens: int) -> int:
        """The rows of a query that the plan object takes."""
        if self._batch_size is not None and num_tokens == self._holder.limits.max_tokens:
            return num_tokens
        return min(num_tokens, self.num_tokens)

    def needed_tokens(self) -> tuple[int, str]:
        """Tokens that a call must bring at least, and whose they are.

        In a capture the bucket's: later plans may have as many.
        """
        if _is_capturing(self._device):
            return self._holder.limits.max_tokens, "the bucket's tokens"
        return self.num_tokens, "the plan's tokens"

    @property
    def kernel(self) -> str:
        """Name of the kernel that serves the plans."""
        return self._kernel if self._attention is None else self._attention.kernel

    @property
    def num_tokens(self) -> int:
        """Query tokens of the plan; 0 before it."""
        return 0 if self._planned is None else self._planned.indices.num_tokens

    @property
    def qo_indptr_buf(self) -> Any:
        """The plan's query offsets [rows + 1], int32 on the device."""
        if self._batch_size is not None:
            return self._qo_indptr
        return to_torch(self._current("qo_indptr_buf").qo_indptr_buf)

    @property
    def kv_len_buf(self) -> Any:
        """The plan's lengths [rows], int32 on the device."""
        if self._batch_size is not None:
            return self._kv_len
        return to_torch(self._current("kv_len_buf").kv_len_buf)

    def _current(self, where: str) -> PagedAttention:
        if self._attention is None:
            raise _out_of_order(where, "plan", "a plan before it")
        return self._attention

    def order_after_plan(self) -> None:
        """Puts the current stream, and so its runs and replays, behind the plan's copies."""
        if self._staged is not None:
            self._staged.wait(torch.cuda.current_stream(self._device))
            self._current("order_after_plan").order_replay()


@_torch_ops.operator(
    "mstar_run",
    "(SymInt key, Tensor q_nope, Tensor? q_pe, Tensor layer, Tensor(a!) out, Tensor(b!)? lse)",
)
def _run(key: int, *tensors: Any) -> None:
    _torch_ops.find(key)._run(*tensors)


def _out_of_order(where: str, what: str, expected: str) -> RuntimeError:
    return RuntimeError(f"{_WRAPPER}.{where}: {what}: expected {expected}, got none")


def _dtype_name(dtype: Any) -> str:
    if "float8" in str(dtype):
        raise not_implemented(f"an FP8 cache ({dtype})", _WRAPPER)
    return dtype_name(dtype)


@dataclass(frozen=True, eq=False)
class MLAPlan:
    """What FlashInferMLAManager.plan returns: the plan of every label. Not to be changed."""

    slot: int
    bucket: Hashable
    causal: bool
    indices: Mapping[str, _Indices]
    wrappers: Mapping[str, FlashInferMLAWrapper]

    def is_of(self, other: "MLAPlan") -> bool:
        """Whether planning the other would do the same again."""
        return (
            (self.slot, self.bucket, self.causal) == (other.slot, other.bucket, other.causal)
            and self.indices.keys() == other.indices.keys()
            and all(mine.equals(other.indices[label]) for label, mine in self.indices.items())
        )


class FlashInferMLAManager:
    """The attention resource of a step: plans every label that the KV resource planned.

    kv_cache   the KV resource's name: its key in ctx.plan_results
    device     "cuda", "cpu" or a torch.device
    dtype      of the queries, and of the cache until a layer says otherwise
    kv_config  see the module
    backend    as of FlashInferMLAWrapper
    sm_scale   of the head before it is absorbed; must be given

    Wrappers are kept for the manager's life: one for each slot and label, and under a lease that
    names a bucket one for each bucket, slot and label, made for CUDA graphs with the rows of its
    first plan. Raises ValueError: a cache that is not laid out as MLA, no sm_scale, no query heads.
    """

    supports_preplan = True
    """A step with a lease may be planned while the one before it runs."""
    force_double_buffer = False
    """Staging cannot race: a plan's buffers are not reused before they are copied."""

    def __init__(
        self,
        kv_cache: str,
        device: Any,
        dtype: Any,
        kv_config: Any,
        backend: str = "auto",
        sm_scale: float | None = None,
    ) -> None:
        layout = getattr(kv_config.layout, "name", kv_config.layout)
        if layout != "MLA":
            raise invalid("kv_config.layout", _MANAGER, "MLA", layout)
        num_heads = getattr(kv_config, "num_qo_heads", None)
        if not num_heads:
            raise invalid("kv_config.num_qo_heads", _MANAGER, "1 or more", num_heads)
        self._kv_cache = kv_cache
        self._device = torch.device(device)
        self._dtype = dtype
        self._config = kv_config
        self._backend = backend
        self._sm_scale = sm_scale
        self._kernel = self._wrapper().kernel
        self._wrappers: dict[Hashable, FlashInferMLAWrapper] = {}
        self._current: MLAPlan | None = None
        self._early: MLAPlan | None = None

    def _wrapper(self, num_rows: int | None = None) -> FlashInferMLAWrapper:
        """A new one; with a number of rows for CUDA graphs."""
        config = self._config
        listed = (num_rows or 0) * -(-(config.max_seq_len or 0) // config.page_size)
        return FlashInferMLAWrapper(
            None,
            config.num_qo_heads,
            config.kv_lora_rank,
            config.qk_rope_head_dim,
            config.page_size,
            self._sm_scale,  # type: ignore[arg-type]  # the wrapper refuses None
            batch_size=num_rows,
            max_num_pages=config.max_num_pages,
            device=self._device,
            use_cuda_graph=num_rows is not None,
            backend=self._backend,
            max_listed_pages=max(config.max_num_pages or 0, min(listed, Limits().max_listed_pages)),
        )

    def depends_on(self) -> set[str]:
        """The resources whose plans it reads."""
        return {self._kv_cache}

    @property
    def uses_kernel(self) -> bool:
        """False only where the backend asked for is the plain reference."""
        return self._kernel != "reference"

    def plan(self, step: Any, ctx: Any) -> MLAPlan:
        """Plans the rows that the KV resource planned, of every label.

        Each label's queries and pages are those of its KV plan. In a context_only step they are the
        rows' stored contexts, without what the step appends and the pages past it, and the queries
        of step.segments, the i-th of a label for its i-th row. Causal is passed on as given.

        With ctx.is_preplan the plan waits, and the one in use stays. The next plan without it takes
        its place at once where it asks for the same (lease, causal, and every row's queries, pages
        and lengths); else the early plan is dropped.

        Gives the plan, for ctx.plan_results. Raises ValueError: another number of segments than
        rows, an index out of range, a pre-plan without a lease or into the slot of the plan in use;
        RuntimeError: a second pre-plan. A refused ordinary plan may leave no plan in use.
        """
        wanted = self._wanted(step, ctx)
        if ctx.is_preplan:
            self._check_early(wanted, ctx)
            self._stage(wanted)
            self._early = wanted
            return wanted
        early, self._early = self._early, None
        if early is not None and early.is_of(wanted):
            for wrapper in early.wrappers.values():
                wrapper.order_after_plan()
            self._current = early
            return early
        self._current = None  # should a label be refused
        self._stage(wanted)
        self._current = wanted
        return wanted

    def _wanted(self, step: Any, ctx: Any) -> MLAPlan:
        lease = ctx.slot_lease
        slot, bucket = (ctx.slot, None) if lease is None else (lease.slot, lease.bucket)
        kv_plan = ctx.plan_results.get(self._kv_cache)
        if kv_plan is None:
            expected = f"a plan of {self._kv_cache!r}"
            raise invalid("ctx.plan_results", f"{_MANAGER}.plan", expected, list(ctx.plan_results))
        indices = {label: _indices(_named(part.cpu_indptrs)) for label, part in kv_plan.items()}
        if step.context_only:
            counts = _query_counts(step.segments, kv_plan)
            for label, part in kv_plan.items():
                appended = [view.to_compute for view in part.views]
                indices[label] = self._context(label, indices[label], appended, counts[label])
        wrappers = {}
        for label, arrays in indices.items():
            key = (bucket, slot, label)
            if key not in self._wrappers:
                self._wrappers[key] = self._wrapper(None if bucket is None else arrays.num_rows)
            wrappers[label] = self._wrappers[key]
        return MLAPlan(slot, bucket, bool(step.causal), indices, wrappers)

    def _context(
        self, label: str, indices: _Indices, appended: list[int], queries: list[int]
    ) -> _Indices:
        """The rows' stored contexts alone, with query counts of their own."""
        if len(appended) != indices.num_rows:
            what = f"views of label {label!r}"
            raise invalid(what, f"{_MANAGER}.plan", f"{indices.num_rows}, one a row", len(appended))
        page_size, pages = self._config.page_size, indices.num_pages
        lengths = np.where(pages > 0, (pages - 1) * page_size + indices.kv_last_page_len, 0)
        stored = lengths - np.array(appended, np.int64)
        for i in np.flatnonzero(stored < 0):
            what = f"views[{i}].to_compute of {label!r}"
            raise invalid(
                what, f"{_MANAGER}.plan", f"at most {lengths[i]}, its length", appended[i]
            )
        kept = -(-stored // page_size)
        position = np.arange(len(indices.kv_indices)) - np.repeat(indices.kv_indptr[:-1], pages)
        return _Indices(
            qo_indptr=np.cumsum([0, *queries], dtype=np.int32),
            kv_indptr=np.cumsum([0, *kept], dtype=np.int32),
            kv_indices=indices.kv_indices[position < np.repeat(kept, pages)],
            kv_last_page_len=(stored - np.maximum(kept - 1, 0) * page_size).astype(np.int32),
        )

    def _check_early(self, wanted: MLAPlan, ctx: Any) -> None:
        where = f"{_MANAGER}.plan"
        if self._early is not None:
            raise RuntimeError(f"{where}: is_preplan: expected no early plan before it, got one")
        if ctx.slot_lease is None:
            raise invalid("ctx.slot_lease", where, "a lease, with is_preplan", None)
        used = self._current.wrappers.values() if self._current else ()
        if any(wrapper in used for wrapper in wanted.wrappers.values()):
            expected = "another slot or bucket than the plan in use has, with is_preplan"
            raise invalid("ctx.slot_lease", where, expected, (wanted.slot, wanted.bucket))

    def _stage(self, wanted: MLAPlan) -> None:
        for label, wrapper in wanted.wrappers.items():
            wrapper.plan(*wanted.indices[label], causal=wanted.causal, dtype=self._dtype)

    def clear_preplan(self) -> None:
        """Drops the early plan, if any."""
        self._early = None

    def run(
        self,
        q: Any,
        label: str | None = None,
        kv_cache_layer: Any = None,
        k: Any = None,
        v: Any = None,
        layer_idx: int | None = None,
        q_pe: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """Attends with the current plan of a label: FlashInferMLAWrapper.run.

        q               [T, H, kv_lora_rank], absorbed; q_pe [T, H, qk_rope_head_dim]
        label           None: "main"
        kv_cache_layer  the layer, [pages, page_size, latent]; must be given
        k, v            None: the KV resource writes the cache
        layer_idx       not needed beside the layer

        Raises ValueError, RuntimeError (no plan).
        """
        where = f"{_MANAGER}.run"
        if kv_cache_layer is None:
            raise invalid("kv_cache_layer", where, "a layer of the cache", None)
        if k is not None or v is not None:
            raise invalid("k, v", where, "None: the KV resource writes the cache", "tensors")
        return self._wrapper_of(label or "main", where).run(q, q_pe, kv_cache_layer, return_lse)

    def _wrapper_of(self, label: str, where: str) -> FlashInferMLAWrapper:
        if self._current is None:
            raise RuntimeError(f"{where}: plan: expected a plan before it, got none")
        wrapper = self._current.wrappers.get(label)
        if wrapper is None:
            raise invalid("label", where, f"one of {sorted(self._current.wrappers)}", repr(label))
        return wrapper

    def qo_indptr_buf(self, label: str = "main") -> Any:
        """The label's query offsets [rows + 1], int32 on the device; None where it has no plan.

        At the same address in every plan of a bucket and slot.
        """
        if self._current is None or label not in self._current.wrappers:
            return None
        return self._current.wrappers[label].qo_indptr_buf

    def kv_len_buf(self, label: str = "main") -> Any:
        """The rows' planned lengths [rows], int32 on the device.

        In a context_only plan those of the stored contexts, where what the step appends starts. At
        the same address in every plan of a bucket and slot. Raises as run.
        """
        return self._wrapper_of(label, f"{_MANAGER}.kv_len_buf").kv_len_buf

    def select_last_hidden(self, hidden: Any, label: str = "main") -> Any:
        """Row qo_indptr[i + 1] - 1 of hidden [T, ...] for each row of the plan: [rows, ...].

        Zeros for a row without queries. On the device; may be captured. Raises as run.
        """
        wrapper = self._wrapper_of(label, f"{_MANAGER}.select_last_hidden")
        needed, whose = wrapper.needed_tokens()
        if len(hidden) < needed:
            where = f"{_MANAGER}.select_last_hidden"
            raise invalid("hidden.shape[0]", where, f"{needed}, {whose}, or more", len(hidden))
        offsets = wrapper.qo_indptr_buf
        if len(hidden) == 0:
            return hidden.new_zeros(len(offsets) - 1, *hidden.shape[1:])
        last = hidden.index_select(0, (offsets[1:] - 1).clamp(min=0))
        has_queries = (offsets[1:] > offsets[:-1]).view(-1, *[1] * (hidden.dim() - 1))
        return torch.where(has_queries, last, 0)


def _is_capturing(device: Any) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _indices(arrays: Any) -> _Indices:
    """Copies of index arrays on the host."""
    copies = _Indices(*map(host_copy, arrays))
    for name, array in zip(_NAMES, copies, strict=True):
        if array.ndim != 1 or array.dtype != np.int32 or ("indptr" in name and len(array) == 0):
            got = f"{list(array.shape)} {array.dtype}"
            raise invalid(name, f"{_WRAPPER}.plan", "one dimension, int32", got)
    return copies._replace(kv_indices=copies.kv_indices[: max(0, copies.kv_indptr[-1])])


def _named(indptrs: Any) -> Any:
    """The four index arrays, of a tuple, a mapping or an object."""
    if isinstance(indptrs, Mapping):
        return [indptrs[name] for name in _NAMES]
    if hasattr(indptrs, _NAMES[0]):
        return [getattr(indptrs, name) for name in _NAMES]
    return indptrs


def _query_counts(segments: Any, kv_plan: Any) -> dict[str, list[int]]:
    """The spans of a step's segments for each plan's rows: paired by label and position."""
    spans: dict[str, list[int]] = {}
    for segment in segments:
        spans.setdefault(segment.label, []).append(segment.span)
    rows = collections.Counter(view.label for part in kv_plan.values() for view in part.views)
    for label in spans.keys() | rows.keys():
        given, expected = len(spans.get(label, [])), rows[label]
        if given != expected:
            what = f"segments of label {label!r}"
            raise invalid(what, f"{_MANAGER}.plan", f"{expected}, as many as its rows", given)
    taken = {label: iter(counts) for label, counts in spans.items()}
    return {
        plan: [next(taken[view.label]) for view in part.views] for plan, part in kv_plan.items()
    }
