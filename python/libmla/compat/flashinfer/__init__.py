"""The MLA wrapper and the merging of states of FlashInfer 0.6, by their public documentation.

    import libmla.compat.flashinfer as flashinfer

docs/migrating_from_flashinfer.md says what differs. Arrays are of PyTorch, on CUDA or the CPU, or
of NumPy.
"""

from . import cascade, mla
from .cascade import merge_state, merge_state_in_place, merge_states
from .mla import BatchMLAPagedAttentionWrapper

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "cascade",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "mla",
]
