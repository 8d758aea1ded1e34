"""One update of every network of some scripts, its work divided between the processes that a
launcher started.

    torchrun --nproc_per_node 2 tests/divided.py SCRIPT,SCRIPT DIRECTORY [recompute] [bfloat16]

The first process writes DIRECTORY/SCRIPT.pt: {network.name: by how much a parameter was moved
(plain gradient descent, rate 1)} and the numbers that the updates told. Every process has the same
random model and the same trajectories; those of a visual script have a model that sees, and
pictures. recompute: with --gradient-checkpointing; bfloat16: products of the policy and of the
full copy, which rewards nothing before it has learnt."""

import os
import sys
from pathlib import Path

import torch
from conftest import load, network, random_model, random_trajectories, settings


def main(script: str, out: str | Path, *options: str) -> None:
    # conftest has told Python where these are
    from runtime.distributed import processes
    from runtime.data import batch_logprobs
    from runtime.networks import add_adapter, following, recompute_layers

    module, number = load(script), int(os.environ.get("WORLD_SIZE", 1))
    args = settings(micro_batch_tokens=40, processes=number, engine="none", minibatches=2)
    args.tasks_per_iteration, args.policy_lora_rank, args.value_clip = 4, 0, 0.5
    args.prm_ridge = 0.5
    processes.start(args)

    torch.manual_seed(processes.rank())  # what is drawn is the first process's
    build, trajectories = random_model, random_trajectories(module, groups=3)
    if "_visual_" in script:
        import test_pictures

        _, chat = test_pictures.seeing()
        build = lambda _: test_pictures.seeing()[0]  # noqa: E731
        samples = test_pictures.answered(chat, test_pictures.contexts_of(chat))
        trajectories = test_pictures.trajectories_of(samples)
    batch = module.flatten(trajectories)
    draw = torch.Generator().manual_seed(0)
    advantages = torch.randn(len(batch.step_traj), generator=draw)
    advantages[batch.step_traj < 2] = 0.0  # sequences that stay out
    moved = {}
    dtype = "bfloat16" if "bfloat16" in options else "float32"

    def trains(name, model):
        """The model as a Network with plain gradient descent, and its parameters by name. A sharded
        model's forward pass puts others in their place."""
        weights = {key: p for key, p in model.named_parameters() if p.requires_grad}
        if "recompute" in options:
            assert recompute_layers([model])
        optimizer, kind = torch.optim.SGD(weights.values(), lr=1.0), "float32"
        if name in ("policy", "copy"):
            kind = dtype
        return network(model, optimizer, name, kind), weights

    def note(name, weights, update, *given):
        """Do an update; note what it told and by how much it moved the trained parameters."""
        before = {key: processes.whole(p.detach()).clone() for key, p in weights.items()}
        moved[f"{name} numbers"] = update(*given, args)
        for key, p in weights.items():
            moved[f"{name}.{key}"] = processes.whole(p.detach()) - before[key]

    policy, weights = trains("policy", processes.shard(build(0), dtype))
    exact = batch_logprobs(policy, batch, args)
    old = exact - 0.1 * torch.rand(len(exact), generator=draw)  # ratios that are not 1
    moved["old"] = old
    pairs = []
    if hasattr(module, "preference_pairs"):
        pairs = module.preference_pairs(batch.outcomes, batch.group)
    given = policy, batch, old, advantages
    if hasattr(module, "prm_update"):  # with a copy that learns and follows the policy
        copied, own = trains("copy", processes.shard(build(0), dtype))
        copied.on = "policy"
        assert module.score_steps(copied, batch, exact, args).abs().max() < 1e-5
        note("copy", own, module.prm_update, copied, batch, old, pairs)
        moved["scores"] = module.score_steps(copied, batch, old, args)
        before = {key: processes.whole(p.detach()).clone() for key, p in own.items()}
        with following(copied, policy):
            note("policy", weights, module.policy_update, *given)
        for key, p in own.items():
            moved[f"followed.{key}"] = processes.whole(p.detach()) - before[key]
    elif hasattr(module, "policy_update"):
        note("policy", weights, module.policy_update, *given)
    if hasattr(module, "dpo_update"):
        note("policy", weights, module.dpo_update, policy, batch, old, pairs)

    prm, weights = trains("prm", add_adapter(build(1), "prm", 4))
    for seed, (key, parameter) in enumerate(prm.model.named_parameters()):
        if "lora_" in key:
            noise = torch.Generator().manual_seed(seed)
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=noise)
    if hasattr(module, "prm_update"):
        note("prm", weights, module.prm_update, prm, batch, old, pairs)
    if hasattr(module, "cross_entropy_update"):
        log_ratios = batch_logprobs(prm, batch, args) - old
        owner = batch.step_traj[batch.token_step]
        of_all = log_ratios, owner, batch.outcomes
        note("prm", weights, module.cross_entropy_update, prm, batch, *of_all)

    if hasattr(module, "critic_update"):
        path = Path(out).with_suffix(".model")
        random_model(2).save_pretrained(path, is_main_process=processes.rank() == 0)
        processes.wait()
        critic, weights = trains("critic", module.add_value_head(path, 4, dtype=torch.float32))
        torch.nn.init.ones_(next(p for key, p in weights.items() if "score" in key))
        moved["values"] = module.batch_values(critic, batch, args)
        at = torch.arange(0, len(batch.token_step), 2)
        returns = torch.randn(len(at), generator=draw)
        note(
            "critic", weights, module.critic_update, critic, batch, at, moved["values"][at], returns
        )

    if processes.rank() == 0:
        torch.save(moved, out)


if __name__ == "__main__":
    scripts, directory, *given = sys.argv[1:]
    for name in scripts.split(","):
        main(name, Path(directory, f"{name}.pt"), *given)
    from runtime.distributed import processes

    processes.end()
