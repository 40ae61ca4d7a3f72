"""Named mixes of requests, with the source of their numbers; none contains a trace.

Input and output lengths are drawn independently: within one service of the public traces they correlate below 0.11.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.core.errors import ConfigError
from headway.sim.workload.arrivals import ArrivalProcess
from headway.sim.workload.lengths import (
    FixedLengths,
    LengthDistribution,
    LogNormalLengths,
    QuantileLengths,
    UniformLengths,
)
from headway.sim.workload.trace_request import TraceRequest

_SHARES = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)


def _quantiles(*tokens: float) -> QuantileLengths:
    """Return a law from the minimum, P1, P5, P10, P25, P50, P75, P90, P95, P99 and the maximum."""
    return QuantileLengths(tuple(zip(_SHARES, tokens, strict=True)))


SHAREGPT_IN = _quantiles(1, 12, 29, 74, 580, 1730, 3734, 5696, 6563, 7433, 8141)
SHAREGPT_OUT = _quantiles(2, 6, 44, 84, 228, 415, 628, 834, 920, 998, 1024)
AZURE_CONV_IN = _quantiles(2, 29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050)
AZURE_CONV_OUT = _quantiles(7, 16, 41, 54, 85, 129, 395, 424, 451, 601, 1000)
# Below P40 the figure shows outputs of "a few tokens": 1 here.
AZURE_CODE_2024_IN = _quantiles(1, 9, 124, 315, 922, 1916, 3326, 6120, 7663, 7681, 7690)
AZURE_CODE_2024_OUT = _quantiles(1, 1, 1, 1, 1, 6, 17, 39, 72, 261, 5000)
MOONCAKE_IN = _quantiles(891, 894, 901, 974, 2414, 7284, 15694, 27991, 40369, 89868, 124847)
MOONCAKE_OUT = _quantiles(1, 3, 10, 24, 155, 356, 476, 606, 712, 1168, 2000)
SWE_IN = LogNormalLengths(14.108, 1.9897, 100_000, 1_000_000)
SWE_2M_IN = LogNormalLengths(14.801, 1.9897, 200_000, 2_000_000)
SWE_128K_IN = LogNormalLengths(14.4443, 3.0, 128_000, 1_000_000)
SWE_OUT = LogNormalLengths(6.25, 0.3469)
# Azure's two services of 2024 together, up to their 95th percentile: coding up to its P90, conversations up to P98.
_CODE_2024_P90 = QuantileLengths(tuple((s / 0.9, t) for s, t in AZURE_CODE_2024_IN.points[:8]))
_CONV_2024_P98 = QuantileLengths(
    tuple(
        (share / 0.98, tokens)
        for share, tokens in ((0.0, 20), (0.01, 80), (0.05, 204), (0.1, 293), (0.25, 541), (0.5, 914), (0.75, 2341),
                              (0.9, 3761), (0.95, 4860), (0.98, 5889))
    )
)  # fmt: skip
AZURE_CONV_2024_OUT = _quantiles(1, 1, 1, 1, 11, 33, 100, 333, 388, 682, 1500)


@dataclass(frozen=True)
class MixPart:
    """One kind of request in a mix."""

    share: float
    """Weight among the kinds; weights need not sum to one."""
    klass: str
    prompt: LengthDistribution
    output: LengthDistribution


@dataclass(frozen=True)
class WorkloadPreset:
    """A mix of kinds of requests."""

    about: str
    """The workload that it stands for."""
    fitted: str
    """Source of its numbers."""
    parts: tuple[MixPart, ...]

    def draw(self, rng: np.random.Generator, arrivals: ArrivalProcess, count: int) -> list[TraceRequest]:
        """Draw `count` requests: times, then kinds, then lengths, all from `rng`."""
        times = arrivals.times(rng, count)
        shares = np.array([part.share for part in self.parts])
        kinds = rng.choice(len(self.parts), count, p=shares / shares.sum())
        # lengths of every kind for every request, so that the draws of one kind do not depend on the others' shares
        prompts = np.stack([part.prompt.sample(rng, count) for part in self.parts])
        outputs = np.stack([part.output.sample(rng, count) for part in self.parts])
        return [
            TraceRequest(float(time), int(prompts[kind, i]), int(outputs[kind, i]), klass=self.parts[kind].klass)
            for i, (time, kind) in enumerate(zip(times, kinds.tolist(), strict=True))
        ]


def simple(prompt: LengthDistribution, output: LengthDistribution, klass: str = "") -> WorkloadPreset:
    """Return a mix of one kind, from two distributions."""
    return WorkloadPreset("one kind of request", "given", (MixPart(1.0, klass, prompt, output),))


_SHAREGPT = "quantiles of 30,731 ShareGPT conversations cut at 8K (the set of Sarathi-Serve and Medha)"
_SWE = "prompts: truncated log-normal, exact in the published P50 393K and P90 839K; outputs: P50 518, P90 808"
_TETRIS = "truncated log-normal with the published minimum, maximum and mean; the cut leaves out 1% of the law"

PRESETS: dict[str, WorkloadPreset] = {
    "sharegpt-like": WorkloadPreset(
        "chats of up to 8K tokens", _SHAREGPT, (MixPart(1.0, "short", SHAREGPT_IN, SHAREGPT_OUT),)
    ),
    "azure-conv-like": WorkloadPreset(
        "Azure's conversation service, 2023",
        "quantiles of 19,366 requests of one hour",
        (MixPart(1.0, "short", AZURE_CONV_IN, AZURE_CONV_OUT),),
    ),
    "azure-code-2024-documents": WorkloadPreset(
        "Azure's coding service, 2024, and 1% documents of 200K tokens",
        "quantiles read off the published figures of 16.8 million requests of May 2024; documents: given",
        (
            MixPart(0.99, "short", AZURE_CODE_2024_IN, AZURE_CODE_2024_OUT),
            MixPart(0.01, "long", FixedLengths(200_000), FixedLengths(500)),
        ),
    ),
    "mooncake-like": WorkloadPreset(
        "Kimi's conversations: prompts up to 125K",
        "quantiles of 7,851 requests of 40 minutes",
        (MixPart(1.0, "", MOONCAKE_IN, MOONCAKE_OUT),),
    ),
    "medha-swe": WorkloadPreset("Medha's long requests, 100K to 1M", _SWE, (MixPart(1.0, "long", SWE_IN, SWE_OUT),)),
    "medha-swe-128k": WorkloadPreset(
        "Medha's long requests in its capacity evaluation, 128K to 1M",
        "prompts: truncated log-normal, P50 393K and P90 836K (published: 393K, 839K); outputs as medha-swe",
        (MixPart(1.0, "long", SWE_128K_IN, SWE_OUT),),
    ),
    "medha-swe-2m": WorkloadPreset(
        "Medha's long requests scaled to 2M tokens (its 3D experiments)",
        f"{_SWE}; prompts twice as long, 200K to 2M",
        (MixPart(1.0, "long", SWE_2M_IN, SWE_OUT),),
    ),
    "medha-mix": WorkloadPreset(
        "Medha's evaluation: chats and 5% long requests",
        f"chats: {_SHAREGPT}; long: {_SWE}",
        (MixPart(0.95, "short", SHAREGPT_IN, SHAREGPT_OUT), MixPart(0.05, "long", SWE_IN, SWE_OUT)),
    ),
    "pecsched-mix": WorkloadPreset(
        "PecSched's rewriting: Azure's conversations, those above P95 replaced by 100K to 500K",
        "quantiles up to P95 as in azure-conv-like; 5% uniform 100K to 500K, the paper's rule; outputs unchanged",
        (
            MixPart(
                0.95,
                "short",
                QuantileLengths(tuple((s / 0.95, t) for s, t in AZURE_CONV_IN.points[:9])),
                AZURE_CONV_OUT,
            ),
            MixPart(0.05, "long", UniformLengths(100_000, 500_000), AZURE_CONV_OUT),
        ),
    ),
    "pecsched-short": WorkloadPreset(
        "the short requests of pecsched-mix",
        "quantiles up to P95 as in azure-conv-like",
        (
            MixPart(
                1.0, "short", QuantileLengths(tuple((s / 0.95, t) for s, t in AZURE_CONV_IN.points[:9])), AZURE_CONV_OUT
            ),
        ),
    ),
    "pecsched-short-2024": WorkloadPreset(
        "PecSched's short requests from Azure's trace of 2024, coding and conversations together",
        "quantiles read off the published figures up to P95; services by their request counts, 16.8 and 27.3 million",
        (
            MixPart(0.343, "short", _CODE_2024_P90, AZURE_CODE_2024_OUT),
            MixPart(0.607, "short", _CONV_2024_P98, AZURE_CONV_2024_OUT),
        ),
    ),
    "pecsched-long": WorkloadPreset(
        "the long requests of pecsched-mix",
        "uniform 100K to 500K, the paper's rule; outputs as in azure-conv-like",
        (MixPart(1.0, "long", UniformLengths(100_000, 500_000), AZURE_CONV_OUT),),
    ),
    **{
        f"tetris-{name}": WorkloadPreset(
            f"Tetris's {name} trace",
            f"{_TETRIS}; outputs are not published: Mooncake's stand in",
            (MixPart(1.0, "", LogNormalLengths(mu, sigma, low, high), MOONCAKE_OUT),),
        )
        for name, mu, sigma, low, high in (
            ("short", 9.8665, 0.6845, 4_000, 95_000),
            ("medium", 10.1108, 0.7453, 8_000, 142_000),
            ("long", 10.5494, 0.6786, 16_000, 190_000),
        )
    },
}


def preset(name: str) -> WorkloadPreset:
    """Return a preset by name. Raises ConfigError, which lists the names."""
    if name not in PRESETS:
        raise ConfigError(f"unknown workload preset {name!r}; known are {', '.join(PRESETS)}")
    return PRESETS[name]
