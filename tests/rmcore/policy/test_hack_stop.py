"""`HackStop` in real trainings by TRL: it ends where gold falls, keeps the best, and asks nothing twice."""

import json

import numpy as np
import pytest
import torch

import small_policies as policies
from rmcore.config.rlhf import RlhfConfig, WatchConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.policy.grpo.grpo import make_grpo_with_rm
from rmcore.policy.grpo.hack_stop import HackStop
from rmcore.policy.grpo.policy_in_training import Snapshots
from rmcore.policy.judge import HookJudge
from rmcore.policy.policy import Policy
from rmcore.policy.stopping.pair_judges import PeopleJudge, ScoreJudge
from small_policies import TextScorer, same, weights

pytestmark = pytest.mark.slow

PROMPTS = [f"What is {number} + 2?" for number in range(1300)]
TRAINED = ["What is 2 + 2?", "What is 2 + 3?", "Say a"]
SETTINGS = RlhfConfig(steps=8, prompts_per_step=3, group_size=8, measure_every=2, learning_rate=2e-3, kl_beta=0.01)
WATCH = WatchConfig(labels=160, final_labels=60)


class CutError(Exception):
    """The training is cut off here."""


class Judge:
    """A judge of single responses, whose questions are counted; after `limit` of them the process is gone."""

    def __init__(self, score, limit=10**9):
        self.asked, self.score, self.limit = 0, score, limit
        self.of_pairs = ScoreJudge(HookJudge("test:judge", self))

    def __call__(self, prompt, response):
        if self.asked >= self.limit:
            raise CutError
        self.asked += 1
        return self.score(response)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = policies.new_policy(tmp_path_factory.mktemp("policy"), eos_token_id=policies.STOPS)
    return Policy.load(folder)


def trainer_of(policy, out, settings, *callbacks):
    return make_grpo_with_rm(
        policy,
        TRAINED,
        TextScorer(lambda text: text.count("a")),
        out=out,
        settings=settings,
        max_new_tokens=12,
        device="cpu",
        callbacks=callbacks,
    )


def train(policy, out, judge, settings=SETTINGS, watch=WATCH, resume=None, **given):
    stop = HackStop(
        PROMPTS, judge, out / "watch", settings=watch, every=settings.measure_every,
        max_new_tokens=12, seed=3, **given,
    )  # fmt: skip
    trainer = trainer_of(policy, out, settings, stop)
    stop.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return stop, trainer


def test_a_reward_that_the_judge_hates_ends_early_and_leaves_the_start(policy, tmp_path):
    judge = Judge(lambda text: -float(text.count("a")))
    settings = SETTINGS.model_copy(update={"steps": 40, "learning_rate": 4e-3})
    stop, trainer = train(policy, tmp_path, judge.of_pairs, settings, WATCH.model_copy(update={"labels": 600}))
    assert stop.stopped is not None
    assert trainer.state.global_step < 40
    assert stop.best == 0
    kept = weights(trainer.model)
    Snapshots(tmp_path / "watch" / "snapshots").load(trainer.model, 0)
    assert same(kept, weights(trainer.model))
    assert stop.final_gain(trainer.model, PROMPTS[:30]) is None
    assert judge.asked == stop.labels_used <= 600 + 48


def test_a_reward_that_the_judge_shares_is_gained_and_measured_on_other_prompts(policy, tmp_path):
    judge = Judge(lambda text: float(text.count("a")))
    stop, trainer = train(policy, tmp_path, judge.of_pairs, SETTINGS.model_copy(update={"steps": 16}))
    assert stop.best > 0
    assert stop.looks[-1].kl > 0
    kept = weights(trainer.model)
    Snapshots(tmp_path / "watch" / "snapshots").load(trainer.model, stop.best)
    assert same(kept, weights(trainer.model))
    fresh = [f"Count to {number}" for number in range(WATCH.final_labels // 2)]
    gain = stop.final_gain(trainer.model, fresh)
    assert gain["value"] > 0
    assert gain["interval"][0] <= gain["value"] <= gain["interval"][1]
    assert len(gain["path"]) == len(fresh)
    assert gain["examples"][0]["prompt"] == fresh[0]
    asked = judge.asked
    assert stop.final_gain(trainer.model, fresh) == gain  # nothing is sampled or asked again
    assert judge.asked == asked
    file = tmp_path / "watch" / "final" / "judged.jsonl"
    file.write_text(file.read_text()[:-5])  # as a kill leaves it
    assert stop.final_gain(trainer.model, fresh) == gain
    assert judge.asked > asked
    assert stop.final_gain(trainer.model, fresh) == gain


def test_it_leaves_the_training_as_it_was(policy, tmp_path):
    """The same steps with and without a watch give the same weights; its folder holds what its text says."""
    watched, trainer = train(policy, tmp_path / "with", Judge(lambda text: float(len(text))).of_pairs)
    plain = trainer_of(policy, tmp_path / "without", SETTINGS)
    plain.train()
    Snapshots(tmp_path / "with" / "watch" / "snapshots").load(trainer.model, len(watched.looks))
    assert same(weights(plain.model), weights(trainer.model))
    folder = tmp_path / "with" / "watch"
    assert json.loads((folder / "watch.json").read_text())["scale"] > 0
    assert {place.name for place in folder.iterdir()} == {
        "watch.json", "snapshots", "look_2", "look_4", "look_6", "look_8"
    }  # fmt: skip


def test_a_look_that_was_cut_off_asks_for_the_rest_alone(policy, tmp_path):
    """Where the state of its own step is there, as after every error of ours, nothing is sampled or asked twice."""
    judge = Judge(lambda text: float(len(text)), limit=48 + 60)

    def watch():
        folder = tmp_path / "watch"
        return HackStop(PROMPTS, judge.of_pairs, folder, settings=WATCH, every=2, max_new_tokens=12)

    trainer = trainer_of(policy, tmp_path, SETTINGS, watch())
    with pytest.raises(DataError, match="CutError"):
        trainer.train()
    trainer._save_checkpoint(trainer.model, trial=None)
    asked = json.loads((tmp_path / "watch" / "look_4" / "asked.json").read_text())
    judge.limit = 10**9
    again = watch()
    trainer_of(policy, tmp_path, SETTINGS, again).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert json.loads((tmp_path / "watch" / "look_4" / "asked.json").read_text()) == asked
    assert [look.step for look in again.looks] == [2, 4, 6, 8]
    assert judge.asked <= again.labels_used + 2 * ScoreJudge.at_once  # the chunk that was cut off


def test_a_training_that_gets_more_steps_judges_no_prompt_again(policy, tmp_path):
    """What the first labels of a prompt show, bets on its later ones are won by: each is judged once."""
    likes = Judge(lambda text: float(text.count("a")))
    train(policy, tmp_path, likes.of_pairs, SETTINGS.model_copy(update={"steps": 4}))
    train(policy, tmp_path, likes.of_pairs, resume=str(tmp_path / "checkpoint-2"))
    asked = [json.loads(file.read_text())["prompts"] for file in (tmp_path / "watch").glob("look_*/asked.json")]
    assert len(asked) == 4
    assert len({place for look in asked for place in look}) == sum(map(len, asked)) == WATCH.labels // 2


def test_a_folder_begins_anew_with_its_training_and_is_refused_to_another(policy, tmp_path):
    likes, hates = Judge(lambda text: float(text.count("a"))), Judge(lambda text: -float(text.count("a")))
    fresh = [f"Count to {number}" for number in range(20)]
    short = SETTINGS.model_copy(update={"steps": 4})
    first, trainer = train(policy, tmp_path, likes.of_pairs, short)
    gain = first.final_gain(trainer.model, fresh)
    second, other = train(policy, tmp_path, hates.of_pairs, short)
    assert hates.asked >= 48 + WATCH.labels // 2
    assert second.best == 0 or second.final_gain(other.model, fresh) != gain
    with pytest.raises(ConfigError, match="does not hold the watch of this training"):
        train(
            policy, tmp_path, hates.of_pairs, short, watch=WATCH.model_copy(update={"labels": 200}),
            resume=str(tmp_path / "checkpoint-2"),
        )  # fmt: skip


def test_the_penalty_is_steered_to_the_target(policy, tmp_path):
    stop, trainer = train(policy, tmp_path, Judge(lambda text: float(text.count("a"))).of_pairs, kl_target=0.001)
    betas = [SETTINGS.kl_beta]
    for look in stop.looks:
        steered = betas[-1] * np.clip(max(look.kl, 0.0) / 0.001, 0.5, 2.0)
        betas.append(max(SETTINGS.kl_beta, steered))
    assert max(betas) > SETTINGS.kl_beta
    assert trainer.beta == pytest.approx(betas[-1])
    trainer.beta = SETTINGS.kl_beta
    stop.resume(trainer.model, trainer.processing_class, step=8, max_steps=8)  # the looks before it are judged again
    assert trainer.beta == pytest.approx(betas[-2])
    assert stop.catch_up(trainer.model, step=8, max_steps=8) == (stop.stopped is not None)
    assert trainer.beta == pytest.approx(betas[-1])


def test_too_few_prompts_or_labels_are_refused_before_a_step(policy, tmp_path):
    judge = PeopleJudge(tmp_path)
    few = HackStop(PROMPTS[:3], judge, tmp_path / "a")
    with pytest.raises(ConfigError, match="3 held-out prompts, 24 of them for the unit"):
        trainer_of(policy, tmp_path / "a", SETTINGS, few).train()
    with pytest.raises(ConfigError, match="fewer than 4 pairs a look"):
        train(policy, tmp_path / "b", judge, SETTINGS.model_copy(update={"steps": 40}), WatchConfig(labels=40))


def test_snapshots_come_back_to_the_bit_and_are_private(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    snapshots, before = Snapshots(tmp_path / "kept"), weights(model)
    snapshots.save(model, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    moved = weights(model)
    with snapshots.inside(model, 1):
        assert same(before, {name: value for name, value in weights(model).items() if name != "0.bias"})
    assert same(moved, weights(model))
    assert (tmp_path / "kept" / "1.safetensors").stat().st_mode & 0o77 == 0
    snapshots.save(model, 2)
    snapshots.keep([2])
    assert not snapshots.has(1)
    assert snapshots.has(2)
