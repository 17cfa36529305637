"""Fingerprints of weights: equal for equal bits, different for any change."""

import pytest
import torch

from aswa_hf._utils import fingerprints
from aswa_hf._utils.fingerprints import fingerprint


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.cfloat]
)
def test_equal_tensors_have_equal_fingerprints_and_changed_ones_others(dtype, monkeypatch):
    monkeypatch.setattr(fingerprints, "_CHUNK", 8)
    fingerprints._factors.cache_clear()
    tensors = [torch.arange(1, 31).reshape(5, 6).to(dtype), torch.zeros(0).to(dtype), torch.tensor(1).to(dtype)]
    found = fingerprint(tensors)
    assert found == fingerprint([tensor.clone() for tensor in tensors])
    assert found == fingerprint([tensors[0].T.contiguous().T, *tensors[1:]])  # the same numbers in another order
    changed = tensors[0].clone()
    changed[4, 5] = 0
    assert found != fingerprint([changed, *tensors[1:]])
    if dtype is not torch.bool:
        swapped = tensors[0].flatten().roll(8).reshape(5, 6)  # whole chunks in other places
        assert found != fingerprint([swapped, *tensors[1:]])
    fingerprints._factors.cache_clear()
