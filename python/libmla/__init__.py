"""Attention for serving models that use Multi-head Latent Attention.

Arrays come and go through DLPack: of PyTorch on CUDA and the CPU, NumPy on the CPU (bf16 through
ml_dtypes), or any other library that has it. Nothing is copied but what a docstring says is.

Errors say where, what, what was expected and what came: ValueError for an argument, RuntimeError
for a call out of order or a failure of CUDA, MemoryError.
"""

from ._arrays import SupportsDLPack, to_numpy, to_torch
from ._module import core as _core
from ._records import (
    Bucket,
    CacheStrides,
    Geometry,
    Limits,
    LseBase,
    PlanInfo,
    SplitPolicy,
    Support,
)
from .attention import Executor, PagedAttention, merge_states, supports
from .pool import LatentPool
from .resources import AttentionResource, KvResource, LabelPlan, PageCounts
from .step import (
    AdmitResult,
    AttentionPass,
    AttentionStep,
    Fork,
    KvStep,
    KvStream,
    QuerySegment,
    Segment,
    Shortage,
    SlotLease,
    Step,
    StepRunner,
)

__version__: str = _core.version()

__all__ = [
    "AdmitResult",
    "AttentionPass",
    "AttentionResource",
    "AttentionStep",
    "Bucket",
    "CacheStrides",
    "Executor",
    "Fork",
    "Geometry",
    "KvResource",
    "KvStep",
    "KvStream",
    "LabelPlan",
    "LatentPool",
    "Limits",
    "LseBase",
    "PageCounts",
    "PagedAttention",
    "PlanInfo",
    "QuerySegment",
    "Segment",
    "Shortage",
    "SlotLease",
    "SplitPolicy",
    "Step",
    "StepRunner",
    "Support",
    "SupportsDLPack",
    "merge_states",
    "supports",
    "to_numpy",
    "to_torch",
]
