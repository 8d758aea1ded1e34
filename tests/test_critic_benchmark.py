"""benchmarks/critic.py: what of the returns is explained, and what lies between groups."""

from benchmarks.critic import between, explained

import pytest
import torch


def test_what_is_explained_is_what_the_values_leave_less_of_the_variance():
    returns = torch.tensor([0.0, 1.0, 2.0, 5.0])
    assert explained(returns, returns + 3) == pytest.approx(1)  # a constant does not count
    assert explained(returns, torch.zeros(4)) == 0
    assert explained(returns, -returns) == pytest.approx(-3)


@pytest.mark.parametrize("share", (0.0, 0.3, 0.8))
def test_the_share_between_is_that_of_the_effects(share):
    """Normal effects of tasks and of episodes, whose variances are known."""
    torch.manual_seed(1)
    tasks = torch.arange(2000).repeat_interleave(8)
    effects = share**0.5 * torch.randn(2000)
    returns = effects[tasks] + (1 - share) ** 0.5 * torch.randn(len(tasks))
    assert between(returns, tasks) == pytest.approx(share, abs=0.03)
