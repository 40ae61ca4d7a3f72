from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import ConfigError
from headway.perf.hardware import ModelShape, NetworkLink, accelerator, model
from headway.perf.latency import fast_sp
from headway.perf.latency.fast_sp import AcceleratorGroup, SpRates
from headway_research.pecsched.fast_sp import attention_flops, printed_fastest

RATES = SpRates.of(accelerator("a100"), 400.0, 0.6, 0.55)


def simple_rates(bytes_per_s: float, **fields: float) -> SpRates:
    """Return round rates, and links without latency."""
    link = NetworkLink(name="simple", bytes_per_s=bytes_per_s, latency_s=0.0, source="", efficiency=1.0)
    return SpRates(linear_flops=1e14, attention_flops=1e14, bandwidth=1e15, inside=link, node=link, **fields)


FREE = simple_rates(1e30, ring_loss=0.0)  # communication costs nothing, kernels lose nothing in a ring
BARE = simple_rates(1e9)
MODELS = {"mistral-7b": 1, "phi-3-14b": 1, "yi-34b": 4, "llama-3-70b": 4}
GROUPS = st.sampled_from([(8, 1), (16, 2), (32, 4)])


def group(name: str, accelerators: int, nodes: int) -> AcceleratorGroup:
    return AcceleratorGroup(accelerators // MODELS[name], nodes, MODELS[name])


@given(st.sampled_from(["mistral-7b", "yi-34b", "llama-3-70b"]), GROUPS, st.integers(1_000, 500_000))
def test_both_forms_do_the_same_arithmetic(name: str, size: tuple[int, int], tokens: int) -> None:
    """Every pair of tokens is attended to once, whoever computes it: without communication the forms tie, at the
    model's own FLOPs. (Phi-3's 10 KV heads do not divide over 8 ranks.)"""
    shape, g = model(name), group(name, *size)
    seconds = [plan.seconds for plan in fast_sp.plans(shape, FREE, g, tokens)]
    flops = shape.linear_flops(tokens) + 2.0 * shape.layers * shape.q_heads * shape.head_dim * tokens**2
    assert seconds == pytest.approx([flops / 1e14 / g.accelerators] * 4, rel=1e-9)


@given(st.sampled_from(sorted(MODELS)), GROUPS, st.integers(1_000, 500_000))
def test_the_choice_is_the_fastest_of_four(name: str, size: tuple[int, int], tokens: int) -> None:
    shape, g = model(name), group(name, *size)
    seconds = [plan.seconds for plan in fast_sp.plans(shape, RATES, g, tokens)]
    assert fast_sp.fastest(shape, RATES, g, tokens).seconds == min(seconds)
    assert fast_sp.plain_ring(shape, RATES, g, tokens).seconds == seconds[0]


@given(st.sampled_from(sorted(MODELS)), GROUPS, st.integers(2_000, 250_000))
def test_longer_prompts_take_more_than_proportionally_long(name: str, size: tuple[int, int], tokens: int) -> None:
    shape, g = model(name), group(name, *size)
    once, twice = (fast_sp.fastest(shape, RATES, g, n).seconds for n in (tokens, 2 * tokens))
    assert 1.0 < twice / once < 4.0


def mlp_crossover(shape: ModelShape) -> int:
    """Tokens an accelerator from which gathering the MLP's weights moves less than gathering activations."""
    g, low, high = AcceleratorGroup(2, 1, 4), 1, 10**6
    while low < high:
        middle = (low + high) // 2
        m, u = (fast_sp.mlp_stage(form, shape, BARE, g, middle * 8).exposed_s for form in fast_sp.FORMS)
        low, high = (low, middle) if u < m else (middle + 1, high)
    return low


@pytest.mark.parametrize(("name", "tokens"), [("yi-34b", 7680), ("llama-3-70b", 10752)])
def test_ulysses_mlp_moves_less_from_three_eighths_of_the_width_on(name: str, tokens: int) -> None:
    """2 s d (T - 1) = 3 d ff (T - 1) / T: s = 3 ff / 2 T. (Printed: 8 d² instead of 3 d ff, so s = 4 d / T.)"""
    assert mlp_crossover(model(name)) == pytest.approx(tokens, abs=1)


@pytest.mark.parametrize(("name", "tokens"), [("yi-34b", 3072), ("llama-3-70b", 3429)])
def test_ulysses_attention_moves_less_from_a_few_thousand_tokens_on(name: str, tokens: int) -> None:
    shape, g = model(name), AcceleratorGroup(2, 1, 4)

    def ulysses_moves_less(s: int) -> bool:
        m, u = (fast_sp.attention_stage(form, shape, BARE, g, s * 8).exposed_s for form in fast_sp.FORMS)
        return u < m

    assert not ulysses_moves_less(tokens - 2)
    assert ulysses_moves_less(tokens + 2)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_printed_formulas_choose_differently(name: str) -> None:
    """As printed, Megatron's attention lacks G / T of its work, so it is chosen at every length; corrected, Ulysses
    wins for long prompts."""
    shape, g = model(name), group(name, 8, 1)
    for tokens in (100_000, 250_000, 500_000):
        assert printed_fastest(shape, RATES, g, tokens).attn == "megatron"
        assert fast_sp.fastest(shape, RATES, g, tokens).attn == "ulysses"
    flops = {form: attention_flops(form, shape, g, 500_000) for form in fast_sp.FORMS}
    assert flops["ulysses"] / flops["megatron"] > 1.9  # the same pairs, counted G / T times


def test_without_tensor_parallelism_megatron_is_a_ring_and_the_mlp_is_local() -> None:
    g = AcceleratorGroup(8, 1, 1)
    forms = {plan.attn: plan.strategy(1) for plan in fast_sp.plans(model("mistral-7b"), RATES, g, 200_000)}
    assert (forms["megatron"].attn, forms["ulysses"].attn) == ("ring", "ulysses")
    assert {strategy.mlp for strategy in forms.values()} == {"local"}


def test_heads_that_do_not_divide_cost_their_padding() -> None:
    shape = model("phi-3-14b")  # 10 KV heads over 8 ranks: two on the fullest
    even = ModelShape(**{f: getattr(shape, f) for f in shape.__struct_fields__} | {"kv_heads": 8})
    g = AcceleratorGroup(8, 1, 1)
    uneven_s = fast_sp.attention_stage("ulysses", shape, RATES, g, 100_000).exposed_s
    assert uneven_s > 1.15 * fast_sp.attention_stage("ulysses", even, RATES, g, 100_000).exposed_s


def test_a_paused_prefill_keeps_five_percent_and_more() -> None:
    """The paper's "usually less than 5% of all KV" is d / (2 N_kv d_h layers): 5.0% to 6.3% for its own models."""
    shares = {}
    for name in MODELS:
        shape = model(name)
        kv, rest = fast_sp.saved_bytes(shape, 100_000, shape.layers)
        assert kv == shape.kv_bytes_per_token * 100_000
        shares[name] = round(rest / kv, 4)
    assert shares == {"mistral-7b": 0.0625, "phi-3-14b": 0.05, "yi-34b": 0.0583, "llama-3-70b": 0.05}


def test_impossible_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="no node empty"):
        AcceleratorGroup(2, 3)
