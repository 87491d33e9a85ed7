"""The short form of `torch_kills.py`: ranks of training programs die at random moments."""

import pytest
import torch_ranks  # noqa: F401  (skips these tests without torch)
from torch_kills import KINDS, run

torch = pytest.importorskip("torch")


@pytest.mark.skipif(torch.__version__ < "2.15", reason="only this torch has FSDP2's allocation and all group's methods")
@pytest.mark.parametrize("kind", KINDS)
def test_survivors_name_the_rank_that_died_and_go_on_training(kind):
    deaths, taken = run(4, seed=7, ranks=3, kinds=(kind,))
    assert deaths[kind] == 4 and len(taken) >= 4
