"""Records of the interface, as in the C++ headers."""

import enum
from dataclasses import dataclass, fields
from typing import Any

from ._arrays import DTypeLike, dtype_code, dtype_name
from ._checks import integer


class LseBase(enum.IntEnum):
    """The logarithm that an LSE is in."""

    NATURAL = 0
    TWO = 1


def lse_base_code(base: Any, where: str) -> int:
    """The number of an LseBase."""
    return integer(base, "lse_base", where, 0, 1, "LseBase.NATURAL or LseBase.TWO")


class _Integers:
    """A record of integers, which are checked when it is made."""

    def __post_init__(self) -> None:
        self._check(*(field.name for field in fields(self)))  # type: ignore[arg-type]

    def _check(self, *names: str, bits: int = 64) -> None:
        where, high = type(self).__name__, 2 ** (bits - 1) - 1
        for name in names:
            value = integer(getattr(self, name), name, where, -high - 1, high)
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class Geometry(_Integers):
    """What the attention is over, the same for every layer of a model."""

    num_heads: int
    """Query heads of this rank, 1 to 1024."""
    kv_lora_rank: int
    """Columns of ckv, the value width, >= 1."""
    qk_rope_head_dim: int
    """Columns of kpe, >= 0; rank + rope at most 8192."""
    page_size: int
    """Tokens of a page, >= 1."""
    dtype: DTypeLike = "bf16"
    """Of queries, output and cache: fp32, bf16 or fp16, by name or as a framework's dtype."""

    def __post_init__(self) -> None:
        self._check("num_heads", "kv_lora_rank", "qk_rope_head_dim", "page_size", bits=32)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    @property
    def latent_width(self) -> int:
        """Columns of a cache row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def _fields(self) -> tuple[int, ...]:
        dtype = dtype_code(self.dtype)
        return (
            self.num_heads,
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            self.page_size,
            dtype,
            dtype,
        )


@dataclass(frozen=True, kw_only=True)
class CacheStrides(_Integers):
    """Strides of a cache in elements, where it is not one pool layer of rows [ckv | kpe]."""

    ckv_page: int
    ckv_row: int
    kpe_page: int = 0
    kpe_row: int = 0

    def _fields(self) -> tuple[int, ...]:
        return (self.ckv_page, self.ckv_row, self.kpe_page, self.kpe_row)


@dataclass(frozen=True, kw_only=True)
class Limits(_Integers):
    """The most that one plan may hold. Index buffers and scratch are sized from it at creation."""

    max_rows: int = 1024
    """Requests, at most 2^20."""
    max_tokens: int = 16384
    """Query tokens."""
    max_listed_pages: int = 1 << 20
    """Entries of kv_indices."""

    def _fields(self) -> tuple[int, ...]:
        return (self.max_rows, self.max_tokens, self.max_listed_pages)


@dataclass(frozen=True)
class Bucket(_Integers):
    """The fixed shape that a captured graph serves: plans may have fewer rows and tokens."""

    num_rows: int
    num_tokens: int

    def _fields(self) -> tuple[int, ...]:
        return (self.num_rows, self.num_tokens)


@dataclass(frozen=True, kw_only=True)
class SplitPolicy(_Integers):
    """How a request's keys are cut into parts: at most one of the two; 0: the planner decides."""

    fixed_tokens: int = 0
    """Parts of so many tokens, so that a request's bits do not depend on the rest of the batch."""
    forced_count: int = 0
    """So many parts for every row, at most 256."""

    def _fields(self) -> tuple[int, ...]:
        return (self.fixed_tokens, self.forced_count)


@dataclass(frozen=True)
class PlanInfo:
    """What the current plan holds."""

    num_rows: int
    num_tokens: int
    num_tiles: int
    num_splits: int
    """The most parts that one row's keys are cut into."""
    partial_bytes: int
    """Scratch that the plan's partial results take."""


@dataclass(frozen=True)
class Support:
    """Which kernel serves a shape; true where one does."""

    kernel: str
    """Empty where none can."""
    capturable: bool
    """Its launches may be captured in a graph."""
    rounds_probabilities: bool
    """It rounds probabilities to the cache's 16-bit dtype, for tensor cores."""
    reason: str
    """Why this kernel, or why none."""
    considered: tuple[tuple[str, str], ...]
    """Each kernel of the device and its refusal, empty where it accepts; in order of preference."""

    def __bool__(self) -> bool:
        return bool(self.kernel)
