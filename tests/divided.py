"""One update of every network of some scripts, its work divided between the processes that a
launcher started.

    torchrun --nproc_per_node 2 tests/divided.py SCRIPT,SCRIPT+recompute+bfloat16 DIRECTORY

The first process writes DIRECTORY/SCRIPT.pt, its options and all: {network.step.index: the gradient
of a parameter in a step of the update}, the numbers that the updates told, and what the networks
compute after it.
Every process has the same random model and the same trajectories; those of a visual script have a
model that sees, and pictures. recompute: with --gradient-checkpointing; untied: of a model whose
head has weights of its own. Last, the networks are saved, and others take them up."""

import asyncio
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from conftest import default_model, load, random_model, random_trajectories, settings


def main(script: str, out: str | Path, *options: str) -> None:
    # conftest has told Python where these are
    from runtime.data import flatten, sum_per_step
    from runtime.distributed import fsdp, processes
    from runtime.networks import action_logprobs, batch_logprobs, over_batch, recompute_layers

    module, number = load(script), int(os.environ.get("WORLD_SIZE", 1))
    dtype = "bfloat16" if "bfloat16" in options else "float32"
    args = settings(micro_batch_tokens=40, processes=number, engine="none", dtype=dtype)
    args.minibatches, args.tasks_per_iteration, args.policy_lora_rank = 2, 4, 0
    args.value_clip, args.prm_ridge, args.beta, args.max_grad_norm = 0.5, 0.5, 0.5, 1.0
    device = processes.start(args)

    build, trajectories = random_model, random_trajectories(groups=3)
    if "untied" in options:
        build = partial(random_model, tied=False)
    if "_visual_" in script:
        build, trajectories = seeing(module, args)
    batch = flatten(trajectories)
    draw = torch.Generator().manual_seed(0)

    def networks_made():
        return networks_of(module, build, Path(out).with_suffix(".model"), device)

    networks = networks_made()
    if "recompute" in options:
        assert recompute_layers([network.model for network in networks.values()])
    if fsdp.wanted():
        fsdp.shard_all([*networks.values()], dtype, device)
    policy = networks["policy"]
    found = {}

    def note(name, update, *given):
        """Do an update; note what it told and the gradients that it followed."""
        torch.manual_seed(0)
        steps = networks[name].optimizer.gradients
        steps.clear()
        found[f"{name} numbers"] = update(*given, args)
        for number, gradients in enumerate(steps):
            found.update({f"{name}.{number}.{i}": g for i, g in enumerate(gradients)})
        assert steps and all(p.grad is None for p in networks[name].trained)

    exact = batch_logprobs(policy, batch, args)
    gap = 0.2 * torch.rand(len(exact), generator=draw)  # so that ratios are not 1
    old = exact - gap / torch.bincount(batch.token_step)[batch.token_step]
    batch = batch._replace(engine_logprobs=old)
    found["old"] = old
    pairs = []
    if hasattr(module, "preference_pairs"):
        pairs = module.preference_pairs(batch.outcomes, batch.group)
    if hasattr(module, "draw"):
        note("prm", module.prm_update, networks["prm"], policy, trajectories)
        both = networks["prm_average"].trained, networks["prm"].trained
        module.swa_utils.get_ema_multi_avg_fn(0.8)(*both, None)
    elif hasattr(module, "prm_update"):
        log_phi, log_old = (
            sum_per_step(batch_logprobs(each, batch, args), batch)
            for each in (networks["prm"], policy)
        )
        note("prm", module.prm_update, networks["prm"], batch, log_phi, log_old, pairs)
    if hasattr(module, "policy_update"):
        advantages = torch.randn(len(batch.step_traj), generator=draw)
        advantages[batch.step_traj < 2] = 0.0  # sequences that stay out
        note("policy", module.policy_update, policy, batch, old, advantages)

    if hasattr(module, "dpo_update"):
        note("policy", module.dpo_update, policy, batch, old, pairs)
    if hasattr(module, "cross_entropy_update"):
        log_ratios = batch_logprobs(networks["prm"], batch, args) - old
        given = log_ratios, batch.step_traj[batch.token_step], batch.outcomes
        note("prm", module.cross_entropy_update, networks["prm"], batch, *given)
    if hasattr(module, "critic_update"):
        critic, at = networks["critic"], torch.arange(0, len(batch.token_step), 2)
        values = over_batch(module.token_values, critic, batch, args)
        found["values"] = values
        returns = torch.randn(len(at), generator=draw)
        note("critic", module.critic_update, critic, batch, at, values[at], returns)

    again = networks_made()
    if fsdp.wanted():
        fsdp.shard_all([*again.values()], dtype, device)
    saved_and_taken_up(Path(out).with_suffix(""), networks, again)
    compute = {"critic": module.token_values} if hasattr(module, "token_values") else {}
    for name, network in networks.items():
        assert all(map(torch.equal, wholes(network), wholes(again[name])))
        function = compute.get(name, action_logprobs)
        found[f"after.{name}"] = over_batch(function, network, batch, args)
        assert torch.equal(found[f"after.{name}"], over_batch(function, again[name], batch, args))
    if processes.rank() == 0:
        torch.save(found, out)


def seeing(module, args) -> tuple:
    """(build, trajectories): what reads the tiny model that sees, and episodes of its world, in
    each of which it says one thing throughout."""
    from envs.visual_sokoban import VisualSokoban
    from runtime.chat import Chat
    from runtime.models import read_seeing_model
    from runtime.worlds import Door

    from transformers import AutoTokenizer

    def build(_):
        reading = {"dtype": torch.float32, "trust_remote_code": False}
        return read_seeing_model(str(default_model("_visual_sokoban")), "tiny", reading).eval()

    class Parrot:
        async def sample(self, context, sampling):
            return self.says, [0.0] * len(self.says)

    env, parrot, trajectories = VisualSokoban(), Parrot(), []
    tokenizer = AutoTokenizer.from_pretrained(default_model("_visual_sokoban"))
    chat = Chat(tokenizer, [tokenizer.eos_token_id], build(0).picture_processor)
    for number in range(6):
        way, task = ("up", "left", "down")[number % 3], env.train_tasks[number // 2]
        args.max_steps = 1 + number % 3
        parrot.says = tokenizer.encode(f"<think>push {way}</think><action>{way}</action>")
        parrot.says += chat.stop_ids
        door = Door(env, task)
        trajectories.append(asyncio.run(module.play(door, parrot, chat, task, None, args)))
        trajectories[-1].outcome = float(number % 2)
    return build, trajectories


def networks_of(module, build, path: Path, device) -> dict:
    """{name: Network} of a script as its main makes them, on the device; FSDP brings them there
    itself. The PRM and the critic are not what they start as any more."""
    from runtime.distributed import fsdp, processes
    from runtime.networks import Network

    networks = {"policy": Network("policy", build(0))}
    torch.manual_seed(0)  # as a run does: adapters begin the same in all processes
    if hasattr(module, "cross_entropy_update"):
        networks["prm"] = networks["policy"].initial().with_adapter("prm", module.lora(4))
    elif hasattr(module, "draw"):
        networks["prm"] = networks["policy"].with_adapter("prm", module.lora(4))
    elif hasattr(module, "prm_update"):
        networks["prm"] = networks["policy"].copy("prm")
    if hasattr(module, "draw"):
        networks["prm_average"] = networks["prm"].copy("prm_average")
    if hasattr(module, "critic_update"):
        random_model(2).save_pretrained(path, is_main_process=processes.rank() == 0)
        processes.wait()
        networks["critic"] = Network("critic", module.value_model(str(path), 4))
    for name, network in networks.items():
        if not fsdp.wanted():
            network.model.to(device)
        if name != "prm_average":
            network.optimizer = Noted(network.trained, lr=1e-2)
        for seed, parameter in enumerate(network.trained if name != "policy" else ()):
            noise = torch.Generator().manual_seed(seed)
            drawn = torch.randn(parameter.shape, generator=noise)
            parameter.data += 0.05 * drawn.to(parameter.device)
    return networks


class Noted(torch.optim.SGD):
    """Plain gradient descent that keeps the gradients of its steps, whole."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.gradients = []

    def step(self):
        from runtime.distributed import fsdp

        parameters = self.param_groups[0]["params"]
        self.gradients.append([fsdp.whole(p.grad).cpu().clone() for p in parameters])
        super().step()


def wholes(network) -> list[torch.Tensor]:
    """A network's trained parameters, whole."""
    from runtime.distributed import fsdp

    return [fsdp.whole(parameter.detach()).clone() for parameter in network.trained]


def saved_and_taken_up(run: Path, networks: dict, again: dict) -> None:
    """A checkpoint of the one, installed in the other."""
    from runtime.distributed import fsdp, processes
    from runtime.saving.checkpoints import finish_saving, load_checkpoint, save_checkpoint

    if processes.rank() == 0:
        (run / "checkpoints").mkdir(parents=True)
    args = SimpleNamespace(iterations=1)
    args.run_args = SimpleNamespace(save_every=1, keep=1, dtype="float32")
    tokenizer = SimpleNamespace(save_pretrained=lambda path: None)
    rows = [{"iteration": 1}]
    trained = [network for network in networks.values() if network.optimizer]
    for network in trained:  # as if the optimiser had moments
        for parameter in network.trained:
            moments = {"step": torch.tensor(3.0), "exp_avg": parameter.detach() ** 2}
            network.optimizer.state[parameter] = moments
    save_checkpoint(run, rows, [*networks.values()], tokenizer, args, {})
    finish_saving()
    processes.wait()  # until the first one has renamed it
    iteration, _ = load_checkpoint(run, [*again.values()], {})
    assert iteration == 1
    for network in [again[network.name] for network in trained]:
        for parameter in network.trained:
            found = network.optimizer.state[parameter]
            assert found["step"] == 3
            expected = fsdp.local(parameter.detach()) ** 2
            assert torch.equal(fsdp.local(found["exp_avg"]), expected)


if __name__ == "__main__":
    scripts, directory, *given = sys.argv[1:]
    for name in scripts.split(","):
        script, *own = name.split("+")
        main(script, Path(directory, f"{name}.pt"), *own, *given)
    from runtime.distributed import processes

    processes.end()
