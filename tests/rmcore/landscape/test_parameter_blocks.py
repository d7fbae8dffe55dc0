"""The blocks that a model falls into: every parameter once, in order, and each block chosen by its name."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import exact_models
from rmcore.landscape.parameters import parameter_blocks, select_parameters

DEEP, LAYERS, MAKERS = exact_models.DEEP, exact_models.LAYERS, exact_models.MAKERS
deep, trained_names = exact_models.deep, exact_models.trained_names


@pytest.mark.parametrize("kind", MAKERS)
def test_blocks_hold_every_name_once_in_order(kind):
    names = trained_names(deep(kind))
    blocks = parameter_blocks(names)
    assert [name for members in blocks.values() for name in members] == list(names)
    layers = [block for block in blocks if block.startswith(f"{LAYERS[kind]}.")]
    assert layers == [f"{LAYERS[kind]}.{index}" for index in range(DEEP)]
    assert [block for block in blocks if block not in layers] == {
        "qwen2": ["embeddings", "model.norm", "head"],
        "llama": ["embeddings", "model.norm", "head"],
        "bert": ["embeddings", "bert.pooler.dense", "head"],
        "roberta": ["embeddings", "head"],
        "lora": ["head"],
    }[kind]


@pytest.mark.parametrize("kind", MAKERS)
def test_every_block_can_be_chosen_by_its_name(kind):
    for block, names in parameter_blocks(trained_names(deep(kind))).items():
        assert tuple(select_parameters(deep(kind), block)) == names


def test_a_head_of_several_layers_is_one_block():
    names = ["model.layers.0.weight", "score.0.weight", "score.2.weight"]
    assert parameter_blocks(names) == {"model.layers.0": (names[0],), "head": tuple(names[1:])}


body = st.lists(st.sampled_from(["model", "layers", "0", "1", "10", "norm", "mlp"]), max_size=4)
head = st.sampled_from([["score"], ["score", "0"], ["classifier", "out_proj"]])
embeddings = st.sampled_from([["model", "embed_tokens"], ["bert", "embeddings", "norm"], ["bert", "embeddings"]])


@st.composite
def trees(draw):
    """A module with parameters at drawn dotted names; heads and embeddings stand outside of the layers."""
    paths = st.tuples(st.one_of(body, head, embeddings), st.sampled_from(["weight", "bias"]))
    root = nn.Module()
    for path, leaf in draw(st.lists(paths, min_size=1, max_size=8)):
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.zeros(1)))
    return root


@given(trees())
def test_blocks_are_a_partition_that_keeps_the_order_and_each_is_chosen_by_its_name(module):
    names = trained_names(module)
    blocks = parameter_blocks(names)
    assert sorted(name for members in blocks.values() for name in members) == sorted(names)
    firsts = [names.index(members[0]) for members in blocks.values()]
    assert firsts == sorted(firsts)
    for block, members in blocks.items():
        assert list(members) == [name for name in names if name in members]
        assert tuple(select_parameters(module, block)) == members
