"""The way of a request through the cluster is short: how many functions and files lie on it."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.request_hops import controller_visits, hops, instance_visits

MOST_HOPS, MOST_FILES = 47, 22


def test_a_request_goes_through_few_functions_until_its_first_kv_is_sent(tmp_path: Path) -> None:
    """Shown by `pytest -s`: each visit with its way."""
    visits = [*controller_visits(), *instance_visits(tmp_path)]
    for each in visits:
        print(f"{each.point}({each.about})", *(f"    {hop.file}: {hop.function}" for hop in each.stack), sep="\n")
    found = hops(visits)
    files = {hop.file for hop in found}
    print(f"{len(found)} hops, {len(files)} files")
    assert len(found) <= MOST_HOPS
    assert len(files) <= MOST_FILES
