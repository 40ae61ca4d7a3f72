"""`python -m tests.parity [--cases N] [--first SEED]`: run the parity machine and print its counts."""

from __future__ import annotations

import argparse

from tests.parity.outcomes import report, run
from tests.parity.test_parity import CASES


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="compare random checkpoints and tokenizers with transformers")
    parser.add_argument("--cases", type=int, default=1500, help="of each sort")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--only", choices=CASES, help="one sort")
    asked = parser.parse_args()
    seeds = range(asked.first, asked.first + asked.cases)
    chosen = {name: case for name, case in CASES.items() if asked.only in (None, name)}
    print(report((name, seed, one) for name, case in chosen.items() for seed, one in run(case, seeds)))


if __name__ == "__main__":
    main()
