"""One update of every network of a script, its work divided between the processes that a launcher started.

    torchrun --nproc_per_node 2 tests/divided.py SCRIPT OUT.pt

The first process writes {network.name: by how much a parameter was moved (plain gradient descent, rate 1)} and the
numbers that the updates told. Every process has the same random model and the same trajectories."""

import os
import sys
from pathlib import Path

import torch
from conftest import load, random_model, random_trajectories, settings

from envs import processes


def main() -> None:
    script, out = sys.argv[1:]
    module, number = load(script), int(os.environ.get("WORLD_SIZE", 1))
    args = settings(micro_batch_tokens=40, value_clip=0.5, processes=number, minibatches=2)
    vars(args).update(tasks_per_iteration=4, eval_tasks=4, policy_lora_rank=0, engine="none", max_grad_norm=1e9)
    processes.start(args)
    torch.manual_seed(processes.rank())  # what is drawn is the first process's
    batch = module.flatten(random_trajectories(module, groups=3))
    draw = torch.Generator().manual_seed(0)
    advantages = torch.randn(len(batch.step_traj), generator=draw)
    advantages[batch.step_traj < 2] = 0.0  # sequences that stay out
    moved = {}

    def trained(model):
        return {key: p for key, p in model.named_parameters() if p.requires_grad}

    def update(name, trained, function):
        """Do an update with plain gradient descent; note by how much it moved the trained parameters."""
        before = {key: processes.whole(p.detach()).clone() for key, p in trained.items()}
        moved[f"{name} numbers"] = function(torch.optim.SGD(trained.values(), lr=1.0))
        for key, p in trained.items():
            moved[f"{name}.{key}"] = processes.whole(p.detach()) - before[key]

    policy = processes.shard(random_model(0))
    weights = trained(policy)  # a sharded model's forward pass puts others in their place
    old = module.score_tokens(policy, batch, args, "")
    old = old - 0.1 * torch.rand(len(old), generator=draw)  # ratios that are not 1
    moved["old"] = old
    update("policy", weights, lambda sgd: module.policy_update(policy, sgd, batch, old, advantages, args))
    prm = module.activate(module.add_adapter(random_model(1), "prm", 4), "prm")
    for seed, (name, parameter) in enumerate(prm.named_parameters()):
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    if hasattr(module, "prm_update"):
        pairs = module.preference_pairs(batch.outcomes, batch.group)
        update("prm", trained(prm), lambda sgd: module.prm_update(prm, sgd, batch, old, pairs, args))
    if hasattr(module, "cross_entropy_update"):
        ratios, owner = module.score_tokens(prm, batch, args, "") - old, batch.step_traj[batch.token_step]
        of_all = ratios, owner, batch.outcomes, args
        update("prm", trained(prm), lambda sgd: module.cross_entropy_update(prm, sgd, batch, *of_all))
    if hasattr(module, "critic_update"):
        path = Path(out).with_suffix(".model")
        random_model(2).save_pretrained(path, is_main_process=processes.rank() == 0)
        processes.wait()
        critic = module.add_value_head(path, 4, dtype=torch.float32)
        torch.nn.init.ones_(next(p for name, p in critic.named_parameters() if "score" in name and p.requires_grad))
        moved["values"] = module.score_values(critic, batch, args)
        at = torch.arange(0, len(batch.token_step), 2)
        returns = torch.randn(len(at), generator=draw)
        of_all = at, moved["values"][at], returns, args
        update("critic", trained(critic), lambda sgd: module.critic_update(critic, sgd, batch, *of_all))
    if processes.rank() == 0:
        torch.save(moved, out)


if __name__ == "__main__":
    main()
