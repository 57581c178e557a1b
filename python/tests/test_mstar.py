"""libmla.compat.mstar: the module and its manager, over an engine's objects."""

import inspect
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from libmla.compat import mstar  # noqa: E402  # it needs PyTorch
from libmla.compat.mstar import (  # noqa: E402
    FlashInferMLAManager,
    FlashInferMLAWrapper,
    flashinfer_mla_supports,
)
from mstar_engine import (  # noqa: E402
    DTYPES,
    NAMES,
    PAGE,
    PAGES,
    RANK,
    ROPE,
    Engine,
    KVLayout,
    Row,
    kv_config,
    label_plan,
    lease,
    step_of,
)


def test_supports_every_shape_within_the_limits():
    for rank, rope in [(512, 64), (512, 0), (576, 64), (16, 8), (7, 3)]:
        assert flashinfer_mla_supports(rank, rope) is True
    assert flashinfer_mla_supports(0, 64) is False
    assert flashinfer_mla_supports(8192, 1) is False


def test_signatures_are_those_of_the_page():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(FlashInferMLAManager) == [
        "kv_cache",
        "device",
        "dtype",
        "kv_config",
        "backend",
        "sm_scale",
    ]
    assert names(FlashInferMLAManager.run) == [
        "self",
        "q",
        "label",
        "kv_cache_layer",
        "k",
        "v",
        "layer_idx",
        "q_pe",
        "return_lse",
    ]
    assert names(FlashInferMLAManager.select_last_hidden) == ["self", "hidden", "label"]
    wrapper = inspect.signature(FlashInferMLAWrapper).parameters
    assert list(wrapper)[:11] == [
        "workspace_buffer",
        "num_qo_heads",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "page_size",
        "sm_scale",
        "batch_size",
        "max_num_pages",
        "device",
        "use_cuda_graph",
        "backend",
    ]
    assert names(FlashInferMLAWrapper.plan)[1:8] == [*NAMES, "causal", "dtype", "kv_dtype"]
    assert names(FlashInferMLAWrapper.run) == [
        "self",
        "q_nope",
        "q_pe",
        "kv_cache_layer",
        "return_lse",
    ]


# A function-scoped fixture is the same for every case here: it only names the framework.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=5),
    causal=st.booleans(),
    spans=st.none() | st.lists(st.integers(0, 4), min_size=5, max_size=5),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_step_matches_float64(torch_framework, lengths, causal, spans, dtype, seed):
    """Rows without queries, pages or both; `spans`: a context-only step with such query counts."""
    engine = Engine(torch_framework.device, dtype, seed=seed)
    rows = engine.rows(*lengths)
    if spans is None:
        engine.plan(rows, causal=causal)
        engine.check(rows, causal=causal)
    else:
        spans = spans[: len(rows)]
        engine.plan(rows, causal=causal, context_only=True, spans=spans)
        stored = [row.stored for row in rows]
        engine.check(rows, spans, stored, causal)
        assert engine.manager.kv_len_buf().tolist() == stored


def test_rows_without_pages_have_no_tokens_whatever_their_last_page(engine):
    rows = engine.rows((6, 2), (0, 0), (8, 0))
    engine.plan(rows)
    assert label_plan(rows).cpu_indptrs[3].tolist() == [PAGE, PAGE, PAGE]
    assert engine.manager.kv_len_buf().tolist() == [8, 0, 8]
    assert engine.manager.qo_indptr_buf().tolist() == [0, 2, 2, 2]
    engine.check(rows)


@pytest.mark.parametrize(
    "form",
    [
        tuple,
        lambda tensors: dict(zip(NAMES, tensors, strict=True)),
        lambda tensors: SimpleNamespace(**dict(zip(NAMES, tensors, strict=True))),
    ],
    ids=["tuple", "mapping", "object"],
)
def test_index_arrays_in_any_form(form):
    engine = Engine()
    rows = engine.rows((5, 1), (9, 2))
    engine.plan(rows, {"main": label_plan(rows, form)})
    engine.check(rows)


def test_labels_have_plans_of_their_own(engine):
    main, draft = engine.rows((5, 1), (9, 2)), engine.rows((3, 3), label="draft")
    engine.plan([*main, *draft], {"main": label_plan(main), "draft": label_plan(draft)})
    engine.check(main)
    engine.check(main, label="main")
    engine.check(draft, label="draft")
    assert engine.manager.kv_len_buf("draft").tolist() == [6]
    assert engine.manager.qo_indptr_buf("other") is None
    with pytest.raises(ValueError, match=r"run: label: expected one of \['draft', 'main'\], got"):
        engine.check(main, label="other")


def test_context_only_pairs_segments_by_label_and_position(engine):
    main, draft = engine.rows((5, 3), (9, 0)), engine.rows((8, 8), (0, 2), label="draft")
    plan = {"main": label_plan(main), "draft": label_plan(draft)}
    step = step_of([draft[0], main[0], draft[1], main[1]], context_only=True, spans=[1, 2, 3, 4])
    step.causal = False
    engine.manager.plan(step, engine.context(plan))
    engine.check(main, [2, 4], [5, 9], causal=False)
    engine.check(draft, [1, 3], [8, 0], causal=False, label="draft")
    assert engine.manager.kv_len_buf("draft").tolist() == [8, 0]
    assert engine.manager.qo_indptr_buf("draft").tolist() == [0, 1, 4]


def test_context_only_of_labels_that_are_packed_as_one(engine):
    text, image = engine.rows((5, 3), label="text"), engine.rows((9, 1), label="image")
    rows = [*text, *image]
    engine.plan(
        [*image, *text], {"all": label_plan(rows)}, context_only=True, causal=False, spans=[1, 2]
    )
    engine.check(rows, [2, 1], [5, 9], causal=False, label="all")


@pytest.mark.parametrize("spans", [[1], [1, 2, 3]])
def test_context_only_refuses_other_counts_of_rows(spans):
    engine = Engine()
    rows = engine.rows((5, 3), (9, 0))
    step = step_of([*rows, *rows], context_only=True, spans=spans)
    message = rf"segments of label 'main': expected 2, as many as its rows, got {len(spans)}"
    with pytest.raises(ValueError, match=message):
        engine.manager.plan(step, engine.context(rows))
    with pytest.raises(ValueError, match="segments of label 'draft': expected 0"):
        engine.plan(
            [*rows, Row(0, 0, label="draft")], {"main": label_plan(rows)}, context_only=True
        )


@pytest.mark.parametrize(
    ("span", "got"), [(1.5, "1.5"), (2**70, "11805916207174"), (2**31, "2147483648"), (-1, "-1")]
)
def test_numbers_of_the_engine_are_never_cut(span, got):
    engine = Engine()
    rows = engine.rows((5, 3))
    step = step_of(rows, context_only=True, spans=[span])
    with pytest.raises(ValueError, match=rf"plan: span of request .*: expected .*, got {got}"):
        engine.manager.plan(step, engine.context(rows))
    plan = {"main": label_plan(rows)}
    plan["main"].views[0].to_compute = span
    with pytest.raises(ValueError, match=r"views\[0\].to_compute of 'main': expected .*, got"):
        engine.plan(rows, plan, context_only=True)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("paged_kv_indptr", [0, 3, 2]),
        ("paged_kv_indptr", [0, 3]),
        ("paged_kv_indptr", [0, 2, 9]),
        ("paged_kv_indices", [1]),
        ("paged_kv_last_page_len", [1]),
        ("paged_kv_last_page_len", [4, 0]),
        ("paged_kv_last_page_len", [PAGE + 1, 2]),
        ("paged_kv_last_page_len", [-3, 2]),
    ],
)
def test_context_only_refuses_page_lists_that_do_not_fit(name, values):
    engine = Engine()
    rows = engine.rows((5, 3), (9, 1))
    plan = {"main": label_plan(rows)}
    arrays = dict(zip(mstar.wrapper.INDEX_NAMES, plan["main"].cpu_indptrs, strict=True))
    arrays[name] = torch.tensor(values, dtype=torch.int32)
    plan["main"].cpu_indptrs = tuple(arrays.values())
    with pytest.raises(ValueError, match=r"^FlashInferMLAManager\.plan: paged_.*: expected .*"):
        engine.plan(rows, plan, context_only=True)


def test_context_only_refuses_rows_that_append_more_than_they_have():
    engine = Engine()
    rows = engine.rows((5, 3))
    plan = {"main": label_plan(rows)}
    plan["main"].views[0].to_compute = 9
    message = r"views\[0\].to_compute of 'main': expected 0 to 8, its length, got 9"
    with pytest.raises(ValueError, match=message):
        engine.plan(rows, plan, context_only=True)


def test_ordinary_steps_take_their_queries_from_the_kv_plan():
    engine = Engine()
    rows = engine.rows((5, 3), (9, 1))
    engine.plan(rows, spans=[7])
    engine.check(rows)


def test_what_plan_returns_stands_in_plan_results(engine):
    rows = engine.rows((5, 1))
    ctx = engine.context(rows)
    ctx.plan_results["attention"] = engine.manager.plan(step_of(rows), ctx)
    engine.check(rows)


def test_a_lease_keeps_its_rows_and_addresses(engine):
    rows = engine.rows((5, 1), (9, 2), (0, 0))
    addresses = set()
    for _ in range(3):
        engine.plan(rows, lease=lease(0))
        lengths, offsets = engine.manager.kv_len_buf(), engine.manager.qo_indptr_buf()
        addresses.add((lengths.data_ptr(), offsets.data_ptr()))
        engine.check(rows, padding=5)
        assert lengths.tolist() == [row.stored + row.appended for row in rows]
        for row in rows[:2]:
            row.stored += row.appended
            engine.fill(row)
    assert len(addresses) == 1
    engine.plan(rows[:1], lease=lease(0))
    assert lengths.tolist() == [rows[0].stored + rows[0].appended, 0, 0]
    engine.check(rows[:1], padding=7)
    with pytest.raises(ValueError, match=r"PagedAttention::plan: .*expected .*, got"):
        engine.plan([*rows, Row(0, 0)], lease=lease(0))


def test_a_refused_plan_does_not_fix_a_buckets_rows(engine):
    rows = engine.rows((5, 1), (9, 2))
    plan = {"main": label_plan(rows[:1])}
    plan["main"].cpu_indptrs[2][0] = PAGES
    for is_preplan in (False, True):
        with pytest.raises(ValueError, match=rf"kv_indices\[0\]: expected .*, got {PAGES}"):
            engine.plan(rows[:1], plan, lease=lease(0), is_preplan=is_preplan)
    engine.plan(rows, lease=lease(0))
    engine.check(rows)


def test_leases_of_other_slots_and_buckets_have_other_buffers(engine):
    rows = engine.rows((5, 1))
    buffers = []
    for where in (lease(0), lease(1), lease(0, "verify"), lease(0)):
        engine.plan(rows, lease=where)
        buffers.append(engine.manager.kv_len_buf())
    assert len({buffer.data_ptr() for buffer in buffers}) == 3
    assert buffers[0] is buffers[3]


def test_a_lease_without_a_bucket_is_eager(engine):
    for lengths in ([(5, 1)], [(9, 2), (3, 1), (0, 0)], [(2, 40)]):
        rows = engine.rows(*lengths)
        engine.plan(rows, lease=lease(0, None))
        engine.check(rows, padding=3)


def test_slots_of_eager_steps_are_apart(engine):
    first, second = engine.rows((5, 1)), engine.rows((9, 2))
    engine.plan(first, slot=0)
    lengths = engine.manager.kv_len_buf()
    engine.plan(second, slot=1)
    assert lengths.tolist() == [6]
    engine.check(second)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "bf16")]
)
@pytest.mark.parametrize("where", [None, lease(0)], ids=["eager", "lease"])
def test_dtypes_that_differ_are_cast(torch_framework, dtype, cache_dtype, where):
    engine = Engine(torch_framework.device, dtype, cache_dtype)
    rows = engine.rows((5, 1), (9, 2))
    for _ in range(2):
        engine.plan(rows, lease=where)
        engine.check(rows)


def test_queries_of_another_dtype_than_the_managers_are_cast(engine):
    rows = engine.rows((5, 1), (9, 2))
    engine.plan(rows)
    q = engine.queries(3)
    out, lse = engine.manager.run(
        q[..., :RANK].double(),
        kv_cache_layer=engine.layer,
        q_pe=q[..., RANK:].double(),
        return_lse=True,
    )
    engine.check_answer(q.double(), out, lse, rows, [1, 2], [6, 11])


def test_layers_of_any_stride_and_more_pages(engine):
    rows = engine.rows((5, 1), (9, 2))
    pool = torch.full((PAGES + 1, 3, PAGE, 30), torch.nan, device=engine.device)
    pool[:PAGES, 1, :, 2 : 2 + RANK + ROPE] = engine.layer
    engine.layer = pool[:, 1, :, 2 : 2 + RANK + ROPE]
    for where in (None, lease(0)):
        engine.plan(rows, lease=where)
        engine.check(rows)


@pytest.mark.parametrize("where", [None, lease(0)], ids=["eager", "lease"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(engine, where, backend):
    torch._dynamo.reset()
    rows = engine.rows((5, 1), (9, 2))
    q = engine.queries(3)

    def layer(q):
        out, lse = engine.manager.run(
            q[..., :RANK] * 2, kv_cache_layer=engine.layer, q_pe=q[..., RANK:], return_lse=True
        )
        return out + 1, lse

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for _ in range(3):
        engine.plan(rows, lease=where)
        assert all(map(torch.equal, compiled(q), layer(q)))
        rows[0].stored += 1
        engine.fill(rows[0])


def test_last_hidden_of_each_row(engine):
    rows = engine.rows((5, 1), (8, 0), (0, 3))
    for where, padding in ((None, 0), (lease(0), 2)):
        engine.plan(rows, lease=where)
        hidden = torch.randn(4 + padding, 5, dtype=torch.float64).to(engine.device, torch.bfloat16)
        hidden[1] = torch.nan  # no row's last
        last = engine.manager.select_last_hidden(hidden)
        assert torch.equal(last[0], hidden[0])
        assert not last[1].any()
        assert torch.equal(last[2], hidden[3])
    with pytest.raises(ValueError, match=r"hidden.shape\[0\]: expected 4, the plan's .*, got 3"):
        engine.manager.select_last_hidden(hidden[:3])
    engine.plan(engine.rows((5, 0)))
    assert engine.manager.select_last_hidden(hidden[:0]).tolist() == [[0] * 5]


def test_a_captured_last_hidden_takes_the_buckets_tokens(monkeypatch):
    engine = Engine("cpu", "bf16")
    engine.plan(engine.rows((5, 1), (9, 1)), lease=lease(0))
    q = engine.queries(4)
    engine.manager.run(q[..., :RANK], kv_cache_layer=engine.layer, q_pe=q[..., RANK:])
    hidden = torch.zeros(4, 5, dtype=torch.bfloat16)
    engine.manager.select_last_hidden(hidden[:2])  # the plan's
    monkeypatch.setattr(mstar.wrapper, "_is_capturing", lambda device: True)
    engine.manager.select_last_hidden(hidden)
    with pytest.raises(ValueError, match=r"hidden.shape\[0\]: expected 4, the bucket's .*, got 3"):
        engine.manager.select_last_hidden(hidden[:3])


def test_the_manager_says_what_it_is(engine):
    assert engine.manager.depends_on() == {"kv_cache"}
    assert engine.manager.uses_kernel
    assert not Engine(backend="reference").manager.uses_kernel


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"layout": KVLayout.NHD}, {}, r"kv_config.layout: expected MLA, got NHD"),
        ({"num_qo_heads": None}, {}, r"kv_config.num_qo_heads: expected 1 or more, got None"),
        ({}, {"sm_scale": None}, r"sm_scale: expected above 0.*, got None"),
        ({}, {"sm_scale": float("nan")}, r"sm_scale: expected above 0.*, got nan"),
        ({"kv_lora_rank": 0}, {}, r"kv_lora_rank: expected 1 to 8192, got 0"),
        ({"page_size": 0}, {}, r"kv_config.page_size: expected .*, got 0"),
        ({}, {"backend": "none"}, r'cpu has no kernel "none"'),
    ],
)
def test_the_manager_refuses(config, options, message):
    with pytest.raises(ValueError, match=message):
        FlashInferMLAManager(
            "kv_cache", "cpu", torch.float32, kv_config(**config), **{"sm_scale": 1.0, **options}
        )


def test_calls_out_of_order_and_wrong_arguments():
    engine = Engine()
    q = engine.queries(1)
    with pytest.raises(RuntimeError, match=r"run: plan: expected a plan before it, got none"):
        engine.manager.run(q[..., :RANK], kv_cache_layer=engine.layer, q_pe=q[..., RANK:])
    with pytest.raises(RuntimeError, match=r"kv_len_buf: plan: expected a plan before it"):
        engine.manager.kv_len_buf()
    assert engine.manager.qo_indptr_buf() is None
    rows = engine.rows((5, 1))
    ctx = engine.context(rows)
    ctx.plan_results = {"other": None}
    with pytest.raises(ValueError, match=r"ctx.plan_results\['kv_cache'\]: expected the plan"):
        engine.manager.plan(step_of(rows), ctx)
    with pytest.raises(ValueError, match=r"lease.bucket: expected a value that can be a key"):
        engine.plan(rows, lease=lease(0, bucket=[1]))
    short = {"main": label_plan(rows, form=lambda arrays: tuple(arrays[:3]))}
    with pytest.raises(ValueError, match=r"cpu_indptrs: expected 4 arrays: .*, got 3"):
        engine.plan(rows, short)
    engine.plan(rows)
    with pytest.raises(ValueError, match=r"hidden.shape: expected 1 dimension or more, got none"):
        engine.manager.select_last_hidden(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"kv_cache_layer: expected a layer of the cache"):
        engine.manager.run(q[..., :RANK], q_pe=q[..., RANK:])
    with pytest.raises(ValueError, match=r"k, v: expected None"):
        engine.manager.run(q[..., :RANK], None, engine.layer, k=q, q_pe=q[..., RANK:])
    with pytest.raises(ValueError, match=r"q_pe: expected the rotated part"):
        engine.manager.run(q[..., :RANK], None, engine.layer)
    rows[0].pages[0] = PAGES
    with pytest.raises(ValueError, match=rf"kv_indices\[0\]: expected .*, got {PAGES}"):
        engine.plan(rows)


@pytest.mark.cuda
def test_a_capture_without_a_run_before_it_is_refused():
    engine = Engine("cuda:0")
    rows = engine.rows((5, 1))
    for where in (lease(0), None):
        engine.plan(rows, lease=where)
        q = engine.queries(3)
        with (
            pytest.raises(RuntimeError, match=r"run: capture: expected use_cuda_graph, and a run"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            engine.manager.run(q[..., :RANK], kv_cache_layer=engine.layer, q_pe=q[..., RANK:])
        engine.check(rows, padding=2)


def test_names_of_the_module():
    assert set(mstar.__all__) == {
        "FlashInferMLAManager",
        "FlashInferMLAWrapper",
        "flashinfer_mla_supports",
    }
