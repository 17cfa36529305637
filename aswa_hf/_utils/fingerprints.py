"""Whether two sets of weights are equal, without keeping both."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

_CHUNK = 1 << 18
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Returns 64-bit sums over the bits of tensors: equal tensors have equal ones, others practically never.

    Each word is multiplied by a random number of its place, modulo 2^64.
    """
    sums = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        words = flat.view(_WORDS[flat.element_size()])
        for place, chunk in enumerate(words.split(_CHUNK)):
            if len(chunk):
                factors = _factors(chunk.device)[: len(chunk)]
                # The sum of the chunk is not enough: chunks may have changed places.
                sums.append((chunk.long() * factors).sum() * (2 * place + 1))
    return tuple(torch.stack([one.cpu() for one in sums]).tolist()) if sums else ()


@cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(1 << 62), 1 << 62, (_CHUNK,), dtype=torch.int64, generator=generator)
    return (2 * drawn + 1).to(device)
