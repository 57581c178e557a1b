"""What a step needs and the host plans: the pages of the cache, and the attention over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _torch_ops
from ._arrays import (
    A,
    StreamLike,
    SupportsDLPack,
    argument,
    lent,
    like,
    optional,
    output,
    refuse_gradients,
    stream_handle,
    to_numpy,
)
from ._checks import entries, instance, integer, invalid, pair, scale, text
from ._module import Handle, core
from ._records import Limits, LseBase, SplitPolicy, lse_base_code
from .attention import Executor, executor_box, fields_of
from .pool import LatentPool
from .step import KvStream, request_of

_KV, _RESOURCE = "KvResource", "AttentionResource"
_RUN, _SELECT = f"{_RESOURCE}::run", f"{_RESOURCE}::select_last_hidden"


@dataclass(frozen=True)
class LabelPlan:
    """One label's part of a plan (B streams, T new rows), in packed order: NumPy arrays, copies."""

    qo_indptr: np.ndarray
    """[B + 1] int32, first new row of each stream."""
    kv_indptr: np.ndarray
    """[B + 1] int32, offsets into kv_indices."""
    kv_indices: np.ndarray
    """[kv_indptr[B]] int32, page ids in token order."""
    kv_len: np.ndarray
    """[B] int32, new rows included."""
    kv_last_page_len: np.ndarray
    """[B] int32, 0 for a stream without tokens."""
    slots: np.ndarray
    """[T] int64, where each new row lands; under a bucket as many as its tokens, -1 past T."""
    requests: np.ndarray
    """[B] int64."""
    start: np.ndarray
    """[B] int64, tokens stored before the step: the position of the first new row."""
    to_compute: np.ndarray
    """[B] int64, rows that the step appends."""

    def batch(self) -> dict[str, np.ndarray]:
        """The arrays that PagedAttention.plan takes, by name."""
        return {
            "qo_indptr": self.qo_indptr,
            "kv_indptr": self.kv_indptr,
            "kv_indices": self.kv_indices,
            "kv_len": self.kv_len,
        }


@dataclass(frozen=True)
class PageCounts:
    """Where the pool's usable pages are."""

    free: int
    owned: int
    """Held by one stream."""
    shared: int
    """Held by several, or by streams and the prefix index."""
    cached: int
    """Held by the prefix index alone: taken back when pages run out."""
    reserved: int
    """Given to an admitted step, not yet filled."""


class KvResource(Handle):
    """Who holds which pages of a pool, and what a step appends where.

    pool  which this object alone decides over: another one, while it lives, is refused
    key   its name in steps

    Its admit and plan are those of the StepRunner; between plan and commit `write` stores the new
    rows. A stream is named by its request, 0 to 2^63 - 1, and its label. Raises ValueError for what
    does not fit, RuntimeError for calls out of order; a refused call changes nothing.
    """

    def __init__(self, pool: LatentPool, *, key: str = "kv") -> None:
        self.pool = instance(pool, LatentPool, "pool", _KV)
        self.key = text(key, "key", _KV)
        self._device = pool._device
        self._layers = pool._layers
        self._box = core.kv_make(pool._box, key)
        self._key = _torch_ops.register(self)

    def open(
        self,
        request: int,
        num_tokens: int = 0,
        *,
        page_keys: Sequence[tuple[int, int]] = (),
        label: str = "main",
    ) -> int:
        """Makes an empty stream and attaches the longest known prefix of its first tokens.

        page_keys  two halves of 64 bits for each page, which name its content and all before it

        Returns the tokens that are stored already, at most num_tokens - 1.
        """
        where = f"{_KV}::open"
        return core.kv_open(
            self._box,
            *_stream(request, label, where),
            integer(num_tokens, "num_tokens", where),
            _signed(page_keys, where),
        )

    def add_page_keys(
        self, request: int, page_keys: Sequence[tuple[int, int]], *, label: str = "main"
    ) -> None:
        """Adds the keys of the pages after those whose keys are known."""
        where = f"{_KV}::add_page_keys"
        core.kv_add_page_keys(self._box, *_stream(request, label, where), _signed(page_keys, where))

    def fork(self, source: KvStream, target: KvStream) -> None:
        """Makes `target`, which must not be open, a stream with the content of `source`."""
        where = f"{_KV}::fork"
        (of, label), (to, new_label) = (
            pair(stream, name, where, "a KvStream")
            for name, stream in (("source", source), ("target", target))
        )
        core.kv_fork(self._box, *_stream(of, label, where), *_stream(to, new_label, where))

    def trim(self, request: int, num_tokens: int, *, label: str = "main") -> None:
        """Takes back the stream's last tokens."""
        where = f"{_KV}::trim"
        count = integer(num_tokens, "num_tokens", where)
        core.kv_trim(self._box, *_stream(request, label, where), count)

    def remove(self, request: int) -> None:
        """Ends every stream of the request."""
        core.kv_remove(self._box, request_of(request, "request", f"{_KV}::remove"))

    def drop_prefixes(self) -> None:
        """Empties the prefix index."""
        core.kv_drop_prefixes(self._box)

    def contains(self, request: int, *, label: str = "main") -> bool:
        """Whether the stream is open."""
        return core.kv_contains(self._box, *_stream(request, label, f"{_KV}::contains"))

    def length(self, request: int, *, label: str = "main") -> int:
        """Tokens stored, without those of the current step."""
        return core.kv_length(self._box, *_stream(request, label, f"{_KV}::length"))

    def pages(self, request: int, *, label: str = "main") -> np.ndarray:
        """Pages held, the reserved ones included: int32, a copy."""
        stream = _stream(request, label, f"{_KV}::pages")
        return to_numpy(core.kv_pages(self._box, *stream))

    def check(self) -> PageCounts:
        """Counts the pages and proves that each has the holders that it says, or raises."""
        return PageCounts(*core.kv_check(self._box))

    def label_plan(self, label: str = "main") -> LabelPlan:
        """One label of the current plan."""
        name = text(label, "label", f"{_KV}::label_plan")
        return LabelPlan(*map(to_numpy, core.kv_label_plan(self._box, name)))

    def slots_buf(self, label: str = "main", *, stream: StreamLike = None) -> SupportsDLPack:
        """Where the label's new rows go, on the pool's device: for those who scatter them.

        Layer.forward does. [the bucket's tokens] int64, -1 past the step's; on the CPU without a
        bucket too, [T]. On CUDA each bucket, slot and label has one address, whose contents follow
        later plans: what is queued on `stream` after the call may read them, and a replay after
        order_replay. On the CPU a copy. Raises ValueError (label), RuntimeError (nothing planned; a
        plan without a bucket on CUDA, whose slots are on the host alone).
        """
        name = text(label, "label", f"{_KV}::slots_buf")
        return core.kv_slots_buf(self._box, name, stream_handle(self._device, stream))

    def write(
        self,
        layer: int,
        ckv: SupportsDLPack,
        kpe: SupportsDLPack | None = None,
        *,
        label: str = "main",
        stream: StreamLike = None,
    ) -> None:
        """Scatters the label's new rows to their slots.

        ckv  [T, kv_lora_rank], kpe [T, qk_rope_head_dim] (left out at width 0), any row stride;
             or, under a bucket, as many rows as its tokens: those past T are skipped

        Under a bucket a captured write follows later plans, so in a capture there must be as many
        rows as the bucket's tokens. Allocates nothing. Under torch.compile it is the operator
        libmla::kv_write.
        """
        if _torch_ops.is_compiling():
            refuse_gradients(f"{_KV}::write", ckv=ckv, kpe=kpe)
            _kv_write(self._key, layer, label, ckv, kpe, self._layers[layer])
        else:
            self._write(layer, label, ckv, kpe, stream)

    def _write(self, layer: int, label: str, ckv: Any, kpe: Any, stream: Any = None) -> None:
        where = "KvResource::write"
        core.kv_write(
            self._box,
            integer(layer, "layer", where),
            text(label, "label", where),
            argument(ckv, "ckv", where),
            optional(kpe, "kpe", where),
            stream_handle(self._device, stream),
        )


@_torch_ops.operator(
    "kv_write",
    "(SymInt key, int layer, str label, Tensor ckv, Tensor? kpe, Tensor(a!) pool_layer)",
)
def _kv_write(key: int, layer: int, label: str, ckv: Any, kpe: Any, pool_layer: Any) -> None:
    kv = _torch_ops.find(key)
    kv._write(layer, label, ckv, kpe)
    _torch_ops.written(pool_layer, kv._layers[layer])


def _stream(request: int, label: str, where: str) -> tuple[int, str]:
    return request_of(request, "request", where), text(label, "label", where)


def _signed(page_keys: Sequence[tuple[int, int]], where: str) -> list[int]:
    """Halves of keys as signed numbers of the same 64 bits."""
    halves = []
    for i, key in enumerate(entries(page_keys, "page_keys", where)):
        both = pair(key, f"page_keys[{i}]", where, "two halves of 64 bits")
        halves += [integer(half, f"page_keys[{i}]", where, 0, 2**64 - 1) for half in both]
    return np.array(halves, np.uint64).view(np.int64).tolist()


class AttentionResource(Handle):
    """Paged MLA attention over what a KvResource plans: every label of the step, once a layer.

    kv         the resource that plans its pages
    num_heads  query heads of this rank; the other widths are the pool's
    sm_scale   see PagedAttention.plan
    limits     of one label's plan; buckets must lie within them
    capture    runs under a bucket will be captured
    scratch    at least scratch_bytes, 64-byte aligned, shared by all plans, no two of which may
               then run at once; None: each owns its own

    Raises ValueError: a value out of range, no kernel, scratch too small.
    """

    def __init__(
        self,
        kv: KvResource,
        *,
        num_heads: int,
        sm_scale: float,
        key: str = "attention",
        lse_base: LseBase = LseBase.NATURAL,
        limits: Limits | None = None,
        splits: SplitPolicy | None = None,
        capture: bool = False,
        kernel: str = "",
        executor: Executor | None = None,
        scratch: SupportsDLPack | None = None,
    ) -> None:
        options = _options(
            kv, num_heads, sm_scale, key, lse_base, limits, splits, capture, kernel, executor
        )
        self.key = key
        self._device = kv._device
        self._layers = kv._layers
        self._box = core.resource_make(*options, kv.key, lent(scratch, "scratch", _RESOURCE))
        self._key = _torch_ops.register(self)

    @staticmethod
    def scratch_bytes(
        kv: KvResource,
        *,
        num_heads: int,
        sm_scale: float,
        lse_base: LseBase = LseBase.NATURAL,
        limits: Limits | None = None,
        splits: SplitPolicy | None = None,
        capture: bool = False,
        kernel: str = "",
        executor: Executor | None = None,
    ) -> int:
        """Exact bytes of scratch that serve every plan within the limits."""
        options = _options(
            kv, num_heads, sm_scale, "", lse_base, limits, splits, capture, kernel, executor
        )
        return core.resource_scratch_bytes(*options)

    def set_cursor(self, label: str, layer: int) -> None:
        """Sets what run takes by default, of the current plan; the next resets it to "main", 0."""
        where = f"{_RESOURCE}::set_cursor"
        name, index = text(label, "label", where), integer(layer, "layer", where)
        core.resource_set_cursor(self._box, name, index)

    def run(
        self,
        *,
        q_nope: A,
        q_pe: A | None = None,
        out: A | None = None,
        lse: A | None = None,
        label: str | None = None,
        layer: int | None = None,
        cache: tuple[SupportsDLPack, SupportsDLPack | None] | None = None,
        pass_index: int = 0,
        stream: StreamLike = None,
    ) -> A:
        """Attends with the current plan of a label and pass; tensors as in PagedAttention.run.

        So T must be the bucket's tokens in a capture.

        label, layer  None: the cursor's; under torch.compile the layer must be given
        cache         ckv and kpe in place of the pool's layer, of the same strides
        pass_index    which of the step's passes

        Raises RuntimeError (nothing planned, a plan older than the last declared step), ValueError.
        Under torch.compile it is the operator libmla::resource_run.
        """
        if out is None:
            out = like(q_nope, "q_nope", _RUN)
        parts = "a pair of ckv and kpe"
        ckv, kpe = (None, None) if cache is None else pair(cache, "cache", _RUN, parts)
        if _torch_ops.is_compiling():
            if layer is None:
                raise invalid("layer", _RUN, "a layer, when compiled", None)
            refuse_gradients(_RUN, q_nope=q_nope, q_pe=q_pe, ckv=ckv, kpe=kpe, out=out, lse=lse)
            read = [self._layers[layer]] if cache is None else []
            _resource_run(
                self._key, q_nope, q_pe, ckv, kpe, out, lse, label, layer, pass_index, read
            )
        else:
            self._run(q_nope, q_pe, ckv, kpe, out, lse, label, layer, pass_index, stream)
        return out

    def _run(
        self,
        q_nope: Any,
        q_pe: Any,
        ckv: Any,
        kpe: Any,
        out: Any,
        lse: Any,
        label: str | None,
        layer: int | None,
        pass_index: int,
        stream: Any = None,
    ) -> None:
        core.resource_run(
            self._box,
            argument(q_nope, "q_nope", _RUN),
            optional(q_pe, "q_pe", _RUN),
            optional(ckv, "ckv", _RUN),
            optional(kpe, "kpe", _RUN),
            output(out, "out", _RUN),
            None if lse is None else output(lse, "lse", _RUN),
            None if label is None else text(label, "label", _RUN),
            None if layer is None else integer(layer, "layer", _RUN),
            integer(pass_index, "pass_index", _RUN),
            stream_handle(self._device, stream),
        )

    def qo_indptr_buf(self, label: str = "main", pass_index: int = 0) -> SupportsDLPack:
        """The plan's query offsets [rows + 1] int32 on the device."""
        return core.resource_qo_indptr_buf(self._box, *_plan_of(label, pass_index, "qo_indptr_buf"))

    def kv_len_buf(self, label: str = "main", pass_index: int = 0) -> SupportsDLPack:
        """The plan's key counts [rows] int32 on the device; of a context-only pass those stored."""
        return core.resource_kv_len_buf(self._box, *_plan_of(label, pass_index, "kv_len_buf"))

    def select_last_hidden(
        self,
        hidden: SupportsDLPack,
        out: SupportsDLPack,
        *,
        label: str = "main",
        pass_index: int = 0,
        stream: StreamLike = None,
    ) -> None:
        """Writes the last query row of each stream's hidden [T, D] to out [rows, D].

        Zeros for a stream without queries. Of one dtype; can be captured, with T the bucket's
        tokens.
        """
        core.resource_select_last_hidden(
            self._box,
            argument(hidden, "hidden", _SELECT),
            output(out, "out", _SELECT),
            *_plan_of(label, pass_index, "select_last_hidden"),
            stream_handle(self._device, stream),
        )

    @property
    def kernel(self) -> str:
        """Name of the kernel that serves the plans."""
        return core.resource_kernel(self._box)


@_torch_ops.operator(
    "resource_run",
    "(SymInt key, Tensor q_nope, Tensor? q_pe, Tensor? ckv, Tensor? kpe, Tensor(a!) out,"
    " Tensor(b!)? lse, str? label, int? layer, int pass_index, Tensor[] read)",
)
def _resource_run(
    key: int,
    q_nope: Any,
    q_pe: Any,
    ckv: Any,
    kpe: Any,
    out: Any,
    lse: Any,
    label: str | None,
    layer: int | None,
    pass_index: int,
    read: Any,
) -> None:
    """`read` is the pool's layer: it puts the run behind the writes to it."""
    _torch_ops.find(key)._run(q_nope, q_pe, ckv, kpe, out, lse, label, layer, pass_index)


def _plan_of(label: str, pass_index: int, call: str) -> tuple[str, int]:
    where = f"{_RESOURCE}::{call}"
    return text(label, "label", where), integer(pass_index, "pass_index", where)


def _options(
    kv: KvResource,
    num_heads: int,
    sm_scale: float,
    key: str,
    lse_base: LseBase,
    limits: Limits | None,
    splits: SplitPolicy | None,
    capture: bool,
    kernel: str,
    executor: Executor | None,
) -> tuple[Any, ...]:
    return (
        instance(kv, KvResource, "kv", _RESOURCE).pool._box,
        text(key, "key", _RESOURCE),
        integer(num_heads, "num_heads", _RESOURCE),
        scale(sm_scale, "sm_scale", _RESOURCE),
        lse_base_code(lse_base, _RESOURCE),
        fields_of(Limits() if limits is None else limits, Limits, "limits", _RESOURCE),
        fields_of(SplitPolicy() if splits is None else splits, SplitPolicy, "splits", _RESOURCE),
        bool(capture),
        text(kernel, "kernel", _RESOURCE),
        executor_box(executor, _RESOURCE),
    )
