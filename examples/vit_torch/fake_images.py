"""The dataset of a tutorial on the speed of ViT: random images, which need no files."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset


class FakeDataset(Dataset):
    """Random images [3, side, side], and labels [1] below `classes`."""

    def __init__(self, length: int = 1_000_000, side: int = 224, classes: int = 1000) -> None:
        self.length, self.side, self.classes = length, side, classes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = torch.randn([3, self.side, self.side], dtype=torch.float32)
        return image, torch.tensor([index % self.classes], dtype=torch.int64)


class ChannelsLast(FakeDataset):
    """The same images with the channels last, [side, side, 3], as the trainer expects them."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = super().__getitem__(index)
        return image.permute(1, 2, 0), label


def loader(**sizes: int) -> DataLoader:
    """Return the DataLoader that job.yaml names.

    The trainer uses its dataset and, by default, its number of workers. Batch size and order are
    those of the job.
    """
    return DataLoader(ChannelsLast(**sizes), batch_size=8, shuffle=True, num_workers=2)
