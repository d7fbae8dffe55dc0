"""GRPO with the reward model: TRL's trainer on a policy folder, with rewards and credit of this platform.

For example

    with RewardServer(ServeSettings("checkpoints/best", port=0)) as server, server.client() as client:
        trainer = make_grpo_with_rm("my-policy", prompts, RewardModelScorer(client, over_length="cut"), out="grpo")
        trainer.train()

The trainer is TRL's own, with all its methods. Samples are drawn by `generate`, or by a vLLM that has the policy's
weights (`VllmRollouts`). TRL is told that vLLM draws, so all that it does for its own vLLM happens here too: before a
step it has the weights synchronised, and afterwards it weighs each token's loss by min(p_trainer / p_vLLM, 3), which
corrects what vLLM rounds otherwise (truncated importance sampling: Yao et al. 2025, Your efficient RL framework
secretly brings you off-policy RL training; Ionides 2008).
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from rmcore.config.rlhf import RlhfConfig
from rmcore.core.errors import DataError, ModelError, TrainingError
from rmcore.data.control_tokens import texts_of
from rmcore.data.pair import TOOLS, Prompt, as_prompts, dialogue_records, prompt_messages
from rmcore.data.readers.turns import exchange
from rmcore.judging.judge import Judge
from rmcore.models.device import pick_device
from rmcore.policy.grpo.credit import RewardModelCreditAssigner
from rmcore.policy.grpo.group_reward import WAIT_SECONDS, GroupReward, Record, RolloutScorer
from rmcore.policy.grpo.rlhf_requirements import require_trl
from rmcore.policy.policy import Policy, load_weights, plain_form
from rmcore.policy.sampling.sampler import SamplingSettings
from rmcore.policy.sampling.served_policy import ServedPolicy
from rmcore.training.train_mode import switch_off_dropout

HIGHEST_WEIGHT = 3.0
"""Where the weights of tokens are cut; TRL's default."""


class VllmRollouts:
    """Draws the samples of each step for one trainer of TRL.

    Args:
        served: the vLLM; its weights are replaced by the trainer's.
        prompt_ids: token ids of every prompt, by what TRL hands over of it (`prompt_key`).
        seed: of the sampling; the same seed and step ask for the same samples.
        temperature, max_new_tokens: of the sampling.
    """

    def __init__(
        self,
        served: ServedPolicy,
        prompt_ids: Mapping[Any, Sequence[int]],
        *,
        seed: int,
        temperature: float,
        max_new_tokens: int,
    ) -> None:
        self.served, self.prompt_ids, self.seed = served, prompt_ids, seed
        self.temperature, self.max_new_tokens = temperature, max_new_tokens
        self._trainer: Any = None
        self._published: int | None = None
        """Step of the weights that are served; None: those of another training, or none of ours."""

    def attach(self, trainer: Any) -> None:
        """Have a `trl.GRPOTrainer` that was made with `rollout_func=self` treat the samples as vLLM's.

        These are the attributes that `use_vllm` sets in TRL 1.16, whose own vLLM would have to be importable here.
        """
        self._trainer = trainer
        trainer.use_vllm = True
        trainer.vllm_generation = self
        trainer._last_loaded_step = -1  # of the first step too, where a training resumes

    def sync_weights(self) -> None:
        """Publish the trainer's weights, unless those of this step are served already. TRL calls it once a step.

        Raises:
            ServingError: vLLM did not take them.
        """
        step = self._trainer.state.global_step
        if self._published != step:
            self.served.publish(self._trainer.accelerator.unwrap_model(self._trainer.model))
            self._published = step

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Draw for N prompts, each as often in a row as a group has samples: TRL's `rollout_func`.

        Returns:
            Each a list of N: prompt_ids, completion_ids with the token that ended it, logprobs of those in nats.

        Raises:
            ServingError: vLLM died too often.
        """
        size = trainer.num_generations
        groups = [prompt_key(prompt) for prompt in prompts[::size]]
        if [prompt_key(prompt) for prompt in prompts] != [key for key in groups for _ in range(size)]:
            raise TrainingError("TRL asks for samples of a prompt apart from one another; this needs TRL 1.16's order.")
        ids = [list(self.prompt_ids[key]) for key in groups]
        seed = self.seed * 2**32 + trainer.state.global_step
        settings = SamplingSettings(size, self.temperature, self.max_new_tokens, seed)
        drawn = self.served.draw(ids, settings)
        return {
            "prompt_ids": [row for row in ids for _ in range(size)],
            "completion_ids": [one.ids for group in drawn for one in group],
            "logprobs": [one.log_probs for group in drawn for one in group],
        }


def prompt_key(prompt: Any) -> Any:
    """Give what tells prompts apart in the form that TRL hands them over: text, or turns as dicts."""
    return prompt if isinstance(prompt, str) else tuple((turn["role"], turn["content"]) for turn in prompt)


def make_grpo_with_rm(
    policy: Policy | str | Path,
    prompts: Sequence[Prompt],
    scorer: RolloutScorer,
    *,
    out: str | Path,
    settings: RlhfConfig | None = None,
    credit: RewardModelCreditAssigner | None = None,
    further: Sequence[Judge] = (),
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    seed: int = 0,
    device: str = "auto",
    served: ServedPolicy | None = None,
    wait_seconds: float = WAIT_SECONDS,
    callbacks: Sequence[TrainerCallback] = (),
    record: Record | None = None,
) -> Any:
    """A `trl.GRPOTrainer` whose rewards come from a reward model; call its `train`.

    TRL compares the credits within each group: advantage = (credit - mean) / (standard deviation + 1e-4), so a group
    of equal credits gives none. With further rewards each is compared within its group in this way, and their weighted
    sum over the step (TRL's `normalize_then_sum`). One step is one update on fresh samples of `prompts_per_step`
    prompts.

    The policy's dropout is off throughout: TRL leaves it on, and then samples are drawn from, and probabilities of
    their tokens taken under, randomly thinned networks that are not the policy.

    Args:
        policy: a folder or hub model; trained whole, in float32 (bf16 autocast on a GPU).
        prompts: what it is trained to answer; text or turns of a dialogue.
        scorer: `RewardModelScorer` of a running reward server, or `LocalReward` in this process.
        out: folder for the trainer's resumable states (`checkpoint-STEP`), one every `settings.measure_every` steps.
        settings: steps, group size, learning rate, KL penalty; the defaults where left out.
        credit: what a reward is joined with; left out, the reward alone.
        further: rewards next to it, which `settings.more_rewards` weighs, as `further_rewards` loads them.
        temperature: of the sampling.
        max_new_tokens: longest response; what is cut there counts as it is.
        seed: of prompts' order and sampling.
        device: auto, cpu or cuda.
        served: a vLLM of this policy, which draws the samples with the weights of each step; left out,
            `generate` in this process.
        wait_seconds: how long a step waits for a scorer that is away or fails before the training stops.
        callbacks: more of transformers' callbacks.
        record: sees every step's rollouts and credits.

    Raises:
        ConfigError: TRL is not installed.
        DataError: a prompt is too long for the policy, or its chat template refuses one, or all hold control tokens.
        ModelError: the policy cannot be loaded, has no end-of-text token, or its tokenizer reads a prompt otherwise
            than at sampling.
    """
    require_trl()
    from trl import GRPOConfig, GRPOTrainer

    wanted = settings or RlhfConfig()
    prompts = as_prompts(prompts)
    asked = policy if isinstance(policy, Policy) else Policy.load(policy)
    torch_device = pick_device(device)
    rows, prompt_ids = _rows(asked, prompts, max_new_tokens)
    reward = GroupReward(
        asked,
        prompts,
        scorer,
        credit or RewardModelCreditAssigner(),
        wait_seconds=wait_seconds,
        further=further,
        record=record,
    )
    functions: Any = reward.functions  # TRL's type is of lists that may hold other kinds, too
    on_gpu = torch_device.type == "cuda"
    samples = wanted.prompts_per_step * wanted.group_size
    micro_batch = wanted.micro_batch_size or samples
    model = load_weights(asked, torch.float32)
    switch_off_dropout(model)  # TRL's own switch knows Dropout modules alone, and not what attention is handed
    rollouts = None
    if served is not None:
        rollouts = VllmRollouts(served, prompt_ids, seed=seed, temperature=temperature, max_new_tokens=max_new_tokens)
    options = GRPOConfig(
        output_dir=str(out),
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=on_gpu,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch,
        num_generations=wanted.group_size,
        max_steps=wanted.steps,
        learning_rate=wanted.learning_rate,
        lr_scheduler_type="constant",
        beta=wanted.kl_beta,
        loss_type=wanted.loss,
        reward_weights=[1.0, *(wanted.more_rewards or {}).values()],
        multi_objective_aggregation="normalize_then_sum" if further else "sum_then_normalize",
        disable_dropout=True,  # of the reference model that a KL penalty loads, too
        temperature=temperature,
        max_completion_length=max_new_tokens,
        vllm_importance_sampling_mode="token_truncate",  # TRL's default drops whole responses instead
        vllm_importance_sampling_clip_max=HIGHEST_WEIGHT,
        logging_steps=1,
        save_steps=wanted.measure_every,
        save_total_limit=2,
        save_strategy="steps",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TRL's own use of transformers
        trainer = GRPOTrainer(
            model,
            reward_funcs=functions,
            args=options,
            train_dataset=rows,
            processing_class=_tokenizer(asked),
            callbacks=list(callbacks),
            rollout_func=rollouts,
        )
    if rollouts is not None:
        rollouts.attach(trainer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _rows(policy: Policy, prompts: Sequence[Prompt], max_new_tokens: int) -> tuple[Any, dict[Any, list[int]]]:
    """The prompts in the form that TRL renders, which must be how the policy reads them, and their token ids."""
    from datasets import Dataset

    readable = trainable_ids(policy, prompts, max_new_tokens)
    ids = list(readable.values())
    prompts = [exchange(prompts[place], "")[0] for place in readable]
    if policy.tokenizer.chat_template:
        asked: list[Any] = [dialogue_records(prompt) for prompt in prompts]
        read: Any = policy.tokenizer.apply_chat_template(asked[:1], add_generation_prompt=True, return_dict=True)
    else:
        asked = [plain_form(prompt) for prompt in prompts]
        read = policy.tokenizer(asked[:1])
    if list(read["input_ids"][0]) != ids[0]:
        raise ModelError(
            f"the tokenizer of {policy.name} puts other special tokens around a prompt in TRL than at sampling; give "
            "it a chat template, which settles them."
        )
    by_prompt = {prompt_key(prompt): row for prompt, row in zip(asked, ids, strict=True)}
    return Dataset.from_dict({"prompt": asked, "place": list(readable)}), by_prompt


def trainable_ids(policy: Policy, prompts: Sequence[Prompt], max_new_tokens: int) -> dict[int, list[int]]:
    """Token ids of the prompts that can be trained on, by their places; the others are said on stderr.

    TRL tokenizes by itself and would make control tokens of their strings in a prompt, so such prompts are left out.

    Raises:
        DataError: none is left.
        ModelError: see `Policy.readable_ids`.
    """
    control = policy.reader.control
    prompts = [exchange(prompt, "")[0] for prompt in prompts]
    bare = [place for place, prompt in enumerate(prompts) if not _has_more(prompt)]
    if len(bare) < len(prompts):
        print(
            f"warning: {len(prompts) - len(bare)} of {len(prompts)} prompts have tools or further fields of messages, "
            "which TRL does not hand to the chat template; they are not trained on",
            file=sys.stderr,
        )
    places = [place for place in bare if not control.stand_in(texts_of(prompts[place], ""))]
    if not bare:
        raise DataError("no prompt is left; give prompts of messages that have a role and a content alone.")
    if not places:
        raise DataError(
            f"each of the {len(prompts)} prompts holds the string of a control token of {policy.name}, which TRL would "
            "read as the token; give prompts as messages without the chat template's own marks."
        )
    if len(places) < len(bare):
        print(
            f"warning: {len(bare) - len(places)} of {len(prompts)} prompts hold the string of a control token of "
            f"{policy.name}, which TRL would read as the token; they are not trained on",
            file=sys.stderr,
        )
    readable = policy.readable_ids([prompts[place] for place in places], max_new_tokens)
    return {places[index]: ids for index, ids in readable.items()}


def _has_more(prompt: Prompt) -> bool:
    """Whether a prompt is more than roles and contents."""
    return any(turn.fields or turn.role == TOOLS for turn in prompt_messages(prompt))


def _tokenizer(policy: Policy) -> Any:
    tokenizer = policy.tokenizer
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {policy.name} has no EOS token, so no response would ever end; set one.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
