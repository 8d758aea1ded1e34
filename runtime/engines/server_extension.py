"""What a vLLM server is started with to be one of --engine-url's: its worker takes the policy's
weights. docs/many-gpus.md has the command. Nothing but vLLM is needed where this runs."""


class PolicyWeights:
    """For vLLM's --worker-extension-cls: methods that the worker has besides its own."""

    def take_policy(self, path: str) -> None:
        """Read the weights from the safetensors in a directory that the server sees too."""
        self.model_runner.reload_weights(weights_path=path)
        repack_tied_head(self.get_model())


def repack_tied_head(model) -> None:
    """Pack a CPU's tied head anew: it computes with a copy, which reload_weights leaves old."""
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
