"""Numbers of several runs in one: what benchmarks/evidence.py tells of seeds and tasks.

The interquartile mean and the probability of improvement are those of rliable (Agarwal et al.,
arXiv 2108.13264). Its interval, a stratified bootstrap over runs, covers the truth far too seldom
where there are 5 runs (tests/test_evidence.py simulates it), so the interval here is another: that
of a two-way random-effects model, in which the seeds are a sample of all seeds and the panel's
tasks one of all tasks, with Satterthwaite's degrees of freedom and Student's t.
"""

from sweeps.results import student

import numpy as np


def interquartile_mean(scores) -> float:
    """Mean of the middle half of all scores; a quarter, rounded down, is left out at each end."""
    ordered = np.sort(np.ravel(scores))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def probability_of_improvement(ours, theirs) -> float:
    """P(a run of ours is better than one of theirs), a draw counting half. [S], [S'] scores of
    runs; or [S, W], [S', W] in W worlds, of which it is the mean."""
    ours, theirs = np.asarray(ours, float), np.asarray(theirs, float)
    gaps = ours[:, None] - theirs[None, :]  # [S, S'] or [S, S', W]
    return float(((gaps > 0) + 0.5 * (gaps == 0)).mean())


def interval(scores) -> tuple[float, float]:
    """(mean, half of its 95 % interval) over seeds and tasks, from scores [S, T] of two seeds and
    two tasks or more; scores that all are equal have 0."""
    scores = np.asarray(scores, float)
    seeds, tasks = scores.shape
    mean, of_seeds, of_tasks = scores.mean(), scores.mean(1), scores.mean(0)
    rest = scores - of_seeds[:, None] - of_tasks[None, :] + mean

    free = np.array([seeds - 1, tasks - 1, (seeds - 1) * (tasks - 1)])
    squares = [tasks * of_seeds.var() * seeds, seeds * of_tasks.var() * tasks, (rest**2).sum()]
    parts = np.array(squares) / free / (seeds * tasks)  # mean squares, as variances of the mean
    variance = parts[0] + parts[1] - parts[2]
    if variance <= 0 or not parts.any():
        variance = max(parts[:2])
    if not variance:
        return float(mean), 0.0
    freedom = max(seeds - 1, variance**2 / (parts**2 / free).sum())
    return float(mean), float(student(freedom) * max(variance, *parts[:2]) ** 0.5)


def new_run(scores, least: float = 0.0, most: float = 1.0) -> str:
    """Where the score of one more run lies with a probability of 95 %, as "LOW to HIGH", by
    Student's t, from the scores [S] of runs that differ in the seed; "" for fewer than three.
    least: the standard deviation is at least this (that of one evaluation, whose answers are
    sampled). most: the greatest score."""
    scores = np.asarray(scores, float)
    if (runs := len(scores)) < 3:
        return ""
    half = student(runs - 1) * max(least, scores.std(ddof=1)) * (1 + 1 / runs) ** 0.5
    return f"{max(0.0, scores.mean() - half):.3f} to {min(most, scores.mean() + half):.3f}"


def area(curve: list[tuple[float, float]]) -> float:
    """The area under a curve of (iteration, height) from 0, over its width, by trapezoids."""
    steps = zip(curve, curve[1:])
    return sum((b - a) * (low + high) / 2 for (a, low), (b, high) in steps) / curve[-1][0]
