import libmla
import pytest
from frameworks import Framework, float64
from libmla import Limits, PagedAttention
from problems import serving_problem
from test_attention import SMALL

torch = pytest.importorskip("torch")

from libmla.compat.flash_mla import flash_mla_with_kvcache  # noqa: E402
from world import World, flash_mla_call, flashinfer_wrapper, mstar_wrapper  # noqa: E402


def planned(framework, problem=None):
    problem = problem or serving_problem(SMALL)
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


def calls_of(world):
    """How a compiled function calls an object of each class, and with what."""
    queries = (world.q_nope, world.q_pe)
    return {
        "PagedAttention": (attend, (world.attention, *queries, world.ckv, world.kpe)),
        "AttentionResource": (attend_to_layer, (world.resource, *queries)),
        "KvResource": (write, (world.kv, world.ckv_rows, world.kpe_rows)),
        "flashinfer": (wrapped, (flashinfer_wrapper(), *queries, world.ckv, world.kpe)),
        "mstar": (wrapped, (mstar_wrapper(), *queries, torch.zeros(5, 4, 24))),
        "flash_mla": (flash_mla_with_kvcache, tuple(flash_mla_call(world).values())),
    }


def attend(attention, q_nope, q_pe, ckv, kpe):
    return attention.run(q_nope=q_nope, q_pe=q_pe, ckv=ckv, kpe=kpe)


def attend_to_layer(resource, q_nope, q_pe):
    return resource.run(q_nope=q_nope, q_pe=q_pe, layer=0)


def write(kv, ckv, kpe):
    kv.write(0, ckv, kpe)


def wrapped(wrapper, *tensors):
    return wrapper.run(*tensors)


@pytest.mark.parametrize("name", calls_of(World()))
def test_compiled_twice_at_most_whatever_the_number_of_objects(name):
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    worlds = [World() for _ in range(5)]
    for world in worlds:
        world.q_nope.normal_()
        world.ckv.normal_()
    torch.compiler.reset()
    for function, arguments in (calls_of(world)[name] for world in worlds):
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        result, expected = compiled(*arguments), function(*arguments)
        if result is not None:
            assert all(map(torch.equal, result, expected))
    assert len(compilations) <= 2


@pytest.mark.parametrize("name", calls_of(World()))
def test_a_compiled_input_that_asks_for_a_gradient_is_refused(name):
    function, arguments = calls_of(World())[name]
    asking = [
        argument.detach().requires_grad_()
        if isinstance(argument, torch.Tensor) and argument.is_floating_point()
        else argument
        for argument in arguments
    ]
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match=r": expected no gradient .*, got"):
        torch.compile(function, backend="aot_eager")(*asking)
    torch.compiler.reset()
    with torch.inference_mode():
        torch.compile(function, fullgraph=True, backend="aot_eager")(*asking)


def test_compiled_by_inductor():
    torch.compiler.reset()
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2))
    except Exception as error:  # of several kinds
        pytest.skip(f"Inductor compiles nothing here: {error}")

    def layer(attention, q_nope, q_pe, ckv, kpe):
        lse = torch.empty(q_nope.shape[:2])
        out = attention.run(q_nope=q_nope * 2, q_pe=q_pe, ckv=ckv, kpe=kpe, lse=lse)
        return libmla.merge_states([(out, lse), (out, lse)]) + 1

    compiled = torch.compile(layer, fullgraph=True)
    for seed in range(3):
        problem = serving_problem(SMALL, seed)
        arguments = planned(Framework("torch"), problem)
        torch.testing.assert_close(compiled(*arguments), layer(*arguments))


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
