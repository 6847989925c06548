"""Every operator that draws on the CPU draws from the generator of its thread; the others pass nothing of ours."""

import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune.blocks import engine
from hydra_tune.randomness import RandomState, drawing_from
from hydra_tune.randomness.operators import drawing_operators

aten = torch.ops.aten
GIVEN = torch.linspace(0.1, 0.9, 24).view(4, 6)
ONES = torch.ones(4, 6)
QKV = torch.randn(3, 2, 2, 4, 8, generator=torch.Generator().manual_seed(0))
LAYERS = {name: getattr(nn, name)(6, 6, 2, dropout=0.5) for name in ("LSTM", "GRU")}
LAYERS |= {f"rnn_{kind}": nn.RNN(6, 6, 2, kind, dropout=0.5) for kind in ("tanh", "relu")}
SEQUENCE = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(1))
PACKED = nn.utils.rnn.pack_sequence([SEQUENCE[0], SEQUENCE[1][:1]])


def out(*size, dtype=torch.float32):
    return torch.empty(size, dtype=dtype)


IN_PLACE = {
    name: lambda name=name, a=arguments: getattr(aten, name)(GIVEN.clone(), *a)
    for name, arguments in {
        "bernoulli_": (0.5,), "cauchy_": (), "exponential_": (), "geometric_": (0.5,), "log_normal_": (), "normal_": (),
        "uniform_": (), "random_": (), "alpha_dropout_": (0.5, True), "dropout_": (0.5, True),
        "feature_alpha_dropout_": (0.5, True), "feature_dropout_": (0.5, True), "rrelu_": (0.1, 0.3, True),
    }.items()
}  # fmt: skip
FUNCTIONAL = {
    name: lambda name=name, a=arguments: getattr(aten, name)(GIVEN, *a)
    for name, arguments in {
        "cauchy": (), "exponential": (), "geometric": (0.5,), "log_normal": (), "normal_functional": (), "uniform": (),
        "random": (), "alpha_dropout": (0.5, True), "dropout": (0.5, True), "feature_alpha_dropout": (0.5, True),
        "feature_dropout": (0.5, True), "rrelu": (0.1, 0.3, True), "poisson": (),
        "_standard_gamma": (), "_sample_dirichlet": (), "rand_like": (), "randn_like": (), "bernoulli": (),
        "multinomial": (3,),
    }.items()
}  # fmt: skip
OTHERS = {
    "bernoulli_.Tensor": lambda: ONES.clone().bernoulli_(GIVEN),
    "bernoulli.Tensor": lambda: aten.bernoulli.Tensor(ONES, GIVEN),
    "bernoulli.Tensor_out": lambda: aten.bernoulli.Tensor_out(ONES, GIVEN, out=out(4, 6)),
    "bernoulli.float_out": lambda: aten.bernoulli.float_out(ONES, 0.5, out=out(4, 6)),
    "bernoulli.out": lambda: torch.bernoulli(GIVEN, out=out(4, 6)),
    "bernoulli.p": lambda: torch.bernoulli(ONES, 0.5),
    "binomial": lambda: torch.binomial(9 * ONES, GIVEN),
    "multinomial.out": lambda: torch.multinomial(GIVEN, 3, out=out(4, 3, dtype=torch.int64)),
    "multinomial, one": lambda: torch.multinomial(GIVEN, 1),
    "multinomial, replaced": lambda: torch.multinomial(GIVEN, 30, True),
    "normal.Tensor_Tensor": lambda: torch.normal(ONES, GIVEN),
    "normal.Tensor_Tensor_out": lambda: torch.normal(ONES, GIVEN, out=out(4, 6)),
    "normal.Tensor_float": lambda: torch.normal(GIVEN, 2.0),
    "normal.Tensor_float_out": lambda: torch.normal(GIVEN, 2.0, out=out(4, 6)),
    "normal.float_Tensor": lambda: torch.normal(2.0, GIVEN),
    "normal.float_Tensor_out": lambda: torch.normal(2.0, GIVEN, out=out(4, 6)),
    "normal.float_float": lambda: torch.normal(1.0, 2.0, (4, 6)),
    "normal.float_float_out": lambda: torch.normal(1.0, 2.0, (4, 6), out=out(4, 6)),
    "rand": lambda: torch.rand(5, 3),
    "rand.out": lambda: torch.rand(5, 3, out=out(5, 3)),
    "rand.generator": lambda: torch.rand(5, generator=torch.default_generator),
    "rand.generator_out": lambda: torch.rand(5, generator=torch.default_generator, out=out(5)),
    "randn": lambda: torch.randn(5, 4),
    "randn.out": lambda: torch.randn(5, 4, out=out(5, 4)),
    "randn.generator": lambda: torch.randn(5, generator=torch.default_generator),
    "randn.generator_out": lambda: torch.randn(5, generator=torch.default_generator, out=out(5)),
    "randint": lambda: torch.randint(9, (5,)),
    "randint.low": lambda: torch.randint(2, 9, (5,)),
    "randint.out": lambda: torch.randint(9, (5,), out=out(5)),
    "randint.low_out": lambda: torch.randint(2, 9, (5,), out=out(5)),
    "randint_like": lambda: torch.randint_like(GIVEN, 9),
    "randint_like.low_dtype": lambda: torch.randint_like(GIVEN, 2, 9),
    "randint_like.Tensor": lambda: torch.randint_like(GIVEN, torch.tensor(9)),
    "randperm": lambda: torch.randperm(20),
    "randperm.out": lambda: torch.randperm(20, out=out(20, dtype=torch.int64)),
    "randperm.generator": lambda: torch.randperm(20, generator=torch.default_generator),
    "random_.to": lambda: out(5).random_(9),
    "random_.from": lambda: out(5).random_(2, 9),
    "rrelu_with_noise": lambda: aten.rrelu_with_noise(-GIVEN, out(4, 6), 0.1, 0.3, True),
    "rrelu_with_noise.out": lambda: aten.rrelu_with_noise.out(-GIVEN, out(4, 6), 0.1, 0.3, True, out=out(4, 6)),
    "rrelu_with_noise_": lambda: aten.rrelu_with_noise_(-GIVEN, out(4, 6), 0.1, 0.3, True),
    "rrelu_with_noise_functional": lambda: aten.rrelu_with_noise_functional(-GIVEN, out(4, 6), 0.1, 0.3, True)[0],
    "native_dropout": lambda: aten.native_dropout(GIVEN, 0.5, True)[0],
    "attention": lambda: functional.scaled_dot_product_attention(*QKV, dropout_p=0.5),
    "attention, in parts": lambda: aten._scaled_dot_product_attention_math(*QKV, None, 0.5)[0],
    **{name: lambda layer=layer: layer(SEQUENCE)[0].detach() for name, layer in LAYERS.items()},
    **{f"{name}, packed": lambda layer=layer: layer(PACKED)[0].data.detach() for name, layer in LAYERS.items()},
    "half precision": lambda: torch.rand(7, dtype=torch.float16),
    "complex": lambda: torch.randn(7, dtype=torch.complex64),
    "many": lambda: torch.randn(70_000),
    "none": lambda: torch.randn(0),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr().normal_().values(),
    "nested": lambda: functional.dropout(torch.nested.nested_tensor([ONES, ONES[:2]]), 0.5).to_padded_tensor(0.0),
    "gumbel": lambda: functional.gumbel_softmax(GIVEN),
    "fractional pooling": lambda: functional.fractional_max_pool2d(GIVEN.view(1, 1, 4, 6), 2, output_size=2),
    "low rank": lambda: torch.svd_lowrank(GIVEN, 2)[1],
    "truncated": lambda: nn.init.trunc_normal_(out(5)),
    "orthogonal": lambda: nn.init.orthogonal_(out(3, 3)),
    "a layer": lambda: nn.Linear(3, 3).weight.detach(),
    "a sampler": lambda: torch.tensor(list(torch.utils.data.RandomSampler(range(9)))),
    "Sobol's": lambda: torch.quasirandom.SobolEngine(2, scramble=True).draw(3),
    "gamma": lambda: torch.distributions.Gamma(1.0, 1.0).sample((3,)),
    "vmap": lambda: torch.vmap(lambda x: functional.dropout(x, 0.5), randomness="different")(GIVEN),
    "vmap, the same": lambda: torch.vmap(lambda x: functional.dropout(x, 0.5), randomness="same")(GIVEN),
    "functional gradient": lambda: torch.func.grad(lambda x: functional.dropout(x, 0.5).sum())(GIVEN),
}  # fmt: skip
DRAWS = IN_PLACE | FUNCTIONAL | OTHERS


def in_trial(draw):
    with drawing_from(RandomState(0)):
        torch.manual_seed(7)
        return draw()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", DRAWS)
def test_a_trials_generator_gives_what_the_default_one_gives(name, without):
    draw = DRAWS[name]
    with without():
        torch.manual_seed(7)
        expected = [draw() for _ in range(3)], torch.rand(2)
        before = torch.default_generator.get_state()
        found = in_trial(lambda: ([draw() for _ in range(3)], torch.rand(2)))
    assert all(map(torch.equal, found[0], expected[0]))
    assert torch.equal(found[1], expected[1]), "the generator has gone on as far"
    assert torch.equal(torch.default_generator.get_state(), before), "the process's generator is left alone"


CALLED_BY_OTHERS = {"lstm", "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention"}
DRAWS_NOTHING = {
    "_fused_sdp_choice": "names a kernel",
    "_scaled_dot_product_flash_attention_for_cpu": "takes no dropout",
    "_nested_tensor_softmax_with_shape": "is tagged for no reason",
    "_scaled_dot_product_fused_attention_overrideable": "has kernels on other devices",
}


def test_no_operator_that_draws_is_unknown_here():
    """A new PyTorch may have one with a kernel that draws from the default generator by itself."""
    unknown = set()
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        packet = getattr(aten, base, None) if name.startswith("aten::") else None
        operator = None if packet is None else getattr(packet, overload or "default", None)
        if (
            operator is None
            or torch.Tag.nondeterministic_seeded not in operator.tags
            or operator in drawing_operators().values()
        ):
            continue
        has = operator.has_kernel_for_dispatch_key
        if has("CPU") or has("NestedTensorCPU") or has("CompositeImplicitAutograd"):
            unknown.add(base)
    assert unknown - CALLED_BY_OTHERS - {each.partition(".")[0] for each in DRAWS} <= {
        *DRAWS_NOTHING, "_scaled_dot_product_attention_math"
    }  # fmt: skip
    assert len(drawing_operators()) == 28
    assert {str(each).removeprefix("aten.").partition(".")[0] for each in drawing_operators().values()} <= {
        each.partition(".")[0] for each in DRAWS
    }


def test_another_generator_is_the_callers():
    for made in (
        lambda g: torch.rand(5, generator=g), lambda g: torch.multinomial(GIVEN, 2, generator=g),
        lambda g: torch.poisson(GIVEN, g), lambda g: torch.empty(3).normal_(generator=g),
    ):  # fmt: skip
        expected = made(torch.Generator().manual_seed(3))
        found, nothing = in_trial(lambda made=made: (made(torch.Generator().manual_seed(3)), torch.rand(2)))
        torch.manual_seed(7)
        assert torch.equal(found, expected)
        assert torch.equal(nothing, torch.rand(2))


def test_what_stands_for_the_default_generator_may_be_given():
    for make in (lambda: torch.random.default_generator, lambda: torch.manual_seed(7)):
        torch.manual_seed(7)
        expected = torch.rand(3)
        torch.manual_seed(7)
        assert torch.equal(torch.rand(3, generator=make()), expected)
        assert torch.equal(in_trial(lambda make=make: torch.rand(3, generator=make())), expected)
    assert isinstance(torch.random.default_generator, torch.Generator)


def test_a_copy_of_it_is_a_generator_of_ones_own():
    torch.manual_seed(7)
    clone = torch.random.default_generator.clone_state()
    expected = torch.rand(3)
    assert torch.equal(torch.rand(3, generator=clone), expected)
    assert type(clone) is torch.Generator


def test_backward_and_checkpoint_and_autocast():
    def train():
        torch.manual_seed(7)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True)
        x = torch.randn(2, 3, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.utils.checkpoint.checkpoint(layer, layer(x), use_reentrant=False)
        y.float().square().sum().backward()
        return x.grad, *(p.grad for p in layer.parameters()), torch.rand(1)

    assert all(map(torch.equal, in_trial(train), train()))


@pytest.mark.filterwarnings("ignore")
def test_compiled_for_real():
    """Its graph calls the operators that draw."""
    layer = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))

    def train():
        torch.manual_seed(7)
        layer.zero_grad()
        layer(GIVEN).square().sum().backward()
        return layer[0].weight.grad.clone(), torch.rand(1)

    expected = train()
    layer.compile(backend="aot_eager")
    assert all(map(torch.equal, in_trial(train), expected))
    torch.compiler.reset()


def test_threads_draw_as_each_alone():
    def numbers(seed):
        with drawing_from(RandomState(seed)):
            return [torch.randn(20), functional.dropout(torch.ones(50)), torch.randperm(9)] * 20

    alone = {}
    for seed in range(6):
        alone[seed] = numbers(seed)
    found, start = {}, threading.Barrier(6)

    def work(seed):
        start.wait(10)
        found[seed] = numbers(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for seed in range(6):
        assert all(map(torch.equal, found[seed], alone[seed]))


def test_operators_that_do_not_draw_call_nothing_of_ours():
    called = []
    assert isinstance(torch.autograd.Variable._execution_engine, engine.Engine)
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)

    def profile(frame, event, _):
        if event == "call" and "hydra_tune" in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)

    def compute():
        y = functional.gelu(torch.addmm(x, x, w)).softmax(-1) + x
        y.sum().backward()
        torch.empty(3), torch.zeros(2), torch.arange(5), x.clone().mul_(2).to(torch.float64)

    with drawing_from(RandomState(0)):
        sys.setprofile(profile)
        try:
            compute()
            assert called == ["run_backward", "_run"], "once a backward"
            torch.rand(2)
            assert len(called) > 2
        finally:
            sys.setprofile(None)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_large_draw_holds_up_no_other_thread():
    """The interpreter's lock is free meanwhile: other trials go on while one makes its model."""
    large, ended, gaps = torch.empty(20_000_000), threading.Event(), []

    def work():
        latest = time.perf_counter()
        while not ended.is_set():
            time.sleep(1e-4)
            now = time.perf_counter()
            gaps.append(now - latest)
            latest = now

    thread = threading.Thread(target=work)
    thread.start()
    start = time.perf_counter()
    large.normal_()
    taken = time.perf_counter() - start
    ended.set()
    thread.join(10)
    assert max(gaps) < 0.8 * taken
