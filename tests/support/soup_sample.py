"""Reward models to average: fitted heads on one random backbone, and one function far away in weight space."""

import copy

import torch

from rmcore.ensembles.features import head_of, pair_features
from rmcore.ensembles.linear_probes import fit_head


def fitted(rm, pairs):
    """A copy whose head is fitted on `pairs`, so that it ranks most of them right."""
    chosen, rejected = pair_features(rm, pairs)
    twin = copy.deepcopy(rm)
    with torch.no_grad():
        head = torch.from_numpy(fit_head(chosen - rejected))
        head_of(twin).weight.copy_(head[None])
    return twin


def nudged(rm, seed, size=1e-4):
    """A copy with all weights moved a little: in one basin with the first."""
    twin = copy.deepcopy(rm)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return twin


def permuted(rm, seed=0):
    """The same function with the hidden units of the residual stream in another order: far away in weight space."""
    twin = copy.deepcopy(rm)
    width = twin.model.config.hidden_size
    order = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    inputs = ("embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "score")
    with torch.no_grad():
        for name, parameter in twin.model.named_parameters():
            kind = name.split(".")[-2]
            if kind in inputs and name.endswith("weight"):
                parameter.copy_(parameter[:, order])
            elif kind in ("o_proj", "down_proj") or "norm" in kind:
                assert parameter.shape[0] == width
                parameter.copy_(parameter[order])
    return twin
