"""The `workload` of a scenario file, a plan's question or an accelerator file, validated; `sim.build` draws it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from headway.core.file_sections import Count, FileSection, Positive, Seconds
from headway.sim.workload.generate import PRESETS
from headway.sim.workload.traces import MOST_REQUESTS, class_name

Requests = Annotated[Count, Field(le=MOST_REQUESTS)]


class SessionsSection(FileSection):
    """A trace's sessions, closed: the next request of a thread comes after the answer before it and the think time."""

    count: Count | None = Field(default=None, description="sessions, the first of the trace; null: all")
    turns: Count | None = Field(default=None, description="requests of a session, the first; null: all")
    think: Annotated[float, Field(ge=0)] = Field(default=1.0, description="think times of the trace times this")
    max_think_s: Seconds | None = Field(default=None, description="longer think times are cut to this, in seconds")


def _as_text(value: object) -> object:
    """Return a bare number as the length specification that it means."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Lengths = Annotated[str, BeforeValidator(_as_text)]


class MixSection(FileSection):
    """One kind of request. Lengths: 200 or fixed:200, uniform:100-500, lognormal:median=…,p90=… (or mu, sigma; min,
    max), empirical:FILE, mix:0.95*SPEC+0.05*SPEC; k is 1,000 and K 1,024, as everywhere."""

    share: Positive = 1.0
    klass: Annotated[str, AfterValidator(class_name)] = Field(default="", alias="class")
    prompt: Lengths
    output: Lengths

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class WorkloadSection(FileSection):
    """Exactly one of preset, trace and mix."""

    preset: str | None = Field(default=None, description=f"a named mix: {', '.join(PRESETS)}")
    trace: str | tuple[str, ...] | None = Field(
        default=None,
        description="a trace file or a server's event log, or several that ran together; own arrival times unless "
        "`arrivals` is given",
    )
    mix: tuple[MixSection, ...] | None = Field(default=None, description="kinds of requests with shares and lengths")
    arrivals: Literal["poisson", "gamma", "constant", "trace", "at-once"] | None = Field(
        default=None, description="null: the trace's own, poisson otherwise; at-once: all at time 0"
    )
    qps: Positive | None = Field(
        default=None, description="requests per second; a trace's own times are stretched to it"
    )
    cv: Positive = Field(default=2.0, description="coefficient of variation of gamma arrivals")
    requests: Requests | None = Field(default=None, description="how many; null: as many as arrive in the window")
    draws: Requests | None = Field(
        default=None,
        description="requests drawn before the window cuts them; with the same number, loads differ in arrival times "
        "only (a sweep of qps does that); null: enough for the window",
    )
    concurrency: Count | None = Field(
        default=None,
        description="users, each of which sends its next request when it has the answer to the one before; in place of "
        "arrival times",
    )
    sessions: SessionsSection | None = Field(
        default=None,
        description="play the trace's sessions closed; they start by `arrivals` (poisson) at `qps` sessions a second",
    )
    slice: str | None = Field(default=None, description="part of a trace: 100:400 (requests) or 60s:120s")
    long_threshold: Count = Field(
        default=8192, description="prompts above this are of class long where no class is given"
    )
    long_share: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="share of requests that are replaced by requests of `long_preset`"
    )
    long_preset: str = Field(default="medha-swe", description="what they are replaced by")
    long_rule: Literal["p95-uniform", "linear-4096"] | None = Field(
        default=None,
        description="PecSched's rewriting of the longest prompts to 100K to 500K: those above the 95th percentile, "
        "uniformly; or those of 4,096 and more, in proportion",
    )
    max_prompt: Count | None = Field(default=None, description="longer prompts are cut to this")
    max_output: Count | None = Field(default=None, description="longer outputs are cut to this")

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadSection:
        given = [name for name in ("preset", "trace", "mix") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of preset, trace and mix, not {' and '.join(given) or 'none'}")
        if not getattr(self, given[0]):
            raise ValueError(f"`{given[0]}` is empty: fill it in, or give another of preset, trace and mix")
        if self.arrivals == "trace" and self.trace is None:
            raise ValueError("`arrivals: trace` needs a trace")
        if self.concurrency and (self.qps or self.arrivals or self.sessions):
            raise ValueError("`concurrency` takes the place of qps, arrivals and sessions: leave those out")
        others = (self.slice, self.requests, self.long_rule, self.long_share)
        if self.sessions is not None and (self.trace is None or self.arrivals == "trace" or any(others)):
            raise ValueError(
                "`sessions` needs a trace, and goes with none of slice, requests, long_rule, long_share and "
                "`arrivals: trace`"
            )
        return self
