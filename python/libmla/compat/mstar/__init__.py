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

from ..._module import torch

if torch is None:
    raise ImportError("libmla.compat.mstar: torch is not installed")

from .manager import FlashInferMLAManager
from .wrapper import FlashInferMLAWrapper, flashinfer_mla_supports

__all__ = ["FlashInferMLAManager", "FlashInferMLAWrapper", "flashinfer_mla_supports"]
