"""What --gradient-checkpointing saves and costs: an update of a policy with it and without it.

    python benchmarks/gradient_checkpointing.py                 # 24 layers, 4,096 tokens, on a CPU
    python benchmarks/gradient_checkpointing.py --lora-rank 16
    python benchmarks/gradient_checkpointing.py --hidden 896 --dtype bfloat16    # 0.5B: a GPU

The model is a Qwen2 of random weights. In turn, each way computes log-probabilities of --tokens
tokens, of which a quarter are actions, and their gradient.

    kept      what autograd keeps for the backward pass, weights left out: torch's hooks on saved
              tensors count it, each storage once
    seconds   of forward and backward together: the median of --rounds; on a CPU of processor time

The gradients' difference is the largest of a parameter's, over its norm. Exits with 1 where they
differ by more than 1e-6 in float32. Written: benchmarks/results/gradient-checkpointing.md, to which
each call adds its lines.
"""

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from throughput import ROOT

WAYS = "without it", "--gradient-checkpointing"


def read_arguments():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--layers", type=int, default=24, help="of the model")
    add("--hidden", type=int, default=128, help="its width; the feed-forward's is 5 times as wide")
    add("--vocabulary", type=int, default=4096, help="its tokens")
    add("--lora-rank", type=int, default=0, help="of the policy's adapter; 0: all weights train")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="as the scripts'")
    add("--tokens", type=int, default=4096, help="of the micro-batch")
    add("--length", type=int, default=1024, help="of a sequence in it")
    add("--rounds", type=int, default=3, help="of each way; one more is not counted")
    results = ROOT / "benchmarks" / "results"
    add("--out", type=Path, default=results, help="directory of the table")
    return parser.parse_args()


def build(arguments):
    """A Network of random weights, on the GPU where there is one."""
    from runtime.networks import Network, add_adapter

    import torch
    from peft import LoraConfig
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    width = arguments.hidden
    config = Qwen2Config(
        hidden_size=width,
        intermediate_size=5 * width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        vocab_size=arguments.vocabulary,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).eval()
    if torch.cuda.is_available():
        model = model.cuda()
    if arguments.lora_rank:
        rank = arguments.lora_rank
        lora = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
        model = add_adapter(model, "policy", lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # else lora_A has no gradient
                torch.nn.init.normal_(parameter, std=0.01)
    network = Network("policy", model)
    network.optimizer = torch.optim.AdamW(network.trained, 1e-6)
    return network


class Kept:
    """Counts what autograd keeps of the passes in it."""

    def __init__(self, model):
        self.own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.seen = {}

    def note(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    def hooks(self):
        import torch

        return torch.autograd.graph.saved_tensors_hooks(self.note, lambda tensor: tensor)

    def bytes(self) -> int:
        return sum(self.seen.values())


def main() -> None:
    arguments = read_arguments()
    from runtime.data import Sequence, padded
    from runtime.networks import action_logprobs, recompute_layers

    import torch

    cuda = torch.cuda.is_available()
    networks = [build(arguments) for _ in WAYS]
    if not recompute_layers([networks[1].model]):
        sys.exit("the model has no layers that can be computed again")

    torch.manual_seed(0)
    length = min(arguments.length, arguments.tokens)
    is_action = torch.arange(length) % 4 == 3
    rows, acting = arguments.tokens // length, int(is_action.sum())
    ids = torch.randint(3, arguments.vocabulary, (rows, length))
    places = torch.arange(rows * acting).view(rows, acting)  # a step for each sequence
    batch = SimpleNamespace(token_step=torch.arange(rows).repeat_interleave(acting))
    sequences = [Sequence(row, is_action, place) for row, place in zip(ids, places)]
    micro = padded(sequences, batch)
    args = SimpleNamespace(temperature=1.0, run_args=SimpleNamespace(dtype=arguments.dtype))

    clock = time.perf_counter if cuda else time.process_time

    def one_pass(network, hooks=None) -> float:
        """Seconds of a forward and a backward pass."""
        start = clock()
        with hooks or nullcontext():
            loss = action_logprobs(network, micro, args).mean()
        loss.backward()
        if cuda:
            torch.cuda.synchronize()
        return clock() - start

    kept, seconds, gradients = [], [[], []], []
    for network in networks:
        counter = Kept(network.model)
        one_pass(network, counter.hooks())
        kept.append(counter.bytes())
        gradients.append([p.grad.clone() for p in network.trained])
        network.optimizer.zero_grad()
    for _ in range(arguments.rounds):
        for way, network in enumerate(networks):
            seconds[way].append(one_pass(network))
            network.optimizer.zero_grad()

    differ = max(
        ((two - one).norm() / one.norm().clamp(min=1e-30)).item() for one, two in zip(*gradients)
    )
    medians = [statistics.median(each) for each in seconds]
    trains = f"LoRA {arguments.lora_rank}" if arguments.lora_rank else "all weights train"
    device = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    size = sum(p.numel() for p in networks[0].model.parameters()) / 1e6
    what = f"{arguments.layers} layers, {size:.0f} M parameters, {arguments.dtype}, {trains}"
    lines = [f"`{' '.join(['python benchmarks/gradient_checkpointing.py', *sys.argv[1:]])}`", ""]
    lines += [f"{what}; {arguments.tokens:,} tokens, {length:,} a sequence; {device}", ""]
    lines += ["| way | kept [MiB] | seconds |", f"|{'---|' * 3}"]
    for way, name in enumerate(WAYS):
        lines.append(f"| {name} | {kept[way] / 2**20:,.0f} | {medians[way]:.2f} |")
    ratios = (
        f"{kept[0] / kept[1]:.1f} times less kept, {medians[1] / medians[0]:.2f} times the time"
    )
    lines += ["", f"{ratios}; gradients differ by {differ:.1e}.", "", ""]
    print("\n".join(lines))
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "gradient-checkpointing.md").open("a") as file:
        file.write("\n".join(lines))
    if differ > 1e-6 and arguments.dtype == "float32":
        sys.exit(1)


if __name__ == "__main__":
    main()
