"""The unmodified model, trained in this process on the same data and initial weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from transformers.utils import logging  # noqa: TID253

from slapo_core import create_schedule, init_empty_weights, materialize, set_random_seed

from ..run_data.settings import Settings
from .corpus import Corpus
from .model_folder import folder_weights
from .models import auto_class, build_config, build_model


def reference_losses(settings: Settings, corpus: Corpus) -> Iterator[float]:
    """Loss of each step of the unmodified model: whole batches, plain torch, one process, fp32."""
    model = unmodified_model(settings)
    set_random_seed(settings.seed)
    optimizer = make_optimizer(settings)(model.parameters())
    for batch in corpus.batches(settings):
        optimizer.zero_grad()
        loss = model(**{name: tensor.to(settings.device) for name, tensor in batch.items()}).loss
        loss.backward()
        optimizer.step()
        yield loss.item()


def unmodified_model(settings: Settings) -> nn.Module:
    """The model with the initial weights that every layout of a run starts from."""
    if folder := folder_weights(settings):
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        config = build_config(settings)
        trained: nn.Module = auto_class(config).from_pretrained(folder, config=config, dtype=torch.float32)
        return trained.train().to(settings.device)
    with init_empty_weights():
        model = build_model(settings)
    create_schedule(model)  # changes nothing: it names the parameters, and their names are the seeds of their values
    materialize(model, seed=settings.seed, device=settings.device)
    return model.to(settings.device)


def make_optimizer(settings: Settings) -> Callable[..., torch.optim.Optimizer]:
    """The factory ``parameters -> optimizer`` of both runs."""
    return partial(torch.optim.AdamW, lr=settings.lr)
