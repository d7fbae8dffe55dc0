"""Which parameters a name stands for, which models are refused, and the state in which one is measured."""

from types import SimpleNamespace

import pytest
import torch

import exact_models
from rmcore.core.errors import ConfigError, CurvatureError, ModelError
from rmcore.landscape.operators import LossHessian, reward_module, select_parameters

DEEP, LAYERS, MAKERS = exact_models.DEEP, exact_models.LAYERS, exact_models.MAKERS
deep, trained_names = exact_models.deep, exact_models.trained_names

ROWS = exact_models.draw_rows(6)
# What a name stands for.


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen2", ("score.weight",)),
        ("llama", ("score.weight",)),
        ("bert", ("classifier.weight", "classifier.bias")),
        (
            "roberta",
            tuple(f"classifier.{p}" for p in ("dense.weight", "dense.bias", "out_proj.weight", "out_proj.bias")),
        ),
        ("lora", ("base_model.model.score.modules_to_save.default.weight",)),
    ],
)
def test_head_is_the_reward_head_alone(kind, names):
    assert tuple(select_parameters(deep(kind), "head")) == names


def test_lora_is_the_adapters_without_the_head_and_without_the_frozen_base():
    found = select_parameters(deep("lora"), "lora")
    assert len(found) == DEEP * 2 * 2
    assert {name.split(".")[-3] for name in found} == {"lora_A", "lora_B"}
    assert all(parameter.requires_grad for parameter in found.values())


@pytest.mark.parametrize("kind", MAKERS)
def test_a_layer_is_that_layer_and_not_those_whose_number_starts_alike(kind):
    model = deep(kind)
    layer = f"{LAYERS[kind]}.1"
    found = select_parameters(model, layer)
    module = model.get_submodule(layer)
    assert {id(p) for p in found.values()} == {id(p) for p in module.parameters() if p.requires_grad}
    assert found


@pytest.mark.parametrize("parameters", ["model.layers.0.mlp.up_proj.weight", "model.norm", "head"])
def test_the_curvature_of_a_part_is_the_sub_block_and_the_rest_stays_trainable(parameters):
    model = exact_models.exact(exact_models.make_model("qwen2"))
    whole, part = (LossHessian(model, [ROWS], parameters=chosen) for chosen in ("all", parameters))
    inside = torch.cat([torch.full((p.numel(),), name in part.names) for name, p in model.named_parameters()])
    vectors = exact_models.random_vectors(2, part.num_parameters)
    padded = torch.zeros(2, whole.num_parameters, dtype=torch.float64)
    padded[:, inside] = vectors
    expected = whole.products(padded)[:, inside]
    assert exact_models.relative_error(part.products(vectors), expected) < exact_models.ROUNDING
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


# What is refused.


@pytest.mark.parametrize(
    ("wrong", "near"), [("layers.3.mlp", "model.layers.3.mlp"), ("heads", "head"), ("score.wieght", "score.weight")]
)
def test_an_unknown_name_is_answered_with_near_ones(wrong, near):
    with pytest.raises(ConfigError, match="names nothing in this model") as caught:
        LossHessian(deep("qwen2"), [ROWS], parameters=wrong)
    suggestions = str(caught.value).partition("such as ")[2]
    assert near in suggestions.rstrip(".").split(", ")


def test_a_named_set_that_the_model_lacks_is_refused():
    with pytest.raises(ModelError, match="no module is named lora_A"):
        select_parameters(deep("qwen2"), "lora")
    with pytest.raises(ModelError, match="no module is named score, classifier"):
        select_parameters(deep("qwen2").model, "head")


@pytest.mark.parametrize("parameters", ["all", "head"])
def test_frozen_parameters_are_refused(parameters):
    model = exact_models.make_model("llama", num_layers=2).requires_grad_(False)
    with pytest.raises(ModelError, match=r"all \d+ are frozen.*requires_grad_"):
        LossHessian(model, [ROWS], parameters=parameters)
    model.model.layers[0].requires_grad_(True)
    if parameters == "all":
        assert set(LossHessian(model, [ROWS]).names) == set(trained_names(model))
    else:
        with pytest.raises(ModelError, match="frozen"):
            LossHessian(model, [ROWS], parameters=parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiled",
    [lambda model: model.model.layers[0].compile() or model, lambda model: SimpleNamespace(model=torch.compile(model))],
    ids=["one layer in place", "inside a wrapper"],
)
def test_compiled_models_are_refused(compiled):
    with pytest.raises(CurvatureError, match="compiled"):
        reward_module(compiled(exact_models.make_model("llama")))


# The state in which a model is measured.
