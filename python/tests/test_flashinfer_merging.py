"""The merging of states of libmla.compat.flashinfer."""

import numpy as np
import pytest
from flashinfer_calls import check, decode, parts_of, plan, workspace_of
from frameworks import TOLERANCE, Framework, float64
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from libmla.compat.flashinfer import (
    BatchMLAPagedAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)

torch = pytest.importorskip("torch")


def states_of(random, framework, shape, dtype):
    """v and s of any values, with tokens that some states have no keys for."""
    v, s = random.standard_normal(shape), random.standard_normal(shape[:-1]) * 4
    s[random.random(s.shape) < 0.2] = -np.inf
    s[0] = -np.inf
    return framework.array(v, dtype), framework.array(s, "fp32")


def merged(v, s, axis):
    """In base 2, by torch in float64."""
    v, s = torch.tensor(float64(v)), torch.tensor(float64(s))
    total = torch.logsumexp(s * np.log(2), dim=axis)
    weights = torch.exp(s * np.log(2) - total.unsqueeze(axis)).nan_to_num(0)
    return (weights.unsqueeze(-1) * v).sum(axis).numpy(), (total / np.log(2)).numpy()


def check_merged(got, expected, dtype):
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(float64(got[0]), expected[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(float64(got[1]), expected[1], rtol=1e-5, atol=1e-5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.integers(1, 9)),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_merge_states_of_any_shape(framework, shape, dtype, seed):
    v, s = states_of(np.random.default_rng(seed), framework, shape, dtype)
    out, lse = merge_states(v, s)
    assert out.dtype == v.dtype
    assert type(lse) is type(s)
    check_merged((out, lse), merged(v, s, 1), dtype)
    a, b = 0, shape[1] - 1
    pair = merge_state(v[:, a], s[:, a], v[:, b], s[:, b])
    check_merged(pair, merged(v[:, [a, b]], s[:, [a, b]], 1), dtype)


def test_more_states_than_one_launch_takes(framework, random):
    v, s = states_of(random, framework, (3, 700, 2, 8), "fp16")
    check_merged(merge_states(v, s), merged(v, s, 1), "fp16")


def test_an_lse_of_another_type_is_converted(framework, random):
    v, s = states_of(random, framework, (3, 2, 2, 8), "fp16")
    rounded = framework.array(float64(s), "fp16")
    out, lse = merge_states(v, rounded)
    assert lse.dtype == s.dtype
    check_merged((out, lse), merged(v, rounded, 1), "fp16")


@pytest.mark.parametrize("masked", [False, True])
def test_merge_state_in_place(framework, random, masked):
    v, s = states_of(random, framework, (6, 2, 2, 8), "fp16")
    s[:] = framework.array(random.standard_normal((6, 2, 2)), "fp32")
    first = framework.array(float64(v[:, 0]), "fp16"), framework.array(float64(s[:, 0]), "fp32")
    kept = tuple(map(float64, first))
    expected = merged(v, s, 1)
    mask = np.arange(6) % 2 == 0 if masked else np.ones(6, bool)
    lent = {"mask": framework.from_numpy(mask)} if masked else {}
    assert merge_state_in_place(*first, v[:, 1], s[:, 1], **lent) is None
    check_merged(
        tuple(part[mask] for part in map(float64, first)),
        tuple(part[mask] for part in expected),
        "fp16",
    )
    for part, before in zip(first, kept, strict=True):
        np.testing.assert_array_equal(float64(part)[~mask], before[~mask])


def test_merging_refuses_other_shapes_and_masks(framework, random):
    v, s = states_of(random, framework, (6, 2, 2, 8), "fp32")
    with pytest.raises(
        ValueError, match=r"merge_states: shapes of v and s: .*, got \[6, 1, 2, 8\]"
    ):
        merge_states(v[:, :1], s)
    for mask in (np.ones(6, np.int32), np.ones(1, bool)):
        with pytest.raises(
            ValueError, match=r"merge_state_in_place: mask: expected \[6\] bool, got"
        ):
            merge_state_in_place(
                v[:, 0], s[:, 0], v[:, 1], s[:, 1], mask=framework.from_numpy(mask)
            )


def test_attention_over_two_halves_is_merged(framework):
    """Out and LSE of run are what merge_state takes."""
    problem = decode([61, 33], seed=9)
    problem.causal = False
    q_nope, q_pe, cache = problem.tensors(framework)
    states = []
    for first in (True, False):
        half = decode([61, 33], seed=9)
        half.causal = False
        half.pages = [pages[:5] if first else pages[5:] for pages in problem.pages]
        half.lengths = [20 if first else length - 20 for length in problem.lengths]
        wrapper = BatchMLAPagedAttentionWrapper(workspace_of(framework))
        plan(wrapper, half, framework)
        caches = parts_of(half, cache, True)
        states += wrapper.run(q_nope, q_pe, *caches, return_lse=True)
    check(problem, *merge_state(*states), (q_nope, q_pe, cache))


def test_nothing_is_merged_to_nothing(framework, random):
    v, s = states_of(random, framework, (2, 2, 3, 8), "fp32")
    v, s = v[:0], s[:0]
    for out, lse in (merge_states(v, s), merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])):
        assert tuple(out.shape) == (0, 3, 8)
        assert tuple(lse.shape) == (0, 3)
    merge_state_in_place(v[:, 0], s[:, 0], v[:, 1], s[:, 1])


def test_a_mask_of_another_library(torch_framework, random):
    """Read-only and reversed, too."""
    mask = np.array([True, False, True])[::-1]
    mask.flags.writeable = False
    v, s = states_of(random, Framework("numpy"), (3, 2, 2, 8), "fp32")
    s[:] = random.standard_normal(s.shape)
    mixed = [
        (torch_framework.from_numpy, lambda mask: mask),
        (np.array, lambda mask: torch_framework.from_numpy(mask.copy())),
    ]
    for values, masks in mixed:
        first = values(v[:, 0].copy()), values(s[:, 0].copy())
        merge_state_in_place(*first, values(v[:, 1].copy()), values(s[:, 1].copy()), masks(mask))
        check_merged(
            tuple(float64(part)[mask] for part in first),
            tuple(part[mask] for part in merged(v, s, 1)),
            "fp32",
        )
        np.testing.assert_array_equal(float64(first[0])[~mask], v[~mask, 0])


def test_merge_refuses():
    with pytest.raises(ValueError, match="merge_states: num_states: expected 1 or more, got 0"):
        merge_states(torch.zeros(2, 0, 3, 4), torch.zeros(2, 0, 3))
    v, s = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"merge_states: .*expected .*, got"):
        merge_state(v, s, v[:1], s)
    with pytest.raises(ValueError, match=r"merge_states: states\[0\]\.lse\.shape: expected"):
        merge_state(v, s[:1], v, s)
    with pytest.raises(ValueError, match=r"merge_states: .*fp32"):
        merge_state_in_place(v, s.half(), v, s)
