"""Space sharing: a prompt yields part of an iteration's time to smaller ones that wait (Medha, Algorithm 2).

`chunk_allocation` asks here how long an iteration may become by a chunk of the larger prompt; what is left of the
target then belongs to the smaller ones behind it in the order.
"""

from __future__ import annotations


def time_of_larger_s(
    t_target_s: float, shared_s: float, slack: float, rho_min: float, rho_max: float, unshared_s: float = 0.0
) -> float:
    """Return the longest iteration, in seconds, that a chunk of a prompt may make while smaller ones wait.

    `t_target_s`: the longest iteration; `shared_s`: the longest of which it gets a share; `slack`: its relative slack
    rho, with its sign. The share that is yielded is the slack clamped to [`rho_min`, `rho_max`]: the more time a
    prompt has, the more it yields, and a late one (negative slack) still yields `rho_min`. `unshared_s`: seconds of
    it that are not shared, those of decodes."""
    return unshared_s + min(t_target_s - unshared_s, shared_s) * (1.0 - min(rho_max, max(rho_min, slack)))
