"""One plan over the pages of a cache, and its runs."""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from ... import _torch_ops
from ..._arrays import dtype_name, to_torch
from ..._checks import integer, invalid, number, shown, text
from ..._module import Handle, torch
from ..._records import Bucket, CacheStrides, Geometry, Limits
from ...attention import PagedAttention, supports
from .._arrays import check_indices, check_rank, check_tensors, host_copy
from .._limits import NOTHING, limits_for
from .._refusals import not_implemented

# FlashInfer's names of its kernels, which choose nothing here; another name is a kernel of libmla.
_BACKENDS = ("auto", "fa2", "fa3", "cutlass")
INDEX_NAMES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
_WRAPPER = "FlashInferMLAWrapper"


def flashinfer_mla_supports(kv_lora_rank: int, qk_rope_head_dim: int) -> bool:
    """Whether a kernel serves the latent shape: true of every shape within libmla's limits.

    Of the GPU where PyTorch sees one, else of the CPU, which captures no graphs.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    geometry = Geometry(
        num_heads=1, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim, page_size=1
    )
    return bool(supports(geometry, device=device))


class Indices(NamedTuple):
    """The index arrays of one label (B rows), host int32."""

    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    kv_last_page_len: np.ndarray
    """1 to page_size; of a row without pages whatever it may be."""

    @property
    def num_rows(self) -> int:
        """Rows of the plan."""
        return len(self.qo_indptr) - 1

    @property
    def num_tokens(self) -> int:
        """Query tokens of all rows."""
        return int(self.qo_indptr[-1])

    @property
    def num_pages(self) -> np.ndarray:
        """Of each row."""
        return np.diff(self.kv_indptr)

    def check_pages(self, page_size: int, where: str) -> None:
        """Raises unless each row has its entries of the page list, and tokens on its last page."""
        if len(self.kv_indptr) != len(self.qo_indptr):
            expected = f"{len(self.qo_indptr)} entries, as qo_indptr has"
            raise invalid("paged_kv_indptr", where, expected, len(self.kv_indptr))
        if len(self.kv_last_page_len) != self.num_rows:
            expected = f"{self.num_rows} entries, one a row"
            raise invalid("paged_kv_last_page_len", where, expected, len(self.kv_last_page_len))
        starts = np.concatenate([[0], self.kv_indptr[:-1]])
        for i in np.flatnonzero(self.kv_indptr < starts):
            expected = f"{starts[i]} or more"
            raise invalid(f"paged_kv_indptr[{i}]", where, expected, self.kv_indptr[i])
        if self.kv_indptr[-1] > len(self.kv_indices):
            expected = f"{self.kv_indptr[-1]} entries, of which paged_kv_indptr speaks"
            raise invalid("paged_kv_indices", where, expected, len(self.kv_indices))
        is_length = (self.kv_last_page_len >= 1) & (self.kv_last_page_len <= page_size)
        for i in np.flatnonzero((self.num_pages > 0) & ~is_length):
            expected = f"1 to {page_size}, since the row has pages"
            raise invalid(f"paged_kv_last_page_len[{i}]", where, expected, self.kv_last_page_len[i])

    def equals(self, other: "Indices") -> bool:
        """Whether every array holds the same numbers."""
        return all(map(np.array_equal, self, other))


class _Plan(NamedTuple):
    """What a wrapper was last asked to plan."""

    indices: Indices
    causal: bool


class _Holder(NamedTuple):
    """What a plan object is made for."""

    num_pages: int
    dtype: str
    page_stride: int
    row_stride: int
    limits: Limits


class FlashInferMLAWrapper(Handle):
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
        if sm_scale is None or not 0 < number(sm_scale, "sm_scale", _WRAPPER) < math.inf:
            raise invalid("sm_scale", _WRAPPER, "above 0, as 192 ** -0.5 (no default)", sm_scale)
        for name, count in (
            ("batch_size", batch_size),
            ("max_num_pages", max_num_pages),
            ("max_listed_pages", max_listed_pages),
        ):
            if count is not None:
                integer(count, name, _WRAPPER, 0)
        if use_cuda_graph and (batch_size is None or max_num_pages is None):
            got = (batch_size, max_num_pages)
            raise invalid("batch_size, max_num_pages", _WRAPPER, "both, for CUDA graphs", got)
        self._device = torch_device(device, _WRAPPER)
        self._geometry = Geometry(
            num_heads=num_qo_heads,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            page_size=page_size,
        )
        backend = text(backend, "backend", _WRAPPER)
        self._kernel_asked = "" if backend in _BACKENDS else backend
        support = supports(self._geometry, device=self._device, kernel=self._kernel_asked)
        if not support:
            raise invalid("kernel", _WRAPPER, "one that serves the shape", support.reason)
        self._kernel = support.kernel
        self._sm_scale = sm_scale
        self._max_num_pages = max_num_pages
        self._batch_size = batch_size if use_cuda_graph else None
        self._max_listed_pages = max_listed_pages or max_num_pages
        width = self._geometry.latent_width
        self._holder = _Holder(
            max_num_pages or 0,
            self._geometry.dtype,
            page_size * width,
            width,
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
        indices, holder = indices_of(arrays), self._holder
        named = _dtype_name(dtype if kv_dtype is None else kv_dtype)
        if self._attention is None:
            holder = holder._replace(dtype=named)
        if not self._is_captured:
            holder = self._grown(holder, indices)
        self._put(_Plan(indices, causal), holder)

    def _grown(self, holder: _Holder, indices: Indices) -> _Holder:
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
        page, row = holder.page_stride, holder.row_stride
        kpe = {"kpe_page": page, "kpe_row": row} if self._geometry.qk_rope_head_dim else {}
        return PagedAttention(
            geometry=dataclasses.replace(self._geometry, dtype=holder.dtype),
            num_pages=holder.num_pages,
            device=self._device,
            strides=CacheStrides(ckv_page=page, ckv_row=row, **kpe),
            limits=holder.limits,
            bucket=bucket,
            capture=bucket is not None and self._device.type == "cuda",
            kernel=self._kernel_asked,
        )

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
        tensors = {"q_nope": q_nope, "kv_cache_layer": kv_cache_layer}
        if q_pe is not None:
            tensors["q_pe"] = q_pe
        check_tensors(f"{_WRAPPER}.run", **tensors)
        check_rank(f"{_WRAPPER}.run", 3, q_nope=q_nope, kv_cache_layer=kv_cache_layer)
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
        if has_rope:
            check_rank(f"{_WRAPPER}.run", 3, q_pe=q_pe)
        num_tokens = q_nope.shape[0]
        attention = self._fit(num_tokens, layer)
        layer = _first(layer, self._holder.num_pages)
        live = self._num_live(num_tokens)
        if live < num_tokens:
            out[live:] = 0
            if lse is not None:
                lse[live:] = -math.inf
        ckv, kpe = layer.tensor_split((rank,), -1)
        result = _first(out, live, layer.dtype)  # out's own memory, where the dtypes agree
        attention.run(
            q_nope=_first(q_nope, live, layer.dtype),
            q_pe=_first(q_pe, live, layer.dtype) if has_rope else None,
            ckv=ckv,
            kpe=kpe if has_rope else None,
            out=result,
            lse=None if lse is None else _first(lse, live),
        )
        if result.dtype != out.dtype:
            out[:live] = result

    def _fit(self, num_tokens: int, layer: Any) -> PagedAttention:
        """The plan object, made anew where it is not for this layer and, in a graph, tokens."""
        if self._planned is None:
            raise _out_of_order("run", "plan", "a plan before it")
        holder = self._holder._replace(
            num_pages=self._max_num_pages or layer.shape[0],
            dtype=_dtype_name(layer.dtype),
            page_stride=layer.stride(0),
            row_stride=layer.stride(1),
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


def _first(tensor: Any, count: int, dtype: Any = None) -> Any:
    """The first rows, in another type where one is named: the tensor itself where it is that."""
    rows = tensor if tensor.shape[0] == count else tensor[:count]
    return rows if dtype in (None, rows.dtype) else rows.to(dtype)


def _dtype_name(dtype: Any) -> str:
    if "float8" in str(dtype):
        raise not_implemented(f"an FP8 cache ({dtype})", _WRAPPER)
    return dtype_name(dtype)


def torch_device(device: Any, where: str) -> Any:
    """A device as PyTorch's."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise invalid("device", where, "cpu, cuda or cuda:INDEX", shown(device)) from None


def _is_capturing(device: Any) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def indices_of(arrays: Any) -> Indices:
    """Copies of index arrays on the host."""
    if len(arrays) != len(INDEX_NAMES):
        expected = f"{len(INDEX_NAMES)} arrays: {', '.join(INDEX_NAMES)}"
        raise invalid("cpu_indptrs", f"{_WRAPPER}.plan", expected, len(arrays))
    named = dict(zip(INDEX_NAMES, arrays, strict=True))
    check_indices(f"{_WRAPPER}.plan", **named)
    for name, array in named.items():
        if "indptr" in name and len(array) == 0:
            raise invalid(name, f"{_WRAPPER}.plan", "1 or more entries", 0)
    copies = Indices(*map(host_copy, arrays))
    return copies._replace(kv_indices=copies.kv_indices[: max(0, copies.kv_indptr[-1])])
