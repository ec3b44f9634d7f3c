"""A dataset of torch's, as its tutorials write them: map-style, tensors, labels of shape [1]."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

sys.path.append(os.environ["TORCH_LIBRARIES"])  # behind our own: numpy is one of both

import torch  # noqa: E402


class RandomImages(torch.utils.data.Dataset):  # type: ignore[misc]
    """Random images [224, 224, 3], each a function of its index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = np.random.default_rng(index).random((224, 224, 3), np.float32)
        return torch.from_numpy(image), torch.tensor([index % 1000])
