"""The MLA layer around the attention: hidden states in, the output projection's result out."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import _torch_ops
from ._arrays import (
    A,
    DeviceLike,
    DTypeLike,
    StreamLike,
    SupportsDLPack,
    argument,
    device_name,
    device_of,
    dtype_code,
    dtype_name,
    like,
    output,
    refuse_gradients,
    stream_handle,
)
from ._checks import instance, integer, invalid, shown, text
from ._module import Handle, core
from ._records import Geometry
from .attention import Executor, PagedAttention, executor_box
from .pool import LatentPool

if not hasattr(core, "layer_make"):
    raise ImportError(
        "libmla.layer: the module was built without the layer, which needs oneDNN (libdnnl-dev) and"
        " nlohmann_json; install them and build the package again"
    )


class LayerConfig(Handle):
    """Geometry of one MLA layer, from a model's own config.json.

    config_json  its text; model_type deepseek_v2, deepseek_v3, kimi_k2, glm4_moe_lite,
                 longcat_flash or kimi_linear

    Raises ValueError naming the key: malformed, missing, out of range, or asking for what the layer
    does not do.
    """

    def __init__(self, config_json: str) -> None:
        self._box = core.layer_config_parse(text(config_json, "config_json", "LayerConfig"))
        (
            self.model_type,
            self.sm_scale,
            self.hidden_size,
            self.num_attention_heads,
            self.q_lora_rank,
            self.kv_lora_rank,
            self.qk_nope_head_dim,
            self.qk_rope_head_dim,
            self.v_head_dim,
        ) = core.layer_config_fields(self._box)


@dataclass(frozen=True)
class HeadRange:
    """Query heads [begin, begin + count) of a layer; count 0: all of them."""

    begin: int = 0
    count: int = 0


class LayerActivations(NamedTuple):
    """What project leaves for the attention: DLPack tensors over the workspace (H heads)."""

    q_nope: SupportsDLPack
    """[T, H, kv_lora_rank], absorbed."""
    q_pe: SupportsDLPack
    """[T, H, qk_rope_head_dim], turned."""
    ckv: SupportsDLPack
    """[T, kv_lora_rank], normed: rows for the cache."""
    kpe: SupportsDLPack
    """[T, qk_rope_head_dim], turned."""
    attended: SupportsDLPack
    """[T, H, kv_lora_rank], where the attention writes."""


_FORWARD = "Layer::forward"
_WEIGHTS = (
    "q_proj",
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "o_proj",
)


class Layer(Handle):
    """A Multi-head Latent Attention layer. docs/layer.md has what it computes, and its bounds.

    weights   by the names of the checkpoint, as in "q_a_proj.weight" (the ending may be left out);
              [out, in] in host memory, of fp32, bf16 or fp16; norms [n]. Copied to the device
    heads     a tensor-parallel rank's; the output is then a partial sum, that of all ranks the
              layer's
    dtype     of hidden states, the pool and the output: fp32, bf16 or, on CUDA, fp16
    executor  the CPU's threads; None: one crew for the whole process

    On the CPU it needs oneDNN (libdnnl.so.2) on the system, on CUDA cuBLAS. Raises ValueError
    naming the field or weight, RuntimeError (a library is not there, CUDA), MemoryError.
    """

    def __init__(
        self,
        config: LayerConfig,
        weights: Mapping[str, SupportsDLPack],
        *,
        heads: HeadRange | None = None,
        dtype: DTypeLike = "bf16",
        device: DeviceLike = "cpu",
        executor: Executor | None = None,
    ) -> None:
        instance(weights, Mapping, "weights", "Layer")
        unknown = [name for name in weights if str(name).removesuffix(".weight") not in _WEIGHTS]
        if unknown:
            raise invalid("weights", "Layer", f"of the names {', '.join(_WEIGHTS)}", unknown[0])
        given = {name.removesuffix(".weight"): weight for name, weight in weights.items()}
        matrices = [_matrix(given.get(name), name) for name in _WEIGHTS]
        self._init(config, core.layer_make, (matrices,), heads, dtype, device, executor)

    @classmethod
    def from_safetensors(
        cls,
        config: LayerConfig,
        path: str | os.PathLike[str],
        *,
        prefix: str = "",
        heads: HeadRange | None = None,
        dtype: DTypeLike = "bf16",
        device: DeviceLike = "cpu",
        executor: Executor | None = None,
    ) -> "Layer":
        """A layer with the weights of a file, as in prefix "model.layers.0.self_attn."."""
        layer = cls.__new__(cls)
        if not isinstance(path, str | os.PathLike):
            raise invalid("path", "Layer", "a path", shown(path))
        source = (text(os.fspath(path), "path", "Layer"), text(prefix, "prefix", "Layer"))
        layer._init(config, core.layer_from_file, source, heads, dtype, device, executor)
        return layer

    def _init(
        self,
        config: LayerConfig,
        make: Any,
        source: tuple[Any, ...],
        heads: HeadRange | None,
        dtype: DTypeLike,
        device: DeviceLike,
        executor: Executor | None,
    ) -> None:
        self.config = instance(config, LayerConfig, "config", "Layer")
        self.dtype = dtype_name(dtype)
        self._device = device_of(device)
        heads = HeadRange() if heads is None else instance(heads, HeadRange, "heads", "Layer")
        self._box = make(
            config._box,
            *source,
            tuple(
                integer(number, f"heads.{name}", "Layer")
                for name, number in (("begin", heads.begin), ("count", heads.count))
            ),
            dtype_code(dtype),
            *self._device,
            executor_box(executor, "Layer"),
        )
        self._key = _torch_ops.register(self)

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return core.layer_num_heads(self._box)

    @property
    def device(self) -> str:
        """Where it is: "cpu" or "cuda:INDEX"."""
        return device_name(self._device)

    def geometry(self, page_size: int) -> Geometry:
        """What PagedAttention needs for a pool of this page size."""
        return Geometry(
            num_heads=self.num_heads,
            kv_lora_rank=self.config.kv_lora_rank,
            qk_rope_head_dim=self.config.qk_rope_head_dim,
            page_size=page_size,
            dtype=self.dtype,
        )

    def project(
        self,
        hidden: SupportsDLPack,
        positions: SupportsDLPack,
        workspace: "LayerWorkspace",
        *,
        stream: StreamLike = None,
    ) -> LayerActivations:
        """Hidden states [T, hidden] at positions [T] int32 to queries and cache rows.

        The result is valid until the workspace's next use. On CUDA it is queued, and can be
        captured.
        """
        parts = core.layer_project(
            self._box,
            argument(hidden, "hidden", "Layer::project"),
            argument(positions, "positions", "Layer::project"),
            instance(workspace, LayerWorkspace, "workspace", "Layer::project")._box,
            stream_handle(self._device, stream),
        )
        return LayerActivations(*parts)

    def output(
        self,
        attended: SupportsDLPack,
        out: A,
        workspace: "LayerWorkspace",
        *,
        stream: StreamLike = None,
    ) -> A:
        """Attended latents [T, H, kv_lora_rank] to out [T, hidden], which it returns."""
        core.layer_output(
            self._box,
            argument(attended, "attended", "Layer::output"),
            output(out, "out", "Layer::output"),
            instance(workspace, LayerWorkspace, "workspace", "Layer::output")._box,
            stream_handle(self._device, stream),
        )
        return out

    def forward(
        self,
        hidden: A,
        positions: A,
        *,
        slots: A,
        pool: LatentPool,
        layer_idx: int = 0,
        attention: PagedAttention,
        workspace: "LayerWorkspace",
        out: A | None = None,
        stream: StreamLike = None,
    ) -> A:
        """The whole layer: project, write the cache rows, attend, output. Returns out.

        hidden     [T, hidden] of the layer's dtype, any row stride
        positions  [T] int32, of each token in its request
        slots      [T] int64, where each token's row goes in the pool; -1: nowhere
        pool       whose layer `layer_idx` is written and read
        attention  planned for this step, over this pool, with config.sm_scale
        out        [T, hidden], the layer's dtype or fp32; None: a new array like `hidden`

        All on the layer's device. On CUDA the work is queued and can be captured. Allocates only an
        `out` that was not given. Under torch.compile it is the operator libmla::layer_forward.
        """
        if out is None:
            out = like(hidden, "hidden", _FORWARD)
        instance(pool, LatentPool, "pool", _FORWARD)
        instance(attention, PagedAttention, "attention", _FORWARD)
        instance(workspace, LayerWorkspace, "workspace", _FORWARD)
        if _torch_ops.is_compiling():
            refuse_gradients(_FORWARD, hidden=hidden, out=out)
            keys = [self._key, pool._key, attention._key, workspace._key]
            _layer_forward(keys, hidden, positions, slots, layer_idx, out, pool._layers[layer_idx])
        else:
            self._forward(
                hidden, positions, slots, pool, layer_idx, attention, workspace, out, stream
            )
        return out

    def _forward(
        self,
        hidden: Any,
        positions: Any,
        slots: Any,
        pool: LatentPool,
        layer_idx: int,
        attention: PagedAttention,
        workspace: "LayerWorkspace",
        out: Any,
        stream: Any = None,
    ) -> None:
        core.layer_forward(
            self._box,
            argument(hidden, "hidden", _FORWARD),
            argument(positions, "positions", _FORWARD),
            argument(slots, "slots", _FORWARD),
            pool._box,
            integer(layer_idx, "layer_idx", _FORWARD),
            attention._box,
            output(out, "out", _FORWARD),
            workspace._box,
            stream_handle(self._device, stream),
        )


class LayerWorkspace(Handle):
    """Memory for the activations of one step of up to `max_tokens` tokens.

    Layers of one configuration and rank may share it, one call at a time. Raises ValueError,
    RuntimeError (cuBLAS is not there, CUDA), MemoryError.
    """

    def __init__(self, layer: Layer, max_tokens: int) -> None:
        owner = instance(layer, Layer, "layer", "LayerWorkspace")
        self.max_tokens = integer(max_tokens, "max_tokens", "LayerWorkspace")
        self._box = core.layer_workspace(owner._box, self.max_tokens)
        self._key = _torch_ops.register(self)

    @property
    def bytes(self) -> int:
        """Its size on the device."""
        return core.workspace_bytes(self._box)


@_torch_ops.operator(
    "layer_forward",
    "(SymInt[] keys, Tensor hidden, Tensor positions, Tensor slots, int layer_idx, Tensor(a!) out,"
    " Tensor(b!) pool_layer)",
)
def _layer_forward(
    keys: list[int],
    hidden: Any,
    positions: Any,
    slots: Any,
    layer_idx: int,
    out: Any,
    pool_layer: Any,
) -> None:
    layer, pool, attention, workspace = map(_torch_ops.find, keys)
    layer._forward(hidden, positions, slots, pool, layer_idx, attention, workspace, out)
    _torch_ops.written(pool_layer, pool._layers[layer_idx])


def _matrix(weight: Any, name: str) -> Any:
    """A weight as the module takes it, norms as one row."""
    if weight is None:
        return None
    if not hasattr(weight, "reshape"):
        raise invalid(name, "Layer", "an array", shown(weight))
    return argument(weight.reshape(1, -1) if len(weight.shape) == 1 else weight, name, "Layer")
