"""Pictures: from the PNG that a world shows to what a model sees of it (Qwen2.5-VL). In a sequence
a picture is a run of image tokens, one for merge x merge patches, which the tower embeds."""

import functools
import io
import sys

from runtime.data import pictures_of
from runtime.distributed import fsdp
from runtime.flags import refuse
from runtime.view.terminal import first_line

import torch

KEPT = 2048  # so many pictures' patches, or features of a frozen tower, are kept
BY_LENGTH = "flash_by_length"  # with "flash" in it a tower gives its attention all windows at once


def never_sampled(config) -> list[int]:
    """The tokens that stand for pictures and films, if there are any: no model may say them."""
    tokens = (getattr(config, name, None) for name in ("image_token_id", "video_token_id"))
    return [token for token in tokens if token is not None]


class PictureProcessor:
    """Reads PNGs for the model's vision tower. image_token: the id that stands for merge x merge
    patches. features: what a frozen tower made of them. Exits where --model sees no pictures."""

    def __init__(self, path: str, config, model: str, processor=None):
        # it needs no torchvision, and equals the other one where nothing is resized
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil

        self.model, unfit = model, functools.partial(refuse, "model", model)
        if config.model_type != "qwen2_5_vl":
            unfit(f"its type {config.model_type} sees no pictures here: take a Qwen2.5-VL")
        try:
            self.processor = processor or pil.Qwen2VLImageProcessorPil.from_pretrained(path)
        except Exception as error:  # each part of it has its own
            unfit(f"no preprocessor_config.json for its pictures ({first_line(error)})")
        self.patch, self.merge = self.processor.patch_size, self.processor.merge_size
        tower = config.vision_config
        sizes = tower.patch_size, tower.spatial_merge_size, tower.temporal_patch_size
        if (self.patch, self.merge, self.processor.temporal_patch_size) != sizes:
            unfit("preprocessor_config.json and config.json differ in their patches")
        self.image_token = config.image_token_id
        self.patches = functools.lru_cache(maxsize=KEPT)(self.read)
        self.features: dict[bytes, torch.Tensor] = {}

    def read(self, png: bytes) -> tuple[torch.Tensor, tuple[int, int]]:
        """(patches [n, d], (rows, columns) of its tokens) of a picture; or it exits."""
        image = opened(png)
        rows, columns = image.height // self.patch, image.width // self.patch
        side, size = self.patch * self.merge, f"a picture has {image.width} x {image.height} pixels"
        if image.width % side or image.height % side:
            sys.exit(f"{size}: --model {self.model} takes multiples of {side} (--cell-pixels)")
        seen = self.processor(images=[image], return_tensors="pt")
        if seen["image_grid_thw"].tolist() != [[1, rows, columns]]:
            sys.exit(f"{size}: --model {self.model} would resize it (--cell-pixels)")
        return seen["pixel_values"], (rows // self.merge, columns // self.merge)

    def tokens(self, png: bytes) -> list[int]:
        rows, columns = self.patches(png)[1]
        return [self.image_token] * (rows * columns)

    def grids(self, pngs: list[bytes]) -> torch.Tensor:
        """(1, rows, columns) of the patches of each picture, [P, 3]."""
        return torch.tensor([[1, *(n * self.merge for n in self.patches(png)[1])] for png in pngs])


def has_frozen_tower(causal) -> bool:
    """Whether the model has a vision tower of which nothing is trained (--freeze-vision)."""
    tower = getattr(causal.base_model, "visual", None)
    return tower is not None and not any(p.requires_grad for p in tower.parameters())


def opened(png: bytes):
    """The PIL image of a PNG; exits with one line where it is none."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(png)).convert("RGB")
    except (OSError, ValueError) as error:
        sys.exit(f"the world showed {'no' if png else 'an empty'} picture ({error})")


def attention_by_length(module, query, key, value, *, scaling, cu_seq_lens_q, **_):
    """Attention within each window of a vision tower, exact and without padding: windows of one
    length are a batch of one call. query, key, value: [1, heads, patches, d]; cu_seq_lens_q: where
    windows begin and end [windows + 1]. Returns [1, patches, heads, d] and no weights."""
    lengths = cu_seq_lens_q.diff()
    order = lengths.repeat_interleave(lengths).argsort(stable=True)  # the shortest windows first
    sizes, counts = lengths.unique(return_counts=True)
    patches = (sizes * counts).tolist()
    parts, found = [x[0].transpose(0, 1)[order].split(patches) for x in (query, key, value)], []
    for length, *part in zip(sizes.tolist(), *parts):
        batch = [x.unflatten(0, (-1, length)).transpose(1, 2) for x in part]  # [n, heads, l, d]
        attended = torch.nn.functional.scaled_dot_product_attention(*batch, scale=scaling)
        found.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)[order.argsort()][None], None


def tower_features(causal, pngs: list[bytes]) -> dict[bytes, torch.Tensor]:
    """{PNG: what the vision tower makes of it [n, H]}, each computed once, in one pass. With a
    graph where the tower trains; what a frozen tower made is kept."""
    processor = causal.picture_processor
    # processes that gather the tower's weights together may not differ in what they know
    known = {} if fsdp.is_sharded(causal) or not has_frozen_tower(causal) else processor.features
    found = {png: known[png] for png in pngs if png in known}
    if new := [png for png in dict.fromkeys(pngs) if png not in known]:
        patches = torch.cat([processor.patches(png)[0] for png in new]).to(causal.device)
        grids = processor.grids(new).to(causal.device)
        found |= zip(new, causal.base_model.get_image_features(patches, grids).pooler_output)
    known |= {png: found[png].detach() for png in new}
    for png in list(known)[:-KEPT]:
        del known[png]
    return found


def picture_inputs(causal, ids: torch.Tensor, pictures: list[tuple[int, int, bytes]]) -> dict:
    """inputs_embeds [B, T, H] and position_ids [3, B, T] of ids with (row, place, PNG)s."""
    processor, pngs = causal.picture_processor, [png for _, _, png in pictures]
    features, shown = tower_features(causal, pngs), ids == processor.image_token
    embeds = causal.get_input_embeddings()(ids).clone()
    embeds[shown] = torch.cat([features[png] for png in pngs]).to(embeds.dtype)
    places, _ = causal.base_model.get_rope_index(ids, shown.int(), processor.grids(pngs))
    return {"inputs_embeds": embeds, "position_ids": places}


class Album:
    """The pictures that an engine has read with one policy's weights. Each token of each picture
    has a number of its own, -1 and below: contexts of equal numbers have equal pictures."""

    def __init__(self, causal):
        self.causal = causal
        self.numbers: dict[bytes, range] = {}  # of a picture's tokens
        self.pngs: dict[int, bytes] = {}  # by their first number
        width = causal.get_input_embeddings().embedding_dim
        self.features = torch.zeros(0, width, device=causal.device)

    def numbered(self, contexts: list[list[int]]) -> list[list[int]]:
        pngs = dict.fromkeys(png for context in contexts for _, png in pictures_of(context))
        if new := [png for png in pngs if png not in self.numbers]:
            found = tower_features(self.causal, new)
            for png in new:
                first = -1 - sum(map(len, self.numbers.values()))
                self.numbers[png] = range(first, first - len(found[png]), -1)
                self.pngs[first] = png
            self.features = torch.cat([self.features, *(found[png] for png in new)])
        numbered = [list(context) for context in contexts]
        for ids, context in zip(numbered, contexts):
            for place, png in pictures_of(context):
                ids[place : place + len(self.numbers[png])] = self.numbers[png]
        return numbered

    def embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [B, n, H] of numbered ids [B, n]."""
        embeds = self.causal.get_input_embeddings()(ids.clamp(min=0)).clone()
        shown = ids < 0
        embeds[shown] = self.features[-1 - ids[shown]].to(embeds.dtype)
        return embeds

    def positions(self, ids: list[int]) -> torch.Tensor:
        """Positions [3, n] of numbered ids."""
        pngs, row = [self.pngs[n] for n in ids if n in self.pngs], torch.tensor([ids])
        grids = self.causal.picture_processor.grids(pngs)
        return self.causal.base_model.get_rope_index(row, (row < 0).int(), grids)[0][:, 0]
