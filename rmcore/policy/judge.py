"""Who says what really counts, of single responses and of pairs: the synthetic benchmark, a language model behind an
endpoint, a function of the user's, or another reward model. Imports torch only for a reward model.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rmcore.config.judging import JudgingConfig, is_endpoint, is_function, judge_name
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.named_function import REWARD_MEANING, call_for_number, load_function, source_file_digest
from rmcore.data.gold.world import gold_reward
from rmcore.data.pair import Prompt, as_rows, prompt_text
from rmcore.data.readers.sources import source_digest
from rmcore.evaluation.uncertainty import ends, shown_gain
from rmcore.judging.endpoint import Address, require_openai
from rmcore.judging.judge import Judge
from rmcore.judging.rubrics import identity, pair_question, rubric_text, score_question

if TYPE_CHECKING:
    from rmcore.models.reward_model import BradleyTerryRM

JUDGE_SETTING = "policy.judge"
_FROM_AUDIT = ("reliability", "agreement", "length_bias")
_NORMAL = 1.96
"""Standard errors from the middle of a 95 % interval to its end."""


@dataclass(frozen=True, slots=True)
class GoldJudge:
    """The synthetic benchmark, whose reward judges."""

    name: str = "the synthetic benchmark"

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> FloatArray:
        """See `Judge`."""
        both = zip(*as_rows(prompts, responses), strict=True)
        return np.array([gold_reward(prompt_text(prompt), response) for prompt, response in both], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class HookJudge:
    """A function of (prompt, response) -> number; the prompt as it is in the data, text or turns."""

    name: str
    function: Callable[[Prompt, str], Any]
    setting: str = JUDGE_SETTING
    """Where the function is named."""

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> FloatArray:
        """See `Judge`."""
        rows = zip(*as_rows(prompts, responses), strict=True)
        return np.array(
            [call_for_number(self.setting, self.name, self.function, *row) for row in rows], dtype=np.float64
        )


@dataclass(frozen=True, slots=True)
class ModelJudge:
    """Another reward model, whose reward stands in for the true one (as in Gao, Schulman and Hilton 2023)."""

    name: str
    rm: "BradleyTerryRM"

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> FloatArray:
        """See `Judge`."""
        return self.rm.score(prompts, responses).astype(np.float64)


def readable_rewards(rewards: FloatArray, judge: str) -> FloatArray:
    """The rewards of a prompt's samples without those that the judge did not give, (K,) to (1,) or more.

    Raises:
        DataError: none was given.
    """
    readable = rewards[np.isfinite(rewards)]
    if len(readable) == 0:
        raise DataError(f"{judge} gave no readable judgement of any of {len(rewards)} samples of a prompt; see above.")
    return readable


def require_named_judge(named: str, judging: JudgingConfig | None = None) -> None:
    """Check that `policy.judge` is there; an endpoint is not asked.

    Raises:
        ConfigError: the function cannot be imported, there is no such folder of a reward model, or the endpoint's name,
            its rubric or the package that asks it is not there.
    """
    judging = judging or JudgingConfig()
    if is_endpoint(named):
        Address.parse(named)
        require_openai()
        rubric = rubric_text(judging.rubric)
        _ = score_question(rubric, "", "") if judging.mode == "pointwise" else pair_question(rubric, "", "", "")
    elif is_function(named):
        load_function(JUDGE_SETTING, named, REWARD_MEANING)
    else:
        require_model_folder(named)
    audit_of(named, judging)


def judge_identity(named: str, judging: JudgingConfig) -> dict[str, Any]:
    """Identify a judge, JSON-ready: an endpoint by its model and questions, another one by its content.

    Raises:
        ConfigError: what is named is not there.
    """
    if is_endpoint(named):
        return identity(named, judging)
    if is_function(named):
        return {"function": f"{named} {source_file_digest(JUDGE_SETTING, named)}"}
    require_model_folder(named)
    return {"reward model": source_digest(named)}


def judge_noise(named: str | None, judging: JudgingConfig) -> tuple[float, float]:
    """How often a judge is right where it prefers one of two, by its audit, and the standard error of that.

    Returns:
        (1, 0) without an audit, where the audit does not know how often people agree, as their errors would be taken
        for the judge's, and for a judge that is a coin, which may not decide anyway.

    Raises:
        ConfigError: see `audit_of`.
    """
    audit = None if named is None else audit_of(named, judging)
    reliability = {} if audit is None else audit["reliability"]
    value, low = reliability.get("value"), reliability.get("ci_low")
    if value is None or low is None or value <= 0.5:
        return 1.0, 0.0
    return value, (reliability["ci_high"] - low) / (2 * _NORMAL)


def label_weight(named: str, judging: JudgingConfig) -> float | None:
    """Weigh a label of the judge's, a person's being 1: 2c - 1, the share of its labels that no coin gave.

    c is its reliability by the audit, or where that is not known how often it agrees with people. Of the weights 1, c,
    2c - 1 and its square this one ranked best where people's and a judge's labels were mixed
    (`benchmarks/results/judge-labels.md`).

    Returns:
        None without an audit.

    Raises:
        ConfigError: see `audit_of`; or the judge is no better than a coin.
    """
    audit = audit_of(named, judging)
    if audit is None:
        return None
    right = audit["reliability"].get("value") or audit["agreement"].get("value") or 0.5
    if right <= 0.5:
        raise ConfigError(
            f"by {judging.audit} {judge_name(named)} is right on {right:.0%} of the pairs, no more often than a coin: "
            "its labels teach nothing. Take another judge."
        )
    return float(2 * right - 1)


def audit_of(named: str, judging: JudgingConfig) -> dict[str, Any] | None:
    """The audit that `policy.judging.audit` names: may_decide, reasons, reliability, agreement; None without one.

    Raises:
        ConfigError: the file is no audit, or one of another judge.
    """
    if judging.audit is None:
        return None
    try:
        record = json.loads(Path(judging.audit).read_text(encoding="utf-8"))
        audited, verdict = record["asked"], record["verdict"]
        verdict = {"may_decide": bool(verdict["may_decide"]), "reasons": list(map(str, verdict["reasons"]))}
        verdict |= {name: dict(record["metrics"].get(name) or {}) for name in _FROM_AUDIT}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"policy.judging.audit={judging.audit} is no audit of a judge ({type(error).__name__}: {error}); write one "
            "with `rm-opt judge audit --json`."
        ) from error
    asked = judge_identity(named, judging)
    differing = [name for name, value in asked.items() if audited.get(name) != value]
    if differing:
        raise ConfigError(
            f"{judging.audit} is the audit of another judge: its {', '.join(differing)} differ. Audit this one, as it "
            "is now and is asked here."
        )
    return verdict


def audited(
    verdict: Mapping[str, Any],
    judge: str,
    named: str | None,
    judging: JudgingConfig | None,
    *,
    by_length: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Give a verdict no stronger than the audit of the judge that it rests on allows.

    Args:
        verdict: with status, headline and reasons.
        judge: who judged, as people read it.
        named: `policy.judge`.
        judging: how a language model was asked, or an audit of another judge; None: the verdict stays as it is.
        by_length: records of `gains_by_length`, where they were measured. If length may explain the gain, *ready* is
            unclear, unless the audit shows that the judge does not prefer it.

    Raises:
        ConfigError: see `audit_of`.
    """
    if named is None or judging is None:
        return dict(verdict)
    audit = audit_of(named, judging)
    doubts, remarks = [] if audit is None else list(audit["reasons"]), []
    if audit is None:
        remarks = [
            f"nobody has audited {judge}: `rm-opt judge audit` compares it with people, and policy.judging.audit takes "
            "what that writes"
        ]
    likes_length = None if audit is None else audit["length_bias"].get("ci_high")
    if by_length and (likes_length is None or likes_length > 0):
        without, longest = (by_length[name] for name in ("gain_without_length", "gain_of_longest"))
        effect = f"with length taken out of its scores the gain is {shown_gain(without)}"
        effect += f", and the longest answer would gain {shown_gain(longest)}"
        if verdict["status"] == "ready" and (ends(without)[0] or 0.0) <= 0:
            doubts.append(f"length may explain the gain, and {judge} may prefer it: {effect}")
        else:
            remarks.append(effect)
    if not doubts or verdict["status"] == "unclear":
        return {**verdict, "reasons": [*verdict["reasons"], *doubts, *remarks]}
    headline = f"Unclear, as {judge} is not good enough to decide; it would say: {verdict['headline']}"
    return {**verdict, "status": "unclear", "headline": headline, "reasons": [*doubts, *remarks, *verdict["reasons"]]}


def require_people(folder: str) -> None:
    """Check a folder for the files of pairs that people judge, which is made where it is not there.

    Raises:
        ConfigError: it is a file, or is named relative to wherever the run may be.
    """
    if not Path(folder).is_absolute():
        raise ConfigError(f"the folder for people's files is {folder!r}; name it from the root (/…/{folder}).")
    if Path(folder).exists() and not Path(folder).is_dir():
        raise ConfigError(f"{folder} is a file, and people's files of pairs need a folder; name another place.")


def require_model_folder(named: str, setting: str = JUDGE_SETTING) -> None:
    """Check that what a setting names, which is no function, is the folder of a reward model.

    Raises:
        ConfigError: it is not.
    """
    if not (Path(named) / "config.json").is_file():
        raise ConfigError(
            f"{setting}={named} is neither module:function nor the folder of a reward model (config.json and "
            "weights, such as a checkpoint's best/)."
        )


def judge_of(
    named: str | None, *, is_gold: bool, device: str = "auto", judging: JudgingConfig | None = None
) -> Judge | None:
    """The judge of a run: the named endpoint, function or model, else the synthetic benchmark on its own data, or None.

    Args:
        named: `policy.judge`.
        is_gold: whether the pairs are the synthetic benchmark's.
        device: of a reward model that judges.
        judging: how an endpoint is asked.

    Raises:
        ConfigError: what is named is not there.
        ModelError: the reward model cannot be loaded.
    """
    if named is None:
        return GoldJudge() if is_gold else None
    if is_endpoint(named):
        from rmcore.judging.language_model import LanguageModelJudge

        return LanguageModelJudge(named, judging or JudgingConfig())
    if is_function(named):
        return HookJudge(named, load_function(JUDGE_SETTING, named, REWARD_MEANING))
    require_model_folder(named)
    from rmcore.models.device import pick_device
    from rmcore.models.reward_model import BradleyTerryRM

    return ModelJudge(judge_name(named), BradleyTerryRM.from_pretrained(named, device=pick_device(device).type))
