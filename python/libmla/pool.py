"""The paged latent cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _torch_ops
from ._arrays import (
    DeviceLike,
    DTypeLike,
    Ints,
    StreamLike,
    SupportsDLPack,
    argument,
    device_name,
    device_of,
    dtype_code,
    dtype_name,
    host_ints,
    lent,
    optional,
    output,
    refuse_gradients,
    stream_handle,
)
from ._checks import entries, integer, pair
from ._module import Handle, core, torch

_APPEND, _GATHER, _COPY = "LatentPool::append", "LatentPool::gather", "LatentPool::copy_pages"


class LatentPool(Handle):
    """The paged latent cache, [layers, pages, page_size, kv_lora_rank + qk_rope_head_dim].

    num_pages  usable pages, 1 to 2^31 - 2. The pool holds one more, the sink: page num_pages, where
               an engine may write padded rows and which is never read
    page_size  tokens of a page
    dtype      fp32, bf16 or fp16
    memory     at least LatentPool.bytes(...) on the device, 64-byte aligned, without gaps; None:
               the pool owns its memory, which is zero until it is written

    A slot is page * page_size + offset in the page. The pool knows no owners: KvResource hands out
    its pages. Raises ValueError, MemoryError, RuntimeError (CUDA).
    """

    def __init__(
        self,
        *,
        num_layers: int = 1,
        num_pages: int,
        page_size: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        dtype: DTypeLike = "bf16",
        device: DeviceLike = "cpu",
        memory: SupportsDLPack | None = None,
    ) -> None:
        shape = _shape(num_layers, num_pages, page_size, kv_lora_rank, qk_rope_head_dim, dtype)
        self.num_layers, self.num_pages, self.page_size = shape[:3]
        self.kv_lora_rank, self.qk_rope_head_dim = shape[3:5]
        self.dtype = dtype_name(dtype)
        self._device = device_of(device)
        self._box = core.pool_make(shape, *self._device, lent(memory, "memory", "LatentPool"))
        self._layers = _torch_ops.layers(self)
        self._key = _torch_ops.register(self)

    @staticmethod
    def bytes(
        *,
        num_layers: int = 1,
        num_pages: int,
        page_size: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        dtype: DTypeLike = "bf16",
    ) -> int:
        """Exact bytes of a pool, the sink included. Raises as the constructor."""
        shape = _shape(num_layers, num_pages, page_size, kv_lora_rank, qk_rope_head_dim, dtype)
        return core.pool_bytes(shape, 0, 0)

    @property
    def device(self) -> str:
        """Where it is: "cpu" or "cuda:INDEX"."""
        return device_name(self._device)

    @property
    def total_pages(self) -> int:
        """Pages of every layer, the sink included: PagedAttention's num_pages."""
        return self.num_pages + 1

    @property
    def sink_page(self) -> int:
        """The page that is never read."""
        return self.num_pages

    def layer(self, layer: int) -> SupportsDLPack:
        """One layer [total_pages, page_size, latent], without copying; `to_torch` and `to_numpy`
        make an array of it. It keeps the pool's memory alive. Raises ValueError (layer).
        """
        return core.pool_layer(self._box, integer(layer, "layer", "LatentPool::layer"))

    def views(self, layer: int) -> tuple[SupportsDLPack, SupportsDLPack | None]:
        """The ckv and kpe of a layer, as PagedAttention.run takes them; no kpe at rope width 0."""
        parts = core.pool_views(self._box, integer(layer, "layer", "LatentPool::views"))
        return parts[0], parts[1] if len(parts) > 1 else None

    def append(
        self,
        layer: int,
        slots: Ints,
        ckv: SupportsDLPack,
        kpe: SupportsDLPack | None = None,
        *,
        stream: StreamLike = None,
    ) -> None:
        """Scatters row i to slots[i]; -1 skips the row. No other byte of the pool changes.

        slots  [n] int64, on the host, where each is checked, or on the pool's device, where a
               captured append reads them anew at each replay and one outside the pool is skipped
        ckv    [n, kv_lora_rank], any row stride, of the pool's dtype and device
        kpe    [n, qk_rope_head_dim]; left out at rope width 0

        Queued on `stream` on CUDA, done at return on the CPU. Raises ValueError before anything is
        written. Under torch.compile, where slots are a tensor, it is libmla::pool_append.
        """
        if _torch_ops.is_compiling():
            refuse_gradients(_APPEND, ckv=ckv, kpe=kpe)
            _pool_append(self._key, layer, slots, ckv, kpe, self._layers[layer])
        else:
            self._append(layer, slots, ckv, kpe, stream)

    def _append(self, layer: int, slots: Any, ckv: Any, kpe: Any, stream: Any = None) -> None:
        on_host = not (torch is not None and isinstance(slots, torch.Tensor))
        core.pool_append(
            self._box,
            integer(layer, "layer", _APPEND),
            host_ints(slots, "slots", _APPEND, np.int64)
            if on_host
            else argument(slots, "slots", _APPEND),
            argument(ckv, "ckv", _APPEND),
            optional(kpe, "kpe", _APPEND),
            stream_handle(self._device, stream),
        )

    def gather(
        self, layer: int, slots: Ints, rows: SupportsDLPack, *, stream: StreamLike = None
    ) -> None:
        """Reads slots[i] ([n] int64, host) into row i of `rows` [n, latent]; -1 leaves it alone."""
        core.pool_gather(
            self._box,
            integer(layer, "layer", _GATHER),
            host_ints(slots, "slots", _GATHER, np.int64),
            output(rows, "rows", _GATHER),
            stream_handle(self._device, stream),
        )

    def copy_pages(self, copies: Sequence[tuple[int, int]], *, stream: StreamLike = None) -> None:
        """Copies whole pages (from, to) in every layer, one after the other."""
        flat: list[int] = []
        for i, copy in enumerate(entries(copies, "copies", _COPY)):
            pages = pair(copy, f"copies[{i}]", _COPY, "two pages")
            flat += [integer(page, f"copies[{i}]", _COPY) for page in pages]
        core.pool_copy_pages(self._box, flat, stream_handle(self._device, stream))


def _shape(
    num_layers: int,
    num_pages: int,
    page_size: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    dtype: DTypeLike,
) -> tuple[int, ...]:
    """A pool's shape as the module takes it."""
    named = {
        "num_layers": num_layers,
        "num_pages": num_pages,
        "page_size": page_size,
        "kv_lora_rank": kv_lora_rank,
        "qk_rope_head_dim": qk_rope_head_dim,
    }
    numbers = (integer(value, name, "LatentPool") for name, value in named.items())
    return (*numbers, dtype_code(dtype))


@_torch_ops.operator(
    "pool_append",
    "(SymInt key, int layer, Tensor slots, Tensor ckv, Tensor? kpe, Tensor(a!) pool_layer)",
)
def _pool_append(key: int, layer: int, slots: Any, ckv: Any, kpe: Any, pool_layer: Any) -> None:
    pool = _torch_ops.find(key)
    pool._append(layer, slots, ckv, kpe)
    _torch_ops.written(pool_layer, pool._layers[layer])
