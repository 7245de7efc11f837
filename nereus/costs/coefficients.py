"""Coefficients of the cost model's terms: products of few factors, fitted to public step times, with their deviations.

A coefficient is the product of the factors that `factor_names` lists for a term: one for the term, and where it
matters one for the device's family, one for fp8, one for RL systems. FACTORS were fitted by `nereus accuracy --fit`
on public tables (training steps, decode times, RL steps: facts, costs, 4), kind after kind, each fit holding the
factors of the kinds before. Device rates are in nereus.costs.rates and were not fitted to these tables. A factor that is
not listed is 1.

What a factor above 1 says: `gemm` 1.3: long runs clock lower than micro-benchmarks, backward products are slower;
`attention@h100`: training kernels before FlashAttention 3; `memory`: kernels that are not fused; `rl.generate`:
engines in RL systems against engines alone; `pp`, `tp`, `dp` below 1: part of it is hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal

from nereus.costs.calibrate import Prior

Kind = Literal["train", "generate", "rl"]

ARITHMETIC_TERMS = frozenset({"gemm", "recompute", "head"})
GENERATION_TERMS = frozenset(
    {
        "prefill",
        "decode_gemm",
        "decode_experts",
        "decode_cache",
        "decode_tp",
        "decode_launch",
        "engine_step",
        "engine_token",
    }
)
FRAMEWORK_TERMS = frozenset({"sync", "offload", "step_framework", "sample_framework"})
FAMILY = {
    "a100-40": "a100",
    "a100-pcie": "a100",
    "a800": "a100",
    "h200": "h100",
    "h800": "h100",
    "h100-pcie": "h100",
    "gb200": "b200",
}
OWN_SHARE, COMMON_SHARE = 0.2, 0.15
"""Deviations of a job's coefficients from these, as shares: each its own, and one common to all."""
NOISE_SHARE: dict[Kind, float] = {"train": 0.08, "generate": 0.08, "rl": 0.15}
"""A row's own misfit, as a share. When a group of rows is held out, half of what is left is common to the group and a
layout's own part is 4 to 8 %. Three versions of one RL system differ by 12 % on one layout (NeMo-RL 0.4 to 0.6, Qwen3-235B).
"""

FACTORS: dict[str, float] = {
    "attention": 1.11,
    "attention@a100": 0.655,
    "attention@b200": 1.044,
    "attention@h100": 1.518,
    "bubble": 0.8,
    "dp": 0.436,
    "gemm": 1.306,
    "gemm@a100": 0.824,
    "gemm@b200": 1.316,
    "gemm@h100": 1.015,
    "launch": 1.361,
    "memory": 1.898,
    "optimizer": 0.983,
    "pp": 0.487,
    "step": 1.686,
    "tp": 0.762,
    "cp": 0.996,
    "ep": 1.761,
    "experts": 1.888,
    "fp8.gemm": 0.927,
    "decode_cache": 0.807,
    "decode_gemm": 1.181,
    "decode_launch": 0.254,
    "decode_tp": 0.782,
    "engine_step": 0.426,
    "engine_token": 2.034,
    "fp8.prefill": 1.202,
    "prefill": 1.151,
    "gemm@mi300x": 1.107,
    "offload": 1.096,
    "rl.generate": 1.913,
    "rl.train": 1.012,
    "sample_framework": 1.07,
    "step_framework": 1.139,
    "sync": 11.239,
}
FORMS_TRIED = {"training": 10, "decode": 9, "rl": 9, "memory": 2}
"""Model forms whose errors were looked at before these were kept (which terms share a factor, what a term counts)."""


@cache
def factor_names(term: str, device: str, precision: str, kind: Kind) -> tuple[str, ...]:
    """The factors whose product is a term's coefficient on a device, in a precision ("bf16" or "fp8")."""
    if term == "host":
        return ()  # a rate of the machine; below 1 / AHEAD_SHARE times the others, so that faster kernels never cost
    if term in FRAMEWORK_TERMS:
        return (term,)
    if term in GENERATION_TERMS:
        names = ["decode_gemm" if term == "decode_experts" else term]
        if term == "prefill" and precision == "fp8":
            names.append("fp8.prefill")
        return (*names, "rl.generate") if kind == "rl" else tuple(names)
    names = [term]
    family = FAMILY.get(device, device)
    if term in ARITHMETIC_TERMS:
        names = ["gemm", f"gemm@{family}"]
    elif term == "experts":
        names.append(f"gemm@{family}")
    elif term == "attention":
        names.append(f"attention@{family}")
    if precision == "fp8" and (term in ARITHMETIC_TERMS or term == "experts"):
        names.append("fp8.gemm")
    if kind == "rl":
        names.append("rl.train")
    return tuple(names)


def coefficient(
    term: str, device: str, precision: str = "bf16", kind: Kind = "train", factors: Mapping[str, float] = FACTORS
) -> float:
    """The coefficient of a term: the product of its factors."""
    product = 1.0
    for name in factor_names(term, device, precision, kind):
        product *= factors.get(name, 1.0)
    return product


def prior_for(
    terms: Iterable[str],
    device: str,
    precision: str = "bf16",
    kind: Kind = "train",
    factors: Mapping[str, float] = FACTORS,
) -> Prior:
    """What is believed of these terms' coefficients before a job on this device ran."""
    return Prior(
        means={term: coefficient(term, device, precision, kind, factors) for term in terms},
        own_share=OWN_SHARE,
        common_share=COMMON_SHARE,
        noise_share=NOISE_SHARE[kind],
    )


EAGER: dict[str, float] = {
    "launch": 1.5,
    "step": 4.5,
    "optimizer": 3.0,
    "decode_launch": 5.0,
    "engine_step": 6.5,
    "decode_tp": 1.8,
    "sync_tensors": 1.3,
    "step_framework": 0.5,
    "sample_framework": 0.7,
    "first_use": 0.7,
}
"""Coefficients of a job of eager processes on probed slots, where they are not 1: what Megatron's and vLLM's Python takes
beside the kernels that the probe times. Set by hand to two runs of the quickstart on a machine of 2 cores (their first
steps under each plan are not in them); wide priors stand for what another machine makes of them."""
EAGER_OWN_SHARE, EAGER_COMMON_SHARE, EAGER_NOISE_SHARE, EAGER_KEPT_SHARE = 0.4, 0.25, 0.06, 0.99


def eager_prior(terms: Iterable[str]) -> Prior:
    """What is believed of these terms' coefficients on a probed machine, before its job ran."""
    return Prior(
        means={term: EAGER.get(term, 1.0) for term in terms},
        own_share=EAGER_OWN_SHARE,
        common_share=EAGER_COMMON_SHARE,
        noise_share=EAGER_NOISE_SHARE,
        kept_share=EAGER_KEPT_SHARE,
    )
