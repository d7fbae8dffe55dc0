"""Settings of the policy, and of the samples drawn from it."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rmcore.config.base import Settings
from rmcore.config.judging import JudgingConfig, is_endpoint

SFT = "sft"
WORLD = "world"


class PolicyConfig(Settings):
    """The policy that is to be optimised, and the samples drawn from it."""

    name: str = SFT
    """`sft`: trained here, on answers of the synthetic benchmark or the responses of the training pairs. `world`: the
    synthetic benchmark's own writer, which costs nothing and cannot be trained. Else a folder or hub name of a causal
    model."""
    base: str = "tiny"
    """Model that `sft` starts from: tiny or another of its sizes, or a folder or hub name of a causal model."""
    sft_examples: int = Field(default=8000, ge=10, le=1_000_000)
    """Responses that `sft` is trained on, three times, at most; the synthetic benchmark writes as many as requested."""
    engine: Literal["auto", "vllm", "generate"] = "auto"
    """Engine that draws the samples: vLLM, or transformers' generate; auto takes vLLM where it and a GPU are there."""
    num_prompts: int = Field(default=150, ge=4, le=1_000_000)
    """Held-out prompts that samples are drawn for, at most: the first ones of the test pairs."""
    samples_per_prompt: int = Field(default=64, ge=4, le=100_000)
    """Samples of each prompt: best-of-n is measured for n up to this."""
    fresh_prompts: int = Field(default=400, ge=10, le=1_000_000)
    """Other prompts, at most, that best-of-n is served on by `rm-opt readiness confirm`, to confirm a plan; two
    responses of each are judged, in turns of 8 prompts until it is decided."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; KL is measured from the policy at this temperature."""
    max_new_tokens: int = Field(default=256, ge=1, le=1_000_000)
    """Longest response in tokens; one that has not ended by then is cut, and counted."""
    samples: str | None = None
    """A file of samples drawn elsewhere, with columns prompt, response and `judge_column`: nothing is sampled then."""
    judge_column: str = "judge"
    """Column of `samples` with the true reward; rows without it are left out. The synthetic benchmark judges itself."""
    topic_column: str | None = None
    """Column of `samples`, or of what the held-out pairs carry besides their texts, whose equal values mark prompts of
    one topic, which count as one independent prompt. Left out: every prompt is independent."""
    judge_ceiling: float | None = Field(default=None, gt=0.5, le=1)
    """How often the judge is right on a pair that it tells apart: accuracies are corrected for the rest. Left out: the
    reliability of the judge's audit with its error (`judging.audit`), and 1 without one."""
    judge: str | None = Field(default=None, pattern=r"^(openai:\S+@https?://\S+|[\w.]+:\w+|[^:]+)$")
    """Who gives the true reward of samples drawn here: openai:MODEL@URL, a language model behind an OpenAI-compatible
    endpoint; module:function of (prompt, response), code of yours from the current folder or PYTHONPATH; or the folder
    of another reward model, which stands in for the truth. With `samples`, who judged them: its audit is read alone."""
    judging: JudgingConfig = JudgingConfig()
    """How a language model that judges is asked, and what it may cost."""
    people: str | None = None
    """A folder, named from the root, for files of pairs that people judge in `rm-opt readiness confirm`, instead of
    `judge`. It ends at each of them, and the same command resumes when its column is filled in."""

    @property
    def asked_judge(self) -> str | None:
        """Who judges the samples that are drawn; given ones were judged before."""
        return self.judge if self.samples is None else None

    @property
    def asked_judging(self) -> JudgingConfig | None:
        """How an endpoint is asked about samples. Its audit changes verdicts alone, and is left out here."""
        judge = self.asked_judge
        is_asked = judge is not None and is_endpoint(judge)
        return self.judging.model_copy(update={"audit": None}) if is_asked else None

    @property
    def verdict_judging(self) -> JudgingConfig | None:
        """How an endpoint is asked that a verdict rests on; of another judge its audit alone, where it has one.

        Nobody asks the judge of given samples, so that only an audit matters; it tells how its judge was asked.
        """
        audit = self.judging.audit
        if self.judge is None or (self.samples is not None and audit is None):
            return None
        if is_endpoint(self.judge):
            return self.judging
        return None if audit is None else JudgingConfig(audit=audit)

    @property
    def verdict_judge(self) -> str | None:
        """The judge, where `verdict_judging` says something of it."""
        return None if self.verdict_judging is None else self.judge

    @model_validator(mode="after")
    def _an_audit_is_of_a_judge(self) -> Self:
        if self.judging.audit is not None and self.judge is None:
            raise ValueError(
                f"policy.judging.audit={self.judging.audit} is the audit of a judge, and policy.judge names none; name "
                "the judge that was audited, or leave the audit out"
            )
        return self
