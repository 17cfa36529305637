"""safetensors files of any content: a damaged one is one line with the file and the tensor."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from aswa_hf._utils.tensors import is_finite, load_tensors, load_weights, open_tensors


def written(path, header, data=b"", length=None):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def tensor(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


DAMAGES = {
    "lying offsets": ({"w": tensor(offsets=(0, 4))}, "the offsets of the tensor 'w' do not match its shape"),
    "reversed offsets": ({"w": tensor(offsets=(8, 0))}, "the offsets of the tensor 'w' do not match its shape"),
    "a gap": ({"w": tensor(offsets=(4, 12))}, "the offsets of the tensor 'w' do not match its shape"),
    "a negative shape": ({"w": tensor(shape=(-2, -1))}, "the offsets of the tensor 'w' do not match its shape"),
    "a huge shape": ({"w": tensor(shape=(2**40, 2**40))}, "the offsets of the tensor 'w' do not match its shape"),
    "beyond the end": ({"w": tensor((4,), (0, 16))}, "is truncated: .* the tensor 'w' ends at byte"),
    "no offsets": ({"w": {"dtype": "F32"}}, "the tensor 'w' has no offsets"),
    "a shape of text": ({"w": tensor("ab")}, r"w.shape\[0\] is 'a', expected an integer"),
    "a tensor that is a number": ({"w": 3}, "w is 3, expected an object"),
    "a list": ([1], "expected an object"),
    "not JSON": ("x" * 10, "is not a safetensors file: its header is not a JSON file"),
    "nested deeply": ("[" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_one_line_with_the_file_and_the_tensor(tmp_path, kind):
    header, message = DAMAGES[kind]
    written(tmp_path / "w.safetensors", header, bytes(8))
    with pytest.raises(ValueError, match=message) as caught:
        load_tensors(tmp_path / "w.safetensors")
    assert str(caught.value).startswith(str(tmp_path / "w.safetensors"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"abc", bytes(8), b"\xff" * 100, b"version https://git-lfs"])
def test_bytes_of_another_kind_are_one_line(tmp_path, content):
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"w\.safetensors"), open_tensors(tmp_path / "w.safetensors"):
        pass


def test_what_safetensors_wrote_is_read_back(tmp_path):
    tensors = {name: torch.ones(3, dtype=dtype) for name, dtype in (("a", torch.bfloat16), ("b", torch.float8_e5m2))}
    tensors |= {"empty": torch.ones(0, 4), "scalar": torch.tensor(2)}
    save_file(tensors, tmp_path / "w.safetensors", metadata={"format": "pt"})
    found = load_tensors(tmp_path / "w.safetensors")
    assert {name: (t.dtype, t.tolist()) for name, t in found.items()} == {
        name: (t.dtype, t.tolist()) for name, t in tensors.items()
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": None}, "'bias' is missing"),
        ({"more": torch.ones(1)}, "'more' is unexpected"),
        ({"weight": torch.ones(1, 2)}, r"'weight' has the shape \(1, 2\), expected \(2, 2\)"),
        ({"weight": torch.full((2, 2), torch.inf)}, "'weight' has NaN or infinite numbers"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change, message):
    model = torch.nn.Linear(2, 2)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    weights = {name: t for name, t in ({name: t + 1 for name, t in before.items()} | change).items() if t is not None}
    with pytest.raises(ValueError, match=f"^a file does not hold the weights of this Linear: {message}"):
        load_weights(model, weights, "a file")
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_numbers_that_are_not_finite_are_found_wherever_they_are(dtype):
    numbers = torch.arange(-6.0, 6.0).view(3, 4).to(dtype)
    assert is_finite(numbers)
    for place in range(12):
        for number in (math.nan, math.inf, -math.inf):
            changed = numbers.float().flatten()
            changed[place] = number
            assert not is_finite(changed.view(3, 4).to(dtype))
    assert is_finite(torch.tensor([], dtype=dtype))
    assert is_finite(torch.tensor([1, 2]))
