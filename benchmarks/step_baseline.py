"""The bias of A^S = (r - mean) / std over the steps of a group, which have the step's own episode.

    python benchmarks/step_baseline.py

The reward of a step is its turn's number, whatever is done. So no answer deserves credit, and the
expected gradient E[sum over steps of A^S * d log pi(a_t) / d theta] should be 0. But an answer that
ends the episode keeps later turns, whose rewards are larger, out of the group's mean: it looks
better than it is. The policy ends an episode of at most 8 turns at each of them with probability
sigmoid(theta), theta = 0. Compared are mean and standard deviation of the whole group, as iStar's
scripts have them, the mean of the group's other episodes, and both of the others.
"""

import numpy as np

TURNS, GROUPS, SEED = 8, 100_000, 0


def gradients(group_size: int, others: str, rng) -> np.ndarray:
    """[GROUPS] the gradient of each group, over its number of episodes; others: what is of the
    other episodes alone, "", "mean" or "mean and std"."""
    ends = rng.random((GROUPS, group_size, TURNS)) < 0.5
    turn = np.arange(1, TURNS + 1)
    length = np.where(ends.any(-1), ends.argmax(-1) + 1, TURNS)[..., None]
    played = turn <= length  # [GROUPS, G, TURNS]
    scores = np.where(ends, 0.5, -0.5) * played  # d log pi / d theta
    rewards = turn * played

    def moments(without_own: bool):  # number, sum and sum of squares of the steps that are compared
        for values in (played, rewards, rewards**2):
            own = values.sum(2, keepdims=True)  # [GROUPS, G, 1]
            yield own.sum(1, keepdims=True) - without_own * own

    number, total, _ = moments("mean" in others)
    mean = total / number
    number, total, squares = moments("std" in others)
    std = np.sqrt(np.maximum(squares - total**2 / number, 0) / np.maximum(number - 1, 1))
    advantages = np.divide(rewards - mean, std, out=np.zeros(rewards.shape), where=std > 1e-9)
    return (scores * advantages * played).sum((1, 2)) / group_size


def main() -> None:
    compared = {"the whole group": "", "mean of the others": "mean", "both of them": "mean and std"}
    print(f"| episodes in a group | {' | '.join(compared)} |")
    print(f"| --- {'| --- ' * len(compared)}|")
    for group_size in (2, 4, 8, 16, 32):
        cells = []
        for others in compared.values():
            found = gradients(group_size, others, np.random.default_rng(SEED))
            cells.append(f"{found.mean():.3f} ± {1.96 * found.std() / GROUPS**0.5:.3f}")
        print(f"| {group_size} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
