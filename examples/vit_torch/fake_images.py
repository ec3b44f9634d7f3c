"""The dataset of a tutorial on ViT speed: random images, without a download or a disk."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset


class FakeDataset(Dataset):
    """Images [3, side, side] drawn at random, and one of `classes` labels, of shape [1]."""

    def __init__(self, length: int = 1_000_000, side: int = 224, classes: int = 1000) -> None:
        self.length, self.side, self.classes = length, side, classes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = torch.randn([3, self.side, self.side], dtype=torch.float32)
        return image, torch.tensor([index % self.classes], dtype=torch.int64)


class ChannelsLast(FakeDataset):
    """The same images as the trainer's ViT takes them: [side, side, 3]."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = super().__getitem__(index)
        return image.permute(1, 2, 0), label


def loader(**sizes: int) -> DataLoader:
    """The DataLoader of job.yaml: num_workers is the default; batch size and order are unused."""
    return DataLoader(ChannelsLast(**sizes), batch_size=8, shuffle=True, num_workers=2)
