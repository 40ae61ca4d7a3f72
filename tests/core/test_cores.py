import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import machine as cores


@given(count=st.integers(1, 64), parts=st.integers(1, 80))
def test_shares_are_neighbouring_cores_of_equal_number(count: int, parts: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cores, "CORES", tuple(range(100, 100 + count)))
        shares = cores.shares(parts)
    assert len(shares) == parts
    if parts <= count:
        assert [core for share in shares for core in share] == list(range(100, 100 + count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert {core for share in shares for core in share} == set(range(100, 100 + count))
        assert all(len(share) == 1 for share in shares)
