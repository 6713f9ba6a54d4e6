"""Thousands of damaged, forged and misplaced messages; `make fuzz` tries a million."""

import pytest

from fedtail.secure import sum_server
from fuzz_secure import Failure, fuzz


@pytest.mark.parametrize("seed", range(3))
def test_nothing_but_refusals_and_no_wrong_sum(seed):
    counts = fuzz(20_000, seed=1000 + seed)
    assert counts["cases"] >= 20_000
    assert counts["sums"] > 30                      # sessions reach their end
    assert counts["in earnest, taken"] > 10         # and not for want of forgeries that are taken
    assert counts["refused"] > counts["taken"] > 100


def test_the_fuzzer_notices_a_check_that_is_missing(monkeypatch):
    """Without the comparison of secrets with what was announced, a wrong share makes a wrong sum."""
    monkeypatch.setattr(sum_server, "seed_commitment", lambda session, one, query, seed: Anything())
    with pytest.raises(Failure, match=r"session '0/\d+' of session_run: .*a wrong sum"):
        fuzz(60_000, seed=0)


class Anything:
    def __eq__(self, other):
        return True

    __hash__ = None


def test_a_run_is_repeated_from_its_seed():
    assert fuzz(3000, seed=5) == fuzz(3000, seed=5) != fuzz(3000, seed=6)
