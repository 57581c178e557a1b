import libmla
import numpy as np
import pytest
from frameworks import TOLERANCE, float64
from libmla import LseBase


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("base", LseBase)
def test_merge_is_the_weighted_mean(framework, random, dtype, base):
    power = np.exp if base == LseBase.NATURAL else np.exp2
    states = [
        (
            framework.array(random.standard_normal((5, 3, 8)), dtype),
            framework.array(random.standard_normal((5, 3)), "fp32"),
        )
        for _ in range(4)
    ]
    states[1][1][2] = -np.inf
    states[1][0][2] = np.nan  # of a state without keys nothing is used
    outs, lses = (
        np.stack([float64(part) for part in parts]) for parts in zip(*states, strict=True)
    )
    weights = power(lses)[..., None]
    expected = np.nansum(weights * outs, axis=0) / weights.sum(axis=0)
    lse = framework.empty((5, 3), "fp32")
    out = libmla.merge_states(states, lse=lse, lse_base=base)
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(float64(out), expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(power(float64(lse)), weights.sum(axis=0)[..., 0], rtol=1e-5)


def test_merge_into_a_state_of_its_own(framework):
    first, second = (framework.array(np.full((1, 1, 4), value), "fp32") for value in (1, 3))
    lse = framework.array(np.zeros((1, 1)), "fp32")
    assert libmla.merge_states([(first, lse), (second, lse)], out=first, lse=lse) is first
    np.testing.assert_allclose(float64(first), np.full((1, 1, 4), 2.0))
    np.testing.assert_allclose(float64(lse), np.log([[2.0]]), rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 2, 8), (2, 0, 8)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_nothing_is_merged_to_nothing(framework, shape, dtype):
    state = framework.empty(shape, dtype), framework.empty(shape[:2], "fp32")
    lse = framework.empty(shape[:2], "fp32")
    assert tuple(libmla.merge_states([state, state], lse=lse).shape) == shape


def test_merge_names_the_state():
    out, lse = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
    for wrong, message in (
        ((out, lse[0]), r"states\[1\]\.lse: expected 2 dimensions, got 1"),
        ((out[0], lse), r"states\[1\]\.out: expected 3 dimensions, got 2"),
        ((out, lse.astype(np.float16)), r"states\[1\]\.lse dtype: expected fp32, got fp16"),
        ((out, lse[:1]), r"states\[1\]\.lse\.shape: expected \[2, 3\], got \[1, 3\]"),
        ((out[:1], lse), r"states\[1\]\.out\.shape: expected \[2, 3, 4\], got \[1, 3, 4\]"),
    ):
        with pytest.raises(ValueError, match=f"^merge_states: {message}"):
            libmla.merge_states([(out, lse), wrong])


def test_merge_refuses():
    out, lse = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="merge_states: states: expected 1 or more, got 0"):
        libmla.merge_states([])
    with pytest.raises(ValueError, match=r"merge_states: .*expected .*, got"):
        libmla.merge_states([(out, lse), (out[:1], lse)])
