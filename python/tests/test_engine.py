"""An engine over the resources, against attention in float64 over what each stream was given."""

import libmla
import numpy as np
import pytest
from frameworks import Framework, float64
from libmla import (
    AttentionPass,
    AttentionResource,
    AttentionStep,
    Bucket,
    Fork,
    KvResource,
    KvStep,
    KvStream,
    LatentPool,
    Limits,
    QuerySegment,
    Segment,
    SlotLease,
    Step,
    StepRunner,
)

RANK, ROPE, HEADS, SCALE = 16, 8, 2, 0.3
ONE_PASS = (AttentionPass(),)


class Engine:
    """Two layers of random rows and queries; remembers the rows of every stream."""

    def __init__(self, framework, num_pages=32, **options):
        self.framework = framework
        self.pool = LatentPool(
            num_layers=2,
            num_pages=num_pages,
            page_size=4,
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
            dtype="fp32",
            device=framework.device,
        )
        self.kv = KvResource(self.pool)
        self.attention = AttentionResource(
            self.kv, num_heads=HEADS, sm_scale=SCALE, limits=Limits(max_tokens=64), **options
        )
        self.runner = StepRunner([self.attention, self.kv])
        self.rows = {}  # (request, label) -> [length, 2 layers, latent]
        self.random = np.random.default_rng(7)

    def step(self, *segments, passes=ONE_PASS, **kv):
        return Step(
            {
                "kv": KvStep(segments=segments, **kv),
                "attention": AttentionStep(passes=passes),
            }
        )

    def serve(self, *segments, **parts):
        """One step with its queries; checks every output."""
        step = self.step(*segments, **parts)
        assert self.runner.admit(step)
        self.runner.plan(step)
        self.check(segments)
        self.runner.commit()

    def check(self, segments, label="main"):
        """Writes and attends in the planned step."""
        plan = self.kv.label_plan(label)
        tokens = int(plan.qo_indptr[-1])
        new = self.random.standard_normal((tokens, 2, RANK + ROPE)).astype(np.float32)
        for i, segment in enumerate(segments):
            old = self.rows.get((segment.request, label), new[:0])
            rows = new[plan.qo_indptr[i] : plan.qo_indptr[i + 1]]
            self.rows[segment.request, label] = np.concatenate([old, rows])
        query = self.random.standard_normal((tokens, HEADS, RANK + ROPE)).astype(np.float32)
        q = self.framework.from_numpy(query)
        for layer in range(2):
            rows = self.framework.from_numpy(new[:, layer].copy())
            self.kv.write(layer, rows[:, :RANK], rows[:, RANK:], label=label)
            out = self.attention.run(
                q_nope=q[..., :RANK], q_pe=q[..., RANK:], layer=layer, label=label
            )
            expected = [
                self.attend(
                    query[plan.qo_indptr[i] + j],
                    self.rows[segment.request, label],
                    layer,
                    segment.span - j - 1,
                )
                for i, segment in enumerate(segments)
                for j in range(segment.span)
            ]
            np.testing.assert_allclose(float64(out), expected, rtol=1e-5, atol=1e-5)

    def attend(self, query, rows, layer, unseen):
        keys = rows[: len(rows) - unseen, layer].astype(np.float64)
        scores = np.exp(query.astype(np.float64) @ keys.T * SCALE)
        return scores / scores.sum(axis=1, keepdims=True) @ keys[:, :RANK]


def test_continuous_batching(framework):
    engine = Engine(framework)
    engine.kv.open(1)
    engine.serve(Segment(1, 9))
    engine.kv.open(2)
    engine.serve(Segment(2, 5), Segment(1, 1))
    assert engine.kv.length(1) == 10
    engine.kv.trim(1, 3)
    engine.rows[1, "main"] = engine.rows[1, "main"][:-3]
    engine.serve(Segment(1, 2), Segment(2, 1))
    assert engine.kv.pages(1).tolist() != engine.kv.pages(2).tolist()
    engine.kv.remove(1)
    assert not engine.kv.contains(1)
    engine.serve(Segment(2, 3))
    engine.kv.remove(2)
    assert engine.kv.check().free == 32


def test_forks_share_pages(framework):
    engine = Engine(framework)
    engine.kv.open(1)
    engine.serve(Segment(1, 6))
    engine.rows[2, "main"] = engine.rows[1, "main"]
    engine.serve(Segment(2, 2), Segment(1, 1), forks_before=[Fork(KvStream(1), KvStream(2))])
    engine.kv.fork(KvStream(1), KvStream(3))
    assert engine.kv.length(3) == 7
    assert engine.kv.check().shared > 0


def test_prefixes_are_found_by_key(framework):
    engine = Engine(framework)
    keys = [(1, 2), (2**64 - 1, 2**63)]
    assert engine.kv.open(1, 8, page_keys=keys) == 0
    engine.serve(Segment(1, 8))
    assert engine.kv.open(2, 10, page_keys=keys) == 8
    assert engine.kv.pages(2).tolist() == engine.kv.pages(1).tolist()
    engine.kv.remove(1)
    engine.kv.remove(2)
    assert engine.kv.check().cached == 2
    engine.kv.drop_prefixes()
    assert engine.kv.check().cached == 0


def test_a_step_planned_early_is_found_again():
    engine = Engine(Framework("numpy"))
    engine.kv.open(1)
    first, second = engine.step(Segment(1, 5)), engine.step(Segment(1, 1))
    assert engine.runner.admit(first)
    engine.runner.plan(first)
    assert engine.runner.pre_admit(second)
    engine.runner.pre_plan(second, SlotLease(slot=1))
    engine.check([Segment(1, 5)])
    engine.runner.commit()
    assert engine.runner.admit(second)
    engine.runner.plan(second, SlotLease(slot=1))
    engine.check([Segment(1, 1)])
    engine.runner.commit()
    assert engine.kv.length(1) == 6


def test_a_refusal_says_who_lacks_pages():
    engine = Engine(Framework("numpy"), num_pages=3)
    engine.kv.open(1)
    engine.kv.open(2)
    answer = engine.runner.admit(engine.step(Segment(1, 8), Segment(2, 9)))
    assert not answer
    assert answer.pages_short == 2
    assert [tuple(shortage) for shortage in answer.shortages] == [(2, "main", 2)]
    assert engine.kv.check().free == 3


def test_passes_of_their_own(framework):
    engine = Engine(framework)
    engine.kv.open(1)
    engine.serve(Segment(1, 6))
    stored = engine.rows[1, "main"]
    passes = [
        AttentionPass(context_only=True, segments=[QuerySegment(2)]),
        AttentionPass(segments=[QuerySegment(1, num_appended=1)]),
    ]
    step = engine.step(Segment(1, 2), passes=passes)
    assert engine.runner.admit(step)
    engine.runner.plan(step)
    rows = np.random.default_rng(1).standard_normal((2, RANK + ROPE)).astype(np.float32)
    both = framework.from_numpy(rows)
    engine.kv.write(0, both[:, :RANK], both[:, RANK:])
    query = np.ones((2, HEADS, RANK + ROPE), np.float32)
    q = framework.from_numpy(query)
    out = engine.attention.run(q_nope=q[..., :RANK], q_pe=q[..., RANK:], layer=0)
    np.testing.assert_allclose(
        float64(out)[1], engine.attend(query[1], stored, 0, 0), rtol=1e-5, atol=1e-5
    )
    one = framework.from_numpy(query[:1])
    out = engine.attention.run(q_nope=one[..., :RANK], q_pe=one[..., RANK:], layer=0, pass_index=1)
    seen = np.concatenate([stored, np.stack([rows, rows], axis=1)[:1]])
    np.testing.assert_allclose(
        float64(out)[0], engine.attend(query[0], seen, 0, 0), rtol=1e-5, atol=1e-5
    )
    assert float64(framework.view(engine.attention.kv_len_buf(pass_index=1))).tolist() == [7]


def test_last_hidden_and_the_cursor(framework):
    engine = Engine(framework)
    for request in (1, 2):
        engine.kv.open(request)
    step = engine.step(Segment(1, 2), Segment(2, 3))
    assert engine.runner.admit(step)
    engine.runner.plan(step)
    hidden = framework.from_numpy(np.arange(20, dtype=np.float32).reshape(5, 4))
    out = framework.empty((2, 4), "fp32")
    engine.attention.select_last_hidden(hidden, out)
    assert np.array_equal(float64(out), float64(hidden)[[1, 4]])
    offsets = framework.view(engine.attention.qo_indptr_buf())
    assert float64(offsets).tolist() == [0, 2, 5]
    with pytest.raises(ValueError, match=r"layer: expected 0 to 1, got 5"):
        engine.attention.set_cursor("main", 5)
    with pytest.raises(ValueError, match=r'label: expected .*, got "guidance"'):
        engine.attention.set_cursor("guidance", 0)


def test_a_plan_for_an_attention_of_the_engines_own(framework):
    engine = Engine(framework)
    engine.kv.open(1)
    engine.serve(Segment(1, 6))
    step = engine.step(Segment(1, 2))
    assert engine.runner.admit(step)
    engine.runner.plan(step)
    ckv, kpe = engine.pool.views(0)
    attention = libmla.PagedAttention(
        geometry=libmla.Geometry(
            num_heads=HEADS,
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
            page_size=4,
            dtype="fp32",
        ),
        num_pages=engine.pool.total_pages,
        device=engine.pool.device,
    )
    attention.plan(**engine.kv.label_plan().batch(), sm_scale=SCALE)
    q = framework.array(np.ones((2, HEADS, RANK + ROPE)), "fp32")
    tensors = {"q_nope": q[..., :RANK], "q_pe": q[..., RANK:]}
    own = attention.run(**tensors, ckv=ckv, kpe=kpe)
    assert np.array_equal(float64(own), float64(engine.attention.run(**tensors, layer=0)))


def test_labels_packed_as_one():
    engine = Engine(Framework("numpy"))
    engine.kv.open(1, label="text")
    engine.kv.open(1, label="image")
    step = engine.step(
        Segment(1, 2, "image"), Segment(1, 3, "text"), combined={"all": ["text", "image"]}
    )
    assert engine.runner.admit(step)
    engine.runner.plan(step)
    plan = engine.kv.label_plan("all")
    assert plan.to_compute.tolist() == [3, 2]
    assert plan.qo_indptr.tolist() == [0, 3, 5]
    assert plan.slots.shape == (5,)


def test_a_bucket_pads(framework):
    engine = Engine(framework)
    engine.kv.open(1)
    engine.runner.size_graph_buffers([(Bucket(2, 4), 16)])
    step = engine.step(Segment(1, 3))
    assert engine.runner.admit(step)
    engine.runner.plan(step, SlotLease(slot=1, walk="decode", bucket=Bucket(2, 4)))
    assert engine.kv.label_plan().slots.tolist()[3:] == [-1]
    rows = framework.array(np.ones((4, RANK + ROPE)), "fp32")
    engine.kv.write(0, rows[:, :RANK], rows[:, RANK:])
    q = framework.array(np.ones((4, HEADS, RANK + ROPE)), "fp32")
    out = engine.attention.run(q_nope=q[..., :RANK], q_pe=q[..., RANK:])
    assert np.array_equal(float64(out)[:3], np.ones((3, HEADS, RANK)))
    assert not float64(out)[3].any()


def test_slots_for_those_who_write_rows_themselves(framework):
    engine = Engine(framework)
    engine.kv.open(1)
    with pytest.raises(RuntimeError, match=r"KvResource::slots_buf: .*expected .*, got"):
        engine.kv.slots_buf()
    for length in (3, 4):
        step = engine.step(Segment(1, length))
        assert engine.runner.admit(step)
        engine.runner.plan(step, SlotLease(bucket=Bucket(num_rows=2, num_tokens=4)))
        slots = framework.view(engine.kv.slots_buf())
        expected = engine.kv.label_plan().slots
        assert float64(slots).tolist() == expected.tolist()
        new = engine.random.standard_normal((4, RANK + ROPE))
        rows = framework.array(new, "fp32")
        engine.pool.append(1, slots, rows[:, :RANK], rows[:, RANK:])
        stored = float64(framework.view(engine.pool.layer(1))).reshape(-1, RANK + ROPE)
        assert np.array_equal(stored[expected[:length]], new[:length].astype(np.float32))
        with pytest.raises(ValueError, match=r"KvResource::.*expected .*, got"):
            engine.kv.slots_buf("draft")
        engine.runner.commit()


def test_calls_out_of_order_are_runtime_errors():
    engine = Engine(Framework("numpy"))
    with pytest.raises(RuntimeError, match=r"StepRunner::commit: .*expected .*, got"):
        engine.runner.commit()
    with pytest.raises(RuntimeError, match=r"KvResource::.*expected .*, got"):
        engine.kv.label_plan()
    with pytest.raises(ValueError, match=r"KvResource::length: .*expected .*, got"):
        engine.kv.length(5)
    with pytest.raises(ValueError, match=r"expected .*, got"):
        StepRunner([engine.attention])
    with pytest.raises(ValueError, match=r"StepRunner: resources: .*, got libmla\.LatentPool"):
        StepRunner([engine.pool])


def test_scratch_shared_by_all_plans():
    engine = Engine(Framework("numpy"))
    options = {"num_heads": HEADS, "sm_scale": SCALE, "limits": Limits(max_tokens=64)}
    needed = AttentionResource.scratch_bytes(engine.kv, **options)
    memory = np.zeros(needed + 64, np.uint8)
    start = -memory.ctypes.data % 64
    with pytest.raises(ValueError, match=r"scratch.*expected .*, got"):
        AttentionResource(engine.kv, **options, scratch=memory[start : start + needed - 1])
    lent = AttentionResource(engine.kv, **options, scratch=memory[start : start + needed])
    assert (
        lent.kernel
        == libmla.supports(
            libmla.Geometry(
                num_heads=HEADS,
                kv_lora_rank=RANK,
                qk_rope_head_dim=ROPE,
                page_size=4,
                dtype="fp32",
            )
        ).kernel
    )


def test_compiled_whole(torch_framework):
    torch = pytest.importorskip("torch")
    engine = Engine(torch_framework)
    engine.kv.open(1)
    step = engine.step(Segment(1, 3))
    assert engine.runner.admit(step)
    engine.runner.plan(step)
    q = torch.randn(3, HEADS, RANK + ROPE, device=torch_framework.device)
    rows = torch.randn(3, RANK + ROPE, device=torch_framework.device)

    def layer(q, rows):
        engine.kv.write(0, rows[:, :RANK] * 2, rows[:, RANK:])
        return engine.attention.run(q_nope=q[..., :RANK], q_pe=q[..., RANK:], layer=0) + 1

    expected = layer(q, rows)
    libmla.to_torch(engine.pool.layer(0)).zero_()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, rows), expected)
    assert torch.equal(libmla.to_torch(engine.pool.layer(0))[0, :3, RANK:], rows[:, RANK:])

    slots = torch.tensor([0, 1, 2], device=torch_framework.device)

    def append(rows):
        engine.pool.append(1, slots, rows[:, :RANK], rows[:, RANK:])

    torch.compile(append, fullgraph=True, backend="aot_eager")(rows)
    assert torch.equal(libmla.to_torch(engine.pool.layer(1))[0, :3], rows)
