"""vLLM reads pictures without torchvision, whose builds do not import beside a CPU torch."""

import sys
from importlib.util import find_spec

from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessorKwargs
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil


class PictureReader:
    """What vLLM asks of transformers' processor, for pictures alone."""

    image_token, video_token = "<|image_pad|>", "<|video_pad|>"

    def __init__(self, path: str):
        self.valid_processor_kwargs = Qwen2_5_VLProcessorKwargs
        self.image_processor = pil.Qwen2VLImageProcessorPil.from_pretrained(path)

    def __call__(self, images, return_tensors=None, **_):
        return self.image_processor(images=images, return_tensors=return_tensors)


def read_without_torchvision() -> None:
    if find_spec("torchvision"):
        return
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

    model, dummies = family.Qwen2_5_VLForConditionalGeneration, family.Qwen2_5_VLDummyInputsBuilder
    reader = family.Qwen2_5_VLMultiModalProcessor
    MULTIMODAL_REGISTRY.register_processor(reader, info=PicturesOnly, dummy_inputs=dummies)(model)
    ModelRegistry.register_model(model.__name__, model)
