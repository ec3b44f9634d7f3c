"""The positions of a ViT for images of another size than its folder's, as transformers and PyTorch interpolate them.

N positions: a class token's, then those of the patches, row by row; D model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int]  # rows and columns of patches
CURVE = -0.75  # of the cubic between two places; PyTorch's


def interpolated(positions_ND: NDArray[np.float32], given: Grid, wanted: Grid) -> NDArray[np.float32]:
    """The positions of a grid of patches, from those of another: bicubic, and the class token's as it is."""
    patches_YXD = positions_ND[1:].reshape(*given, -1).astype(np.float64)
    rows, columns = (_weights(*sizes) for sizes in zip(given, wanted, strict=True))
    patches_YXD = np.einsum("ry,cx,yxd->rcd", rows, columns, patches_YXD, optimize=True)
    return np.concatenate([positions_ND[:1], patches_YXD.reshape(wanted[0] * wanted[1], -1)]).astype(np.float32)


def _weights(given: int, wanted: int) -> NDArray[np.float64]:
    """What each of the places given counts in each of those wanted; beyond an edge it repeats the place there."""
    matrix = np.zeros((wanted, given))
    places = (np.arange(wanted) + 0.5) * given / wanted - 0.5
    for offset in range(-1, 3):
        neighbours = np.floor(places) + offset
        away = np.abs(places - neighbours)
        near = ((CURVE + 2) * away - (CURVE + 3)) * away**2 + 1
        far = CURVE * (((away - 5) * away + 8) * away - 4)
        np.add.at(
            matrix,
            (np.arange(wanted), np.clip(neighbours, 0, given - 1).astype(int)),
            np.where(away <= 1, near, far),
        )
    return matrix
