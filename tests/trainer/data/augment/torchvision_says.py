"""Prints what torchvision makes of images: a program for its environment, without our code.

Arguments: a folder that holds torchvision, an .npz with `image_S` uint8 [H, W, C] for each size,
and the .npz to write.
"""

import sys

import numpy as np

sys.path.append(sys.argv[1])
import torch  # noqa: E402 (the path is set first)
from PIL import Image  # noqa: E402 (the path is set first)
from torchvision.transforms import InterpolationMode, autoaugment, functional  # noqa: E402 (the path is set first)
from torchvision.transforms.v2 import functional as v2  # noqa: E402 (the path is set first)

NAMES = {
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x": "TranslateX",
    "translate_y": "TranslateY",
    "rotate": "Rotate",
    "brightness": "Brightness",
    "saturation": "Color",
    "contrast": "Contrast",
    "sharpness": "Sharpness",
    "posterize": "Posterize",
    "solarize": "Solarize",
    "autocontrast": "AutoContrast",
    "equalize": "Equalize",
}
inputs, made = np.load(sys.argv[2]), {}
image = inputs["image"]
tensor = torch.from_numpy(image).permute(2, 0, 1)
height, width = image.shape[:2]
of_rand, of_mix = autoaugment.RandAugment(), autoaugment.AugMix()
for space, name_of, step in (
    (of_rand._augmentation_space(31, (height, width)), "rand", 9),
    (of_mix._augmentation_space(10, (height, width)), "mix", 2),
    (of_mix._augmentation_space(10, (height, width)), "strong", 9),
):
    for ours, theirs in NAMES.items():
        magnitudes, signed = space[theirs]
        by = float(magnitudes[step].item()) if magnitudes.ndim else 0.0
        for sign in (1.0, -1.0) if signed else (1.0,):
            key = f"{name_of}/{ours}/{'-' if sign < 0 else '+'}"
            apply = autoaugment._apply_op
            # The geometry of PIL images, whose pixels move as a whole; the colours of tensors,
            # without Pillow.
            if ours in ("shear_x", "shear_y", "translate_x", "translate_y", "rotate"):
                made[key] = np.asarray(
                    apply(
                        Image.fromarray(image), theirs, sign * by, InterpolationMode.NEAREST, None
                    )
                )
            else:
                made[key] = (
                    apply(tensor, theirs, sign * by, InterpolationMode.NEAREST, None)
                    .permute(1, 2, 0)
                    .numpy()
                )
for turn in (-0.3, 0.1, 0.5):
    made[f"hue/{turn}"] = functional.adjust_hue(tensor, turn).permute(1, 2, 0).numpy()
top, left, high, wide = (int(edge) for edge in inputs["box"])
size = [int(edge) for edge in inputs["size"]]
cropped = v2.resized_crop(tensor, top, left, high, wide, size, antialias=True)
made["resized_crop"] = cropped.permute(1, 2, 0).numpy()
seen = v2.center_crop(v2.resize(tensor, [int(inputs["short"])], antialias=True), size)
made["center_crop"] = seen.permute(1, 2, 0).numpy()
np.savez(sys.argv[3], **made)
