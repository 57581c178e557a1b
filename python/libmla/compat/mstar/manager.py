"""The attention resource of a step."""

import collections
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._arrays import int_array
from ..._checks import integer, invalid, shown
from ..._module import Handle, torch
from ..._records import Limits
from .._arrays import check_tensors
from .wrapper import INDEX_NAMES, FlashInferMLAWrapper, Indices, indices_of, torch_device

_MANAGER = "FlashInferMLAManager"


@dataclass(frozen=True, eq=False)
class MLAPlan:
    """What FlashInferMLAManager.plan returns: the plan of every label. Not to be changed."""

    slot: int
    bucket: Hashable
    causal: bool
    indices: Mapping[str, Indices]
    wrappers: Mapping[str, FlashInferMLAWrapper]

    def is_of(self, other: "MLAPlan") -> bool:
        """Whether planning the other would do the same again."""
        return (
            (self.slot, self.bucket, self.causal) == (other.slot, other.bucket, other.causal)
            and self.indices.keys() == other.indices.keys()
            and all(mine.equals(other.indices[label]) for label, mine in self.indices.items())
        )


class FlashInferMLAManager(Handle):
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
        integer(kv_config.page_size, "kv_config.page_size", _MANAGER, 1)
        self._kv_cache = kv_cache
        self._device = torch_device(device, _MANAGER)
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
        try:
            hash(bucket)
        except TypeError:
            expected = "a value that can be a key, or None"
            raise invalid("lease.bucket", f"{_MANAGER}.plan", expected, shown(bucket)) from None
        kv_plan = ctx.plan_results.get(self._kv_cache)
        if kv_plan is None:
            what = f"ctx.plan_results[{self._kv_cache!r}]"
            raise invalid(what, f"{_MANAGER}.plan", "the plan of the KV resource", None)
        indices = {label: indices_of(_named(part.cpu_indptrs)) for label, part in kv_plan.items()}
        if step.context_only:
            counts = _query_counts(step.segments, kv_plan)
            for label, part in kv_plan.items():
                appended = [view.to_compute for view in part.views]
                indices[label] = self._context(label, indices[label], appended, counts[label])
        wrappers = {}
        for label, arrays in indices.items():
            known = self._wrappers.get((bucket, slot, label))
            rows = None if bucket is None else arrays.num_rows
            wrappers[label] = self._wrapper(rows) if known is None else known
        return MLAPlan(slot, bucket, bool(step.causal), indices, wrappers)

    def _context(
        self, label: str, indices: Indices, appended: list[int], queries: list[int]
    ) -> Indices:
        """The rows' stored contexts alone, with query counts of their own."""
        where = f"{_MANAGER}.plan"
        if len(appended) != indices.num_rows:
            what = f"views of label {label!r}"
            raise invalid(what, where, f"{indices.num_rows}, one a row", len(appended))
        page_size, pages = self._config.page_size, indices.num_pages
        indices.check_pages(page_size, where)
        lengths = np.where(pages > 0, (pages - 1) * page_size + indices.kv_last_page_len, 0)
        counts = int_array(appended, f"views[].to_compute of {label!r}", where, np.int64)
        for i in np.flatnonzero((counts < 0) | (counts > lengths)):
            what = f"views[{i}].to_compute of {label!r}"
            raise invalid(what, where, f"0 to {lengths[i]}, its length", counts[i])
        stored = lengths - counts
        kept = -(-stored // page_size)
        position = np.arange(len(indices.kv_indices)) - np.repeat(indices.kv_indptr[:-1], pages)
        return Indices(
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
        """Plans every label; a wrapper is kept once it has a plan, whose rows it is made for."""
        for label, wrapper in wanted.wrappers.items():
            wrapper.plan(*wanted.indices[label], causal=wanted.causal, dtype=self._dtype)
            self._wrappers[wanted.bucket, wanted.slot, label] = wrapper

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
        check_tensors(f"{_MANAGER}.select_last_hidden", hidden=hidden)
        if hidden.dim() == 0:
            where = f"{_MANAGER}.select_last_hidden"
            raise invalid("hidden.shape", where, "1 dimension or more", "none")
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


def _named(indptrs: Any) -> Any:
    """The four index arrays, of a tuple, a mapping or an object."""
    if isinstance(indptrs, Mapping):
        return [indptrs[name] for name in INDEX_NAMES]
    if hasattr(indptrs, INDEX_NAMES[0]):
        return [getattr(indptrs, name) for name in INDEX_NAMES]
    return indptrs


def _query_counts(segments: Any, kv_plan: Any) -> dict[str, list[int]]:
    """The spans of a step's segments for each plan's rows: paired by label and position."""
    spans: dict[str, list[int]] = {}
    for segment in segments:
        what = f"span of request {segment.request_id!r}"
        span = integer(segment.span, what, f"{_MANAGER}.plan", 0, 2**31 - 1)
        spans.setdefault(segment.label, []).append(span)
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
