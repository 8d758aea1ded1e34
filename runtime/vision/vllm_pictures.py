"""vLLM reads pictures without torchvision, whose published builds do not import beside a CPU
torch."""

import sys
from importlib.util import find_spec


class PictureReader:
    """What vLLM asks of transformers' processor, for pictures alone: its own wants torchvision, for
    films."""

    image_token, video_token = "<|image_pad|>", "<|video_pad|>"

    def __init__(self, path: str):
        from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessorKwargs
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self.valid_processor_kwargs = Qwen2_5_VLProcessorKwargs
        self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(path)

    def __call__(self, images, return_tensors=None, **_):
        return self.image_processor(images=images, return_tensors=return_tensors)


def read_without_torchvision() -> None:
    """Where torchvision is not installed, register Qwen2.5-VL with vLLM anew, to read pictures by
    transformers' other image processor, which stands on PIL."""
    if find_spec("torchvision"):
        return
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil

    # vLLM takes smart_resize from the module that needs torchvision; this one has it too
    sys.modules.setdefault("transformers.models.qwen2_vl.image_processing_qwen2_vl", pil)
    from vllm import ModelRegistry
    from vllm.model_executor.models import qwen2_5_vl as family
    from vllm.multimodal import MULTIMODAL_REGISTRY

    class PicturesOnly(family.Qwen2_5_VLProcessingInfo):
        def get_hf_processor(self, **kwargs):
            if not hasattr(self, "reader"):
                self.reader = PictureReader(self.ctx.model_config.model)
            return self.reader

        def get_supported_mm_limits(self):
            return {"image": None}

    MULTIMODAL_REGISTRY.register_processor(
        family.Qwen2_5_VLMultiModalProcessor,
        info=PicturesOnly,
        dummy_inputs=family.Qwen2_5_VLDummyInputsBuilder,
    )(family.Qwen2_5_VLForConditionalGeneration)
    name = "Qwen2_5_VLForConditionalGeneration"
    ModelRegistry.register_model(name, family.Qwen2_5_VLForConditionalGeneration)
