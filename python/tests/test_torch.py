import libmla
import pytest
from frameworks import float64
from libmla import Limits, PagedAttention
from problems import serving_problem
from test_attention import SMALL

torch = pytest.importorskip("torch")


def planned(framework):
    problem = serving_problem(SMALL)
    attention = PagedAttention(
        geometry=SMALL,
        num_pages=problem.num_pages,
        device=framework.device,
        limits=Limits(max_rows=8, max_tokens=64),
    )
    attention.plan(**problem.indices(), sm_scale=problem.sm_scale)
    q_nope, q_pe, cache = problem.tensors(framework)
    return attention, q_nope, q_pe, cache[..., :16], cache[..., 16:]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(torch_framework, backend):
    attention, *tensors = planned(torch_framework)

    def layer(q_nope, q_pe, ckv, kpe):
        lse = torch.empty(q_nope.shape[:2], device=q_nope.device)
        out = attention.run(q_nope=q_nope * 2, q_pe=q_pe, ckv=ckv, kpe=kpe, lse=lse)
        return libmla.merge_states([(out, lse), (out, lse)]) + 1

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    assert torch.equal(compiled(*tensors), layer(*tensors))


def test_operators_are_well_formed(torch_framework):
    attention, q_nope, q_pe, ckv, kpe = planned(torch_framework)
    out, lse = torch.empty_like(q_nope), torch.empty(q_nope.shape[:2], device=q_nope.device)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.libmla.attention_run,
        (attention._key, q_nope, q_pe, ckv, kpe, out, lse),
        test_utils=checks,
    )
    torch.library.opcheck(
        torch.ops.libmla.merge_states, ([q_nope], [lse], out, None, 0), test_utils=checks
    )


def test_index_arrays_on_the_device(torch_framework):
    attention, q_nope, q_pe, ckv, kpe = planned(torch_framework)
    expected = attention.run(q_nope=q_nope, q_pe=q_pe, ckv=ckv, kpe=kpe)
    problem = serving_problem(SMALL)
    indices = {
        name: torch_framework.from_numpy(values) for name, values in problem.indices().items()
    }
    attention.plan(**indices, sm_scale=problem.sm_scale)
    again = attention.run(q_nope=q_nope, q_pe=q_pe, ckv=ckv, kpe=kpe)
    assert torch.equal(expected, again)
    assert float64(again).any()
