"""The cache of keys and values of --engine hf, which grows without copying what is in it."""

import torch
from transformers.cache_utils import DynamicLayer

ROOM = 64  # tokens that are appended before a layer's keys and values are copied once


class RoomyLayer(DynamicLayer):
    """A layer's keys and values [B, heads, T, width], with memory behind them for the next tokens:
    transformers' own copies all of them for every token."""

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.rooms = {}  # name: (memory, the part of it that is in use)
        self.keys = self.appended("keys", self.keys, key_states)
        self.values = self.appended("values", self.values, value_states)
        return self.keys, self.values

    def appended(self, name: str, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """old and new one after the other: new is written behind old, where there is room."""
        length = old.shape[-2] if old.numel() else 0
        end = length + new.shape[-2]
        memory, used = self.rooms.get(name, (None, None))
        if used is not old or memory.shape[-2] < end:  # the rows are others, or it is full
            memory = new.new_empty(*new.shape[:-2], end + ROOM, new.shape[-1])
            if length:
                memory[..., :length, :] = old
        memory[..., length:end, :] = new
        used = memory[..., :end, :]
        self.rooms[name] = memory, used
        return used
