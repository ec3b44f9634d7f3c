"""Quantized weights are dequantized where they are read."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlaunch.trainer.huggingface.tensor_files import TensorFiles

CODES = {"F8_E4M3": jnp.float8_e4m3fn, "F32": np.float32, "U8": np.uint8}


def write_tensors(folder, **tensors):
    """Write a safetensors file: its header, and the bytes of the tensors."""
    header, data = {}, b""
    for name, (code, array) in tensors.items():
        content = np.asarray(array).astype(CODES[code]).tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": code, "shape": [*np.shape(array)], "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + data
    (folder / "model.safetensors").write_bytes(content)
    return TensorFiles(str(folder), dequantizes=True)


PARTS = [
    (slice(None), slice(None)),
    (slice(100, 260), slice(0, 130)),
    (slice(255, 257), slice(127, 129)),
    (slice(299, 300), slice(4, 5)),
]


@pytest.mark.parametrize("part", PARTS)
def test_fp8_values_have_the_factor_of_their_block(tmp_path, part):
    rng = np.random.default_rng(0)
    # Blocks at the ends are smaller.
    values = rng.normal(size=(300, 200)).astype(jnp.float8_e4m3fn)
    factors = rng.random((3, 2)).astype(np.float32)
    files = write_tensors(
        tmp_path, **{"a.weight": ("F8_E4M3", values), "a.weight_scale_inv": ("F32", factors)}
    )
    assert [*files] == ["a.weight"]
    rows, columns = np.indices(values.shape) // 128
    expected = values.astype(np.float32) * factors[rows, columns]
    tensor = files["a.weight"]
    assert (tensor.get_shape(), files.tensor_dtype("a.weight")) == ([300, 200], np.float32)
    np.testing.assert_array_equal(tensor[part], expected[part])
    np.testing.assert_array_equal(tensor[...], expected)


def test_blocks_of_another_size_and_single_factors(tmp_path):
    values = np.arange(16.0).reshape(4, 4)
    files = write_tensors(
        tmp_path,
        **{
            "a.weight": ("F8_E4M3", np.ones((256, 64))),
            "a.weight_scale_inv": ("F32", np.arange(16.0).reshape(8, 2)),
            "b.weight": ("F8_E4M3", values),
            "b.weight_scale_inv": ("F32", 2.0),
        },
    )
    expected = np.arange(16.0).reshape(8, 2).repeat(32, 0).repeat(32, 1)
    np.testing.assert_array_equal(files["a.weight"][:, :], expected)
    np.testing.assert_array_equal(files["b.weight"][1:3, :], 2 * values[1:3])


@pytest.mark.parametrize(
    "part",
    [
        (slice(None), slice(None), slice(None)),
        (slice(1, 2), slice(30, 70), slice(2, 5)),
        (slice(0, 2), slice(95, 96), slice(0, 1)),
    ],
)
def test_mxfp4_values_are_pairs_with_a_power_of_two(tmp_path, part):
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (2, 5, 3, 16)), rng.integers(120, 130, (2, 5, 3))
    files = write_tensors(tmp_path, w_blocks=("U8", blocks), w_scales=("U8", scales))
    assert [*files] == ["w"]
    assert files["w"].get_shape() == [2, 96, 5]
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = np.zeros((2, 96, 5), np.float32)
    for expert, output, group, pair in np.ndindex(*blocks.shape):
        byte = blocks[expert, output, group, pair]
        for half, code in enumerate((byte % 16, byte // 16)):
            value = sizes[code % 8] * (-1 if code >= 8 else 1)
            value *= 2.0 ** (scales[expert, output, group] - 127)
            expected[expert, 32 * group + 2 * pair + half, output] = value
    np.testing.assert_array_equal(files["w"][part], expected[part])
