"""Steps of libmla.compat.mstar that are planned while the one before them runs."""

import pytest

torch = pytest.importorskip("torch")

from libmla.compat.mstar import FlashInferMLAWrapper  # noqa: E402
from mstar_engine import RANK, Engine, lease  # noqa: E402


def test_a_preplan_waits_and_is_promoted(engine):
    now, later = engine.rows((5, 1), (9, 2)), engine.rows((7, 1))
    engine.plan(now, lease=lease(0))
    early = engine.plan(later, lease=lease(1), is_preplan=True)
    engine.check(now)
    promoted = engine.plan(later, lease=lease(1))
    assert promoted is early
    engine.check(later)
    again = engine.plan(later, lease=lease(1))
    assert again is not early


def test_a_promoted_preplan_is_no_work(engine, monkeypatch):
    now, later = engine.rows((5, 1)), engine.rows((7, 1))
    engine.plan(now, lease=lease(0))
    engine.plan(later, lease=lease(1), is_preplan=True)
    monkeypatch.setattr(FlashInferMLAWrapper, "plan", None)
    engine.plan(later, lease=lease(1))
    engine.check(later)


@pytest.mark.parametrize(
    "change",
    ["lease", "bucket", "no lease", "causal", "queries", "pages", "length", "context_only"],
)
def test_a_stale_preplan_is_dropped(engine, change):
    now, later = engine.rows((5, 1), (9, 2)), engine.rows((7, 3))
    engine.plan(now, lease=lease(0))
    early = engine.plan(later, lease=lease(1), is_preplan=True)
    options = {"lease": lease(1)}
    counts, keys, causal = [3], [10], True
    if change == "lease":
        options["lease"] = lease(2)
    elif change == "bucket":
        options["lease"] = lease(1, "verify")
    elif change == "no lease":
        options["lease"] = None
    elif change == "causal":
        options["causal"] = causal = False
    elif change == "queries":
        later[0].stored, later[0].appended = 8, 2
        counts = [2]
    elif change == "pages":
        engine.layer[later[0].pages] = torch.nan
        later[0].pages = []
        engine.fill(later[0])
    elif change == "length":
        later[0].stored, keys = 6, [9]
    elif change == "context_only":
        options["context_only"], keys = True, [7]
    assert engine.plan(later, **options) is not early
    engine.check(later, counts, keys, causal)
    assert engine.plan(later, **options) is not early


def test_a_second_preplan_is_an_error_until_it_is_cleared():
    engine = Engine()
    now, later = engine.rows((5, 1)), engine.rows((7, 1))
    engine.plan(now, lease=lease(0))
    early = engine.plan(later, lease=lease(1), is_preplan=True)
    with pytest.raises(RuntimeError, match=r"plan: is_preplan: expected .*, got one"):
        engine.plan(later, lease=lease(2), is_preplan=True)
    engine.manager.clear_preplan()
    again = engine.plan(later, lease=lease(1), is_preplan=True)
    assert again is not early
    engine.manager.clear_preplan()
    assert engine.plan(later, lease=lease(1)) is not again


def test_a_preplan_may_not_disturb_the_plan_in_use():
    engine = Engine()
    now, later = engine.rows((5, 1)), engine.rows((7, 1))
    engine.plan(now, lease=lease(0))
    with pytest.raises(ValueError, match=r"ctx.slot_lease: expected another slot or bucket"):
        engine.plan(later, lease=lease(0), is_preplan=True)
    with pytest.raises(ValueError, match=r"ctx.slot_lease: expected a lease.*, got None"):
        engine.plan(later, slot=1, is_preplan=True)
    engine.check(now)
    assert engine.manager.supports_preplan
    assert not engine.manager.force_double_buffer


@pytest.mark.cuda
def test_a_captured_run_follows_plans_and_preplans():
    """Two slots in turn, each planned while the other is replayed."""
    engine = Engine("cuda:0", "bf16")
    rows = engine.rows((5, 1), (9, 1), (0, 0))
    q = engine.queries(4)
    graphs = {}

    def body():
        out, lse = engine.manager.run(
            q[..., :RANK], kv_cache_layer=engine.layer, q_pe=q[..., RANK:], return_lse=True
        )
        lengths = engine.manager.kv_len_buf() * 1
        return out, lse, lengths, engine.manager.select_last_hidden(out)

    def expect(answer):
        out, lse, lengths, last = answer
        keys = [row.stored + row.appended for row in rows]
        engine.check_answer(q[:2], out[:2], lse[:2], rows, [1, 1, 0], keys)
        assert not out[2:].any()
        assert torch.isneginf(lse[2:]).all()
        assert lengths.tolist() == keys
        assert torch.equal(last[:2], out[:2])
        assert not last[2].any()

    for slot in range(2):
        engine.plan(rows, lease=lease(slot))
        body()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = body()
        graphs[slot] = graph, answer
    engine.plan(rows, lease=lease(0))
    for step in range(6):
        graph, answer = graphs[step % 2]
        q.copy_(engine.queries(4))
        graph.replay()
        expect(answer)
        for row in rows[:2]:
            row.stored += 3
            engine.fill(row)
        early = engine.plan(rows, lease=lease((step + 1) % 2), is_preplan=True)
        assert engine.plan(rows, lease=lease((step + 1) % 2)) is early


@pytest.mark.cuda
def test_a_preplan_on_another_stream_is_ordered_before_the_step():
    engine = Engine("cuda:0")
    now, later = engine.rows((5, 1)), engine.rows((7, 1), (9, 2))
    engine.plan(now, lease=lease(0))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        engine.plan(later, lease=lease(1), is_preplan=True)
    engine.check(now)
    engine.plan(later, lease=lease(1))
    lengths = engine.manager.kv_len_buf().clone()
    assert lengths.tolist() == [8, 11]
    engine.check(later)
