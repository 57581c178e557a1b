"""Merging of attention over parts of the keys. Every LSE is in base 2."""

from collections.abc import Sequence

import numpy as np

from ... import attention
from ..._arrays import empty_like
from ..._checks import invalid
from ..._records import LseBase
from .._arrays import Array, as_tensor, check_arrays, check_rank, float32, host_copy, is_tensor

# The most that the library merges in one launch on CUDA.
_MOST_STATES = 256


def merge_state(v_a: Array, s_a: Array, v_b: Array, s_b: Array) -> tuple[Array, Array]:
    """Merges the attention over two parts of the keys, A and B, into that over both.

    v_a, v_b  [seq_len, num_heads, head_dim] fp32, bf16 or fp16
    s_a, s_b  [seq_len, num_heads] LSE, fp32; of another type they are converted first

    Returns new arrays: V, as v_a, and S [seq_len, num_heads] fp32. A state of LSE -inf counts for
    nothing; of two such, V is 0 and S is -inf. Raises ValueError.
    """
    check_arrays("merge_state", v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    return _merge([(v_a, float32(s_a)), (v_b, float32(s_b))], v_a)


def merge_states(v: Array, s: Array) -> tuple[Array, Array]:
    """Merges the attention over several parts of the keys into that over all.

    v  [seq_len, num_states, num_heads, head_dim] fp32, bf16 or fp16; 1 or more states
    s  [seq_len, num_states, num_heads] LSE, fp32; of another type it is converted first

    Returns new arrays: V [seq_len, num_heads, head_dim], as v, and S [seq_len, num_heads] fp32.
    Raises ValueError.
    """
    check_arrays("merge_states", v=v, s=s)
    if v.ndim != 4 or tuple(s.shape) != tuple(v.shape[:3]):
        got = f"{list(v.shape)} and {list(s.shape)}"
        expected = "[seq_len, num_states, num_heads, head_dim] and its first three"
        raise invalid("shapes of v and s", "merge_states", expected, got)
    logarithms = float32(s)
    states = [(v[:, i], logarithms[:, i]) for i in range(v.shape[1])]
    while len(states) > _MOST_STATES:
        groups = [states[i : i + _MOST_STATES] for i in range(0, len(states), _MOST_STATES)]
        states = [_merge(group, v, "float32") for group in groups]
    return _merge(states, v)


def merge_state_in_place(
    v: Array, s: Array, v_other: Array, s_other: Array, mask: Array | None = None
) -> None:
    """Merges another state into (v, s).

    v, v_other  [seq_len, num_heads, head_dim] fp32, bf16 or fp16
    s, s_other  [seq_len, num_heads] LSE; s must be fp32, s_other is converted
    mask        [seq_len] bool, copied where it is on another device than the others: False leaves
                out the other state of that token; None: none is left out

    Where both count for nothing v becomes 0 and s -inf. Raises ValueError.
    """
    where = "merge_state_in_place"
    check_arrays(where, v=v, s=s, v_other=v_other, s_other=s_other)
    check_rank(where, 3, v=v)
    other = float32(s_other)
    if mask is not None:
        check_arrays(where, mask=mask)
        if tuple(mask.shape) != (v.shape[0],) or not str(mask.dtype).endswith("bool"):
            got = f"{list(mask.shape)} {mask.dtype}"
            raise invalid("mask", where, f"[{v.shape[0]}] bool", got)
        if is_tensor(other):
            other = other.masked_fill(~as_tensor(mask).to(other.device)[:, None], -np.inf)
        else:
            other = np.where(~host_copy(mask)[:, None], np.float32(-np.inf), other)
    attention.merge_states([(v, s), (v_other, other)], out=v, lse=s, lse_base=LseBase.TWO)


def _merge(
    states: Sequence[tuple[Array, Array]], like: Array, dtype: str | None = None
) -> tuple[Array, Array]:
    """Merged into new arrays of the framework, device and (where none is named) type of `like`."""
    if not states:
        raise invalid("num_states", "merge_states", "1 or more", 0)
    first, _ = states[0]
    out = empty_like(like, first.shape, "merge_states", dtype)
    lse = empty_like(like, first.shape[:2], "merge_states", "float32")
    attention.merge_states(states, out=out, lse=lse, lse_base=LseBase.TWO)
    return out, lse
