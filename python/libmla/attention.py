"""Attention: the plan/run object, which kernel serves what, and merging of partial results."""

from collections.abc import Sequence
from typing import Any

from . import _torch_ops
from ._arrays import (
    A,
    DeviceLike,
    Ints,
    StreamLike,
    SupportsDLPack,
    argument,
    array_device,
    device_name,
    device_of,
    host_ints,
    lent,
    like,
    optional,
    output,
    refuse_gradients,
    stream_handle,
)
from ._checks import entries, instance, integer, invalid, pair, scale, text
from ._module import Handle, core
from ._records import (
    Bucket,
    CacheStrides,
    Geometry,
    Limits,
    LseBase,
    PlanInfo,
    SplitPolicy,
    Support,
    lse_base_code,
)

_PLAN, _RUN, _MERGE = "PagedAttention::plan", "PagedAttention::run", "merge_states"


class Executor(Handle):
    """The threads of the CPU backend. Calls from several Python threads take turns.

    num_threads  >= 1; 0 takes the processors that this process may use
    """

    def __init__(self, num_threads: int = 0) -> None:
        self._box = core.executor_make(integer(num_threads, "num_threads", "Executor"))

    @property
    def num_threads(self) -> int:
        """Threads, the caller's included."""
        return core.executor_num_threads(self._box)


def executor_box(executor: Executor | None, where: str) -> Any:
    """What the module takes for an executor."""
    return None if executor is None else instance(executor, Executor, "executor", where)._box


def fields_of(record: Any, kind: type[Any], what: str, where: str) -> Any:
    """What the module takes for a record that may be left out."""
    return None if record is None else instance(record, kind, what, where)._fields()


def supports(
    geometry: Geometry,
    *,
    device: DeviceLike = "cpu",
    strides: CacheStrides | None = None,
    kernel: str = "",
) -> Support:
    """Says before anything is launched which kernel will serve a shape, and why.

    strides  of the caches that run will get; None: one pool layer
    kernel   asks this kernel alone

    Never raises on a shape: what is wrong with it is the reason. Does not touch the device.
    """
    chosen, capturable, rounds, reason, *verdicts = core.supports(
        instance(geometry, Geometry, "geometry", "supports")._fields(),
        *device_of(device),
        fields_of(strides, CacheStrides, "strides", "supports"),
        text(kernel, "kernel", "supports"),
    )
    considered = tuple(zip(verdicts[::2], verdicts[1::2], strict=True))
    return Support(chosen, capturable, rounds, reason, considered)


class PagedAttention(Handle):
    """Paged MLA attention: `plan` once a step on the host, `run` once a layer.

    scores = (q_nope . ckv + q_pe . kpe) * sm_scale;  out = softmax(scores) @ ckv, over each
    request's own keys, with fp32 accumulation. A row that sees no key gets zeros and LSE -inf.

    geometry   shapes and element type
    num_pages  pages of the cache; a plan may list 0 .. num_pages - 1
    device     where queries, cache and output are: cpu, cuda, cuda:INDEX or a torch.device
    strides    of the caches that run will get, in elements; None: one pool layer
    limits     the most that one plan may hold
    bucket     rows and tokens fixed for the object's life, for captured graphs
    capture    runs will be captured; refused on the CPU
    splits     how a request's keys are cut into parts
    kernel     by name, as `supports` lists them; empty: the first that accepts
    executor   the CPU's threads; None: one crew for the whole process
    scratch    memory without gaps on the device, at least scratch_bytes(...), 64-byte aligned;
               None: the object owns its scratch

    Takes all memory that plans within the limits need. Raises ValueError (a value out of range, no
    kernel for the shape, scratch too small), RuntimeError (CUDA). One object serves one stream of
    plans; calls on one object must not overlap. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    def __init__(
        self,
        *,
        geometry: Geometry,
        num_pages: int,
        device: DeviceLike = "cpu",
        strides: CacheStrides | None = None,
        limits: Limits | None = None,
        bucket: Bucket | None = None,
        capture: bool = False,
        splits: SplitPolicy | None = None,
        kernel: str = "",
        executor: Executor | None = None,
        scratch: SupportsDLPack | None = None,
    ) -> None:
        self.geometry = geometry
        self._device = device_of(device)
        self._box = core.attention_make(
            *_config(
                geometry,
                num_pages,
                self._device,
                strides,
                limits,
                bucket,
                capture,
                splits,
                kernel,
                executor,
            ),
            lent(scratch, "scratch", "PagedAttention"),
        )
        self._key = _torch_ops.register(self)

    @staticmethod
    def scratch_bytes(
        *,
        geometry: Geometry,
        num_pages: int,
        device: DeviceLike = "cpu",
        strides: CacheStrides | None = None,
        limits: Limits | None = None,
        bucket: Bucket | None = None,
        capture: bool = False,
        splits: SplitPolicy | None = None,
        kernel: str = "",
        executor: Executor | None = None,
    ) -> int:
        """Exact bytes of scratch for every plan of an object made so. Raises as the constructor."""
        return core.attention_scratch_bytes(
            *_config(
                geometry,
                num_pages,
                device_of(device),
                strides,
                limits,
                bucket,
                capture,
                splits,
                kernel,
                executor,
            )
        )

    def plan(
        self,
        *,
        qo_indptr: Ints,
        kv_indptr: Ints,
        kv_indices: Ints,
        kv_len: Ints | None = None,
        kv_last_page_len: Ints | None = None,
        sm_scale: float,
        causal: bool = True,
        lse_base: LseBase = LseBase.NATURAL,
        stream: StreamLike = None,
    ) -> None:
        """Checks every index array, computes the schedule and stages it (B requests).

        qo_indptr   [B + 1] int32, first query token of each request, from 0
        kv_indptr   [B + 1] int32, offsets into kv_indices (pages, not tokens), from 0
        kv_indices  [>= kv_indptr[B]] int32, page ids in token order
        kv_len      [B] int32, tokens a request may see; or else
        kv_last_page_len  [B] int32, tokens in its last page, 1 to page_size
        sm_scale    multiplies q . k before the softmax; of the ORIGINAL head width (192 ** -0.5 for
                    DeepSeek, times the YaRN factor squared), so it has no default
        causal      query j of n, of a request with m keys, sees keys 0 .. m - n + j; else all m

        Host arrays without gaps are read as they are; tensors on a device are copied to the host,
        which waits for them. All may be changed once the call returns. Raises ValueError naming the
        argument and the entry; the plan before it then stays usable. Allocates nothing after the
        first plans of a size.
        """
        core.attention_plan(
            self._box,
            host_ints(qo_indptr, "qo_indptr", _PLAN),
            host_ints(kv_indptr, "kv_indptr", _PLAN),
            host_ints(kv_indices, "kv_indices", _PLAN),
            None if kv_len is None else host_ints(kv_len, "kv_len", _PLAN),
            None
            if kv_last_page_len is None
            else host_ints(kv_last_page_len, "kv_last_page_len", _PLAN),
            scale(sm_scale, "sm_scale", _PLAN),
            bool(causal),
            lse_base_code(lse_base, _PLAN),
            stream_handle(self._device, stream),
        )

    def run(
        self,
        *,
        q_nope: A,
        q_pe: A | None = None,
        ckv: SupportsDLPack,
        kpe: SupportsDLPack | None = None,
        out: A | None = None,
        lse: A | None = None,
        stream: StreamLike = None,
    ) -> A:
        """Attends with the current plan, as often as wanted; returns out (T query tokens, H heads).

        q_nope  [T, H, kv_lora_rank], absorbed
        q_pe    [T, H, qk_rope_head_dim]; left out at rope width 0
        ckv     [num_pages, page_size, kv_lora_rank]; strides as declared at creation
        kpe     [num_pages, page_size, qk_rope_head_dim]; left out at rope width 0
        out     [T, H, kv_lora_rank]; None: a new array of q_nope's framework
        lse     [T, H] fp32; None where it is not wanted

        All on this object's device, the last dimension of each contiguous, out overlapping no
        input. T is the plan's tokens or, under a bucket, the bucket's; in a capture it must be the
        bucket's, since later plans of up to as many are replayed into the same tensors. Every row
        of out and lse is written. On CUDA the work is queued on `stream` (None: the caller's
        current stream) and can be captured; on the CPU the output is there when the call returns.
        Allocates only an `out` that was not given. Raises ValueError (a tensor does not match),
        RuntimeError (no plan, CUDA). Under torch.compile it is the operator libmla::attention_run.
        """
        if out is None:
            out = like(q_nope, "q_nope", _RUN)
        if _torch_ops.is_compiling():
            refuse_gradients(_RUN, q_nope=q_nope, q_pe=q_pe, ckv=ckv, kpe=kpe, out=out, lse=lse)
            _attention_run(self._key, q_nope, q_pe, ckv, kpe, out, lse)
        else:
            self._run(q_nope, q_pe, ckv, kpe, out, lse, stream)
        return out

    def _run(
        self, q_nope: Any, q_pe: Any, ckv: Any, kpe: Any, out: Any, lse: Any, stream: Any = None
    ) -> None:
        core.attention_run(
            self._box,
            argument(q_nope, "q_nope", _RUN),
            optional(q_pe, "q_pe", _RUN),
            argument(ckv, "ckv", _RUN),
            optional(kpe, "kpe", _RUN),
            output(out, "out", _RUN),
            None if lse is None else output(lse, "lse", _RUN),
            stream_handle(self._device, stream),
        )

    def order_replay(self, stream: StreamLike = None) -> None:
        """To be called before each replay, on its stream, of a graph that captured runs.

        Orders the replay behind the last plan's copy, and later plans behind the replay. Not needed
        where plans and replays are on one stream.
        """
        core.attention_order_replay(self._box, stream_handle(self._device, stream))

    @property
    def kernel(self) -> str:
        """Name of the kernel that serves this object."""
        return core.attention_kernel(self._box)

    @property
    def device(self) -> str:
        """Where it runs: "cpu" or "cuda:INDEX"."""
        return device_name(self._device)

    @property
    def info(self) -> PlanInfo:
        """What the current plan holds. Raises RuntimeError before the first plan."""
        return PlanInfo(*core.attention_info(self._box))

    @property
    def qo_indptr_buf(self) -> SupportsDLPack:
        """The plan's query offsets [rows + 1] int32 on the device; at a fixed address in a bucket.

        Raises RuntimeError before the first plan.
        """
        return core.attention_qo_indptr_buf(self._box)

    @property
    def kv_len_buf(self) -> SupportsDLPack:
        """The plan's key counts [rows] int32 on the device; at a fixed address in a bucket."""
        return core.attention_kv_len_buf(self._box)


@_torch_ops.operator(
    "attention_run",
    "(SymInt key, Tensor q_nope, Tensor? q_pe, Tensor ckv, Tensor? kpe,"
    " Tensor(a!) out, Tensor(b!)? lse)",
)
def _attention_run(
    key: int, q_nope: Any, q_pe: Any, ckv: Any, kpe: Any, out: Any, lse: Any
) -> None:
    _torch_ops.find(key)._run(q_nope, q_pe, ckv, kpe, out, lse)


def _config(
    geometry: Geometry,
    num_pages: int,
    device: tuple[int, int],
    strides: CacheStrides | None,
    limits: Limits | None,
    bucket: Bucket | None,
    capture: bool,
    splits: SplitPolicy | None,
    kernel: str,
    executor: Executor | None,
) -> tuple[Any, ...]:
    where = "PagedAttention"
    return (
        instance(geometry, Geometry, "geometry", where)._fields(),
        integer(num_pages, "num_pages", where),
        *device,
        fields_of(strides, CacheStrides, "strides", where),
        fields_of(Limits() if limits is None else limits, Limits, "limits", where),
        fields_of(bucket, Bucket, "bucket", where),
        bool(capture),
        fields_of(SplitPolicy() if splits is None else splits, SplitPolicy, "splits", where),
        text(kernel, "kernel", where),
        executor_box(executor, where),
    )


def merge_states(
    states: Sequence[tuple[A, A]],
    *,
    out: A | None = None,
    lse: A | None = None,
    lse_base: LseBase = LseBase.NATURAL,
    executor: Executor | None = None,
    stream: StreamLike = None,
) -> A:
    """Merges partial results over disjoint parts of the keys into what one pass would give.

    states  pairs of out [T, H, D] fp32, bf16 or fp16 and lse [T, H] fp32 in base `lse_base`
    out     [T, H, D], of any of the three types; may be the very tensor of a state; None: a new
            array like the first state's
    lse     [T, H] fp32; None where it is not wanted

    With w_i = exp(lse_i): out = sum(w_i * out_i) / sum(w_i), lse = log(sum(w_i)), computed in
    double in the order of the states. A state of LSE -inf counts for nothing. All on one device;
    queued on `stream` on CUDA (at most 256 states), done at return on the CPU. Allocates only an
    `out` that was not given. Raises ValueError. Under torch.compile: libmla::merge_states.
    """
    pairs = entries(states, "states", _MERGE)
    if not pairs:
        raise invalid("states", _MERGE, "1 or more", 0)
    for i, state in enumerate(pairs):
        pair(state, f"states[{i}]", _MERGE, "a pair of out and lse")
    outs, lses = [state[0] for state in pairs], [state[1] for state in pairs]
    if out is None:
        out = like(outs[0], "states[0].out", _MERGE)
    base = lse_base_code(lse_base, _MERGE)
    if _torch_ops.is_compiling():
        for i, (values, sums) in enumerate(pairs):
            refuse_gradients(_MERGE, **{f"states[{i}].out": values, f"states[{i}].lse": sums})
        _merge_states(outs, lses, out, lse, base)
    else:
        _merge(outs, lses, out, lse, base, executor, stream)
    return out


@_torch_ops.operator(
    "merge_states",
    "(Tensor[] outs, Tensor[] lses, Tensor(a!) out, Tensor(b!)? lse, int lse_base)",
)
def _merge_states(outs: Any, lses: Any, out: Any, lse: Any, lse_base: int) -> None:
    _merge(outs, lses, out, lse, lse_base)


def _merge(
    outs: list[Any],
    lses: list[Any],
    out: Any,
    lse: Any,
    lse_base: int,
    executor: Executor | None = None,
    stream: StreamLike = None,
) -> None:
    core.merge_states(
        [argument(state, f"states[{i}].out", _MERGE) for i, state in enumerate(outs)],
        [argument(state, f"states[{i}].lse", _MERGE) for i, state in enumerate(lses)],
        output(out, "out", _MERGE),
        None if lse is None else output(lse, "lse", _MERGE),
        lse_base,
        executor_box(executor, _MERGE),
        stream_handle(array_device(out), stream),
    )
