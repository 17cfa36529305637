"""Random state and loaders: an extra pass over the training data changes nothing that training draws afterwards."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from aswa_hf._utils.random_state import preserved_rng, rewound
from aswa_hf.batchnorm import Recalibration


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_global_random_state_is_as_if_the_block_had_drawn_nothing():
    for context in (preserved_rng(), preserved_rng(seed=3)):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        expected = [draw(), draw()]
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        seen = [draw()]
        with suppress(KeyError), context:
            draw()
            raise KeyError
        assert [*seen, draw()] == expected
        assert torch.initial_seed() == 0


def test_a_seed_makes_the_block_draw_the_same_every_time():
    drawn = []
    for _ in range(2):
        draw()
        with preserved_rng(seed=7):
            drawn.append(draw())
    assert drawn[0] == drawn[1]


# Loaders: what training reads with recalibrations in between must be what it reads without them.


def plain() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(12.0).reshape(12, 1)), batch_size=4, shuffle=True)


def with_a_generator() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(
        TensorDataset(torch.arange(12.0).reshape(12, 1)), batch_size=4, shuffle=True, generator=generator
    )


def with_a_samplers_generator() -> DataLoader:
    dataset = TensorDataset(torch.arange(12.0).reshape(12, 1))
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(5))
    return DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, drop_last=False))


class Augmented(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (index + torch.rand(1),)


def with_workers_that_stay() -> DataLoader:
    return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)


def prepared() -> DataLoader:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    return accelerator.prepare_data_loader(with_a_generator())


def prepared_with_workers_that_stay() -> DataLoader:
    return Accelerator(cpu=True).prepare_data_loader(with_workers_that_stay())


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def read(build, recalibrate_at: str, limit: int | None = None) -> list:
    """Three epochs of training reads, and what accelerate believes at every batch."""
    torch.manual_seed(0)
    loader, model, seen = build(), nn.BatchNorm1d(1), []
    recalibrate = Recalibration(model, loader, limit=limit)
    for _ in range(3):
        for index, (batch,) in enumerate(loader):
            if recalibrate_at == "mid-epoch" and index == 1:
                recalibrate()
            state = GradientState()
            seen.append((batch.flatten().tolist(), state.in_dataloader, state.end_of_dataloader, state.remainder))
        if recalibrate_at == "epoch end":
            recalibrate()
        seen.append((torch.rand(()).item(), GradientState().in_dataloader))
    return seen


LOADERS = [
    plain,
    with_a_generator,
    with_a_samplers_generator,
    with_workers_that_stay,
    prepared,
    prepared_with_workers_that_stay,
]


@pytest.mark.parametrize("build", LOADERS)
@pytest.mark.parametrize("recalibrate_at", ["epoch end", "mid-epoch"])
@pytest.mark.parametrize("limit", [None, 1, 3])
def test_training_reads_the_same_batches_with_and_without_recalibration(build, recalibrate_at, limit):
    expected = read(build, "never")
    assert [entry[2] for entry in expected if len(entry) == 4] == [False, False, "prepared" in build.__name__] * 3
    assert read(build, recalibrate_at, limit) == expected


@pytest.mark.parametrize("build", [with_a_generator, with_a_samplers_generator, prepared])
def test_every_pass_sees_the_batches_in_the_same_order(build):
    loader, orders = build(), []
    for _ in range(2):
        with preserved_rng(seed=0), rewound(loader):
            orders.append([batch.flatten().tolist() for (batch,) in loader])
        list(loader)
    assert orders[0] == orders[1]
    assert orders[0] != sorted(orders[0])


def test_a_pass_that_fails_leaves_accelerates_loader_as_it_was():
    loader = prepared()
    recalibrate = Recalibration(nn.BatchNorm1d(1), loader, forward=lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recalibrate()
    assert not GradientState().in_dataloader
    assert (loader.iteration, loader.end_of_dataloader) == (0, False)
