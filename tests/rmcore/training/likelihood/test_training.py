"""Training on observations of all kinds: what it leaves, resumed or not, with adapters, packed or padded."""

import signal

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError
from rmcore.core.progress import silent
from rmcore.core.tracking import MemoryTracker, NullTracker
from rmcore.data.pair import PreferencePair
from rmcore.data.tokenized_observations import open_observations_tokenized, write_observations_tokenized
from rmcore.models.attributes import load_attributes, read_attributes
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.order import training_of
from rmcore.stages.train import train_into
from rmcore.training.loop import Trainer, make_context
from rmcore.training.material import Material, attach, make_design, read_likelihood
from rmcore.training.step import accumulate_gradient
from rmcore.training.train_mode import training_form
from tests.support.random_models import hugging_face_rewards

CPU = torch.device("cpu")
MIXTURE = ("pair", "tie", "ranking", "best", "attributes")
TRAIN = {
    "steps": 6, "eval_every": 3, "log_every": 1, "lr": 1e-3, "pairs_per_step": 8, "warmup_steps": 0,
    "token_budget": 512, "resume_every_seconds": 1e9,
}  # fmt: skip
HELD_OUT = [PreferencePair(f"question {at}", f"a good answer {at}", f"a bad one {at}") for at in range(6)]


def make_trainer(folder, observations, *, stop=None, model=None, weights=None, **changes) -> Trainer:
    config = TrainConfig(**{**TRAIN, **changes})
    design = make_design(config, observations, weights)
    rm = BradleyTerryRM.new(
        ModelConfig.model_validate({"name": "tiny-small", "max_seq_len": 96} | (model or {})), seed=0, device=CPU
    )
    attach(rm, design)
    place = folder / "tokens"
    write_observations_tokenized(rm.renderer, observations, place, design.coding, over_length="cut")
    read = open_observations_tokenized(place, len(observations))
    assert not read.num_left_out
    return Trainer(
        rm,
        config,
        train=read.observations,
        validation=rm.renderer.tokenize_pairs(HELD_OUT),
        folder=folder / "out",
        tracker=MemoryTracker(),
        seed=3,
        settings=Material(observations, design).settings(),
        report=(lambda step, total, text: stop(step)) if stop else silent,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "given", "weights"),
    [
        ({}, {"helpfulness": 1.0, "length": -0.5, "safe": 0.25}, {"helpfulness": 1.0, "length": -0.5, "safe": 0.25}),
        ({"lora": {}}, None, {"helpfulness": 1.0, "length": 0.0, "safe": 0.0}),
    ],
    ids=["full", "lora"],
)
def test_a_checkpoint_is_a_plain_reward_model_with_its_likelihood_beside_it(
    observations_of, tmp_path, model, given, weights
) -> None:
    """Its attributes, weighed as given, sum to its reward."""
    trainer = make_trainer(tmp_path, observations_of(60, kinds=MIXTURE), model=model, weights=given)
    before = {name: one.clone() for name, one in trainer.rm.model.named_parameters() if "likelihood." in name}
    result = trainer.run()
    assert result.num_steps == TRAIN["steps"]
    after = dict(trainer.rm.model.named_parameters())
    assert all(not torch.equal(one, after[name]) for name, one in before.items())
    best = tmp_path / "out" / "step_6"
    assert AutoConfig.from_pretrained(best).num_labels == 1
    rm = BradleyTerryRM.from_pretrained(best, device="cpu")
    sides = rm.renderer.tokenize_sides([(pair.prompt, pair.chosen) for pair in HELD_OUT])
    by_transformers = hugging_face_rewards(best, sides)
    np.testing.assert_allclose(rm.score_sides(sides), by_transformers, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trainer.rm.score_sides(sides), by_transformers, rtol=1e-4, atol=1e-5)
    likelihood = read_likelihood(best)
    assert likelihood is not None
    assert len(likelihood.design.tie_odds) == 2
    assert read_attributes(best) == pytest.approx(weights)
    if given is not None:
        assert load_attributes(rm.model, best) == weights
        outputs = rm.score_outputs(sides)
        np.testing.assert_allclose(outputs[:, 0], by_transformers, rtol=1e-4, atol=1e-5)
        combined = outputs[:, 1:] @ np.array(list(weights.values()))
        np.testing.assert_allclose(combined, by_transformers, rtol=1e-4, atol=1e-5)
    if model:
        adapter = BradleyTerryRM.from_pretrained(best / "adapter", device="cpu")
        np.testing.assert_allclose(adapter.score_sides(sides), by_transformers, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_training_that_was_stopped_ends_in_the_same_bits(observations_of, tmp_path) -> None:
    observations = observations_of(60, kinds=MIXTURE)
    whole = make_trainer(tmp_path / "whole", observations)
    whole.run()

    def stop(step: int) -> None:
        if step == 4:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path / "cut", observations, stop=stop).run()
    resumed = make_trainer(tmp_path / "cut", observations)
    assert resumed.run().resumed_from == [4]
    expected = whole.rm.model.state_dict()
    assert all(torch.equal(one, expected[name]) for name, one in resumed.rm.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["pairs.train", "pairs.validation", "likelihood"])
def test_a_stage_does_not_resume_with_other_pairs_or_another_likelihood(observations_of, tmp_path, changed) -> None:
    config = PipelineConfig.model_validate({"model": {"name": "tiny-small", "max_seq_len": 96}, "train": TRAIN})
    settings, other = training_of(config), HELD_OUT[::-1]
    material = {"observations": observations_of(60, kinds=MIXTURE) if changed == "likelihood" else None}

    def stop(done: int, total: int, text: str) -> None:
        if (done, total) == (2, TRAIN["steps"]):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_into(settings, HELD_OUT, HELD_OUT, tmp_path, NullTracker(), stop, **material)
    train, validation = (other if changed == f"pairs.{name}" else HELD_OUT for name in ("train", "validation"))
    if changed == "likelihood":
        settings = settings.model_copy(update={"attribute_weights": {"safe": 1.0}})
    with pytest.raises(ConfigError, match=f"{changed}: .* there, .* here"):
        train_into(settings, train, validation, tmp_path, NullTracker(), silent, **material)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [200, 100_000])
def test_packed_and_padded_in_any_cut_have_one_gradient(observations_of, tmp_path, budget) -> None:
    observations = observations_of(20, kinds=MIXTURE)
    gradients = []
    for packing in (True, False):
        trainer = make_trainer(
            tmp_path / str(packing), observations, packing=packing, token_budget=budget if packing else 400
        )
        assert (trainer.packing is not None) == packing
        trainer.rm.model.double()
        with training_form(trainer.rm, trainer.config):
            context = make_context(trainer.rm, trainer.config, trainer.ranks)
            indices = list(range(20))
            accumulate_gradient(
                context, trainer.feed.cut(indices, trainer.feed.token_budget), num_terms=trainer.feed.num_terms(indices)
            )
        gradients.append({n: p.grad for n, p in trainer.rm.model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, one in gradients[0].items():
        assert float((one - gradients[1][name]).norm() / one.norm()) < 1e-6, name
