"""`rm-opt readiness best-of-n | policy | confirm` and `rm-opt rlhf`: a policy against a reward model."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from experiments.presets import PRESETS
from flows.cli_common import FlowOptions, print_places, print_reported, run_configured, settings_of
from flows.cli_runs import named_run, run_names
from rmcore.cli.common import print_block, print_verdict
from rmcore.cli.measure import readiness_app
from rmcore.cli.options import options
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.policy import PolicyConfig
from rmcore.core.errors import ConfigError

Mode = Literal["full", "rm", "policy"]
WATCHED = ("rlhf.watch", "rlhf.kl_target", "policy.judge", "rlhf=")
"""Beginnings of `--set` that say something about who judges, so that the preset's watch stays as it is."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Which policy is measured, by which reward model, on what."""

    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Take the reward model and the settings of this run, see `rm-opt runs`.",
            autocompletion=run_names,
        ),
    ] = None
    checkpoint: Annotated[
        str | None, typer.Option(help="A trained reward model, in place of training the preset's.")
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(help="The policy: a folder or hub name of a causal model, or sft, which trains one; default sft."),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(
            help="Preference pairs: a file, a datasets folder or a hub name; default: the synthetic benchmark."
        ),
    ] = None
    samples: Annotated[
        str | None,
        typer.Option(
            help="Samples drawn before, with columns prompt, response and the judge's: nothing is sampled then."
        ),
    ] = None
    preset: Annotated[str | None, typer.Option(help="Start from a named run; default: policy.")] = None

    def start(
        self, name: Literal["best_of_n", "readiness", "confirm"], given: FlowOptions, wanted: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Run the flow of that name, with the `wanted` settings of its command; gives its outcome.

        Raises:
            ConfigError: see `named_run` and `run_configured`.
        """
        settings = [*self._settings(), *settings_of(wanted)]
        flow = f"flows.policy:{name}"
        if self.run is None:
            return run_configured(flow, self.preset or "policy", given, settings, checkpoint=self.checkpoint)
        has = {"--preset": self.preset, "--config": given.config, "--checkpoint": self.checkpoint, "--data": self.data}
        config, checkpoint = named_run(self.run, has)
        config = config.model_copy(update={"rlhf": None, "policy": config.policy or PolicyConfig()})
        changed = [one.partition("=")[0].strip() for one in given.set_ or []]
        if self.samples is not None or "policy.samples" in changed:
            # Samples take the policy's place, and the reward model is trained already.
            model = config.model.model_copy(update={"name": config.started_from})
            config = config.model_copy(update={"model": model})
        settings += ["policy.samples=null"] if self.policy is not None and self.samples is None else []
        return run_configured(flow, None, given, settings, config, checkpoint=checkpoint)

    def _settings(self) -> list[str]:
        """The settings behind them. A given reward model was not trained here, so more pairs are left to measure."""
        own = {"policy.name": self.policy, "data.source": self.data, "policy.samples": self.samples}
        more = self.checkpoint is not None and self.data is not None
        return settings_of(own) + (["data.test_fraction=0.5"] if more else [])


@readiness_app.command("best-of-n")
@options()
def best_of_n(
    inputs: PolicyOptions,
    given: FlowOptions,
    n: Annotated[int | None, typer.Option(min=4, help="Samples of each prompt; default 64.")] = None,
    prompts: Annotated[int | None, typer.Option(min=4, help="Held-out prompts at most; default 150.")] = None,
) -> None:
    """Draw a policy's samples, and show what choosing the best of n by this model gives.

    Samples are stored: another reward model scores the same ones. Example: rm-opt readiness best-of-n, then
    rm-opt readiness best-of-n --checkpoint out/best --policy my-policy --data pairs.parquet
    """
    from rmcore.reporting.html.policy import best_of_n_block

    outcome = inputs.start("best_of_n", given, {"policy.samples_per_prompt": n, "policy.num_prompts": prompts})
    print_block(best_of_n_block(outcome["results"]))
    print_places(outcome)


@readiness_app.command("policy")
@options()
def readiness(
    inputs: PolicyOptions,
    given: FlowOptions,
    kl: Annotated[float | None, typer.Option(help="Nats that the policy is to be moved by; default 3.")] = None,
) -> None:
    """Judge readiness on the policy's own samples, scored by the benchmark or by your judge's column: evidence level 3.

    Examples:
    rm-opt readiness policy RUN

    rm-opt readiness policy --checkpoint out/best --data pairs.parquet --samples judged.parquet
    """
    from rmcore.reporting.html.policy import readiness_block

    outcome = inputs.start("readiness", given, {"readiness.planned_kl": kl})
    results = outcome["results"]
    print()
    print_verdict(results["verdict"], results["next_rung"])
    print_block(readiness_block(results))
    print_places(outcome)


@readiness_app.command()
@options()
def confirm(
    inputs: PolicyOptions,
    given: FlowOptions,
    kl: Annotated[float | None, typer.Option(help="Nats that the policy is to be moved by; default 3.")] = None,
    prompts: Annotated[int | None, typer.Option(min=10, help="Fresh prompts at most; default 400.")] = None,
    judge: Annotated[
        str | None, typer.Option(help="Who judges: module:function, or another reward model's folder.")
    ] = None,
    people: Annotated[
        str | None, typer.Option(help="Let people judge: a folder for files of pairs, at which it waits.")
    ] = None,
) -> None:
    """Serve best-of-n on fresh prompts, as far as is planned, and say what was gained: evidence level 4.

    The chosen response and one that it was not chosen from are judged, prompt after prompt, until it is decided. For
    example:
    rm-opt readiness confirm RUN

    rm-opt readiness confirm RUN --policy my-policy --people to_judge

    rm-opt readiness confirm --checkpoint out/best --data pairs.parquet --policy my-policy --judge mine:judge
    """
    from rmcore.reporting.html.policy import confirmation_block

    own = {
        "readiness.planned_kl": kl,
        "policy.fresh_prompts": prompts,
        "policy.judge": judge,
        "policy.people": None if people is None else str(Path(people).resolve()),
    }
    outcome = inputs.start("confirm", given, own)
    results = outcome["results"]
    print()
    print_verdict(results["verdict"], None)
    print_block(confirmation_block(results)._replace(findings=()))  # they are in the verdict above
    print_places(outcome)


@options()
def rlhf(
    given: FlowOptions,
    mode: Annotated[
        Mode, typer.Option(help="full: reward model, then policy; rm: reward model alone; policy: policy alone.")
    ] = "full",
    policy_model: Annotated[
        str | None, typer.Option(help="The policy: a folder or hub name of a causal model, or sft, which trains one.")
    ] = None,
    rm_base_model: Annotated[str | None, typer.Option(help="What the reward model starts from.")] = None,
    preference_data: Annotated[
        str | None,
        typer.Option(
            help="Preference pairs: a file, a datasets folder or a hub name; default: the synthetic benchmark."
        ),
    ] = None,
    rm_steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps of the reward model.")] = None,
    policy_steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps of the policy.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Trainings of the policy, which differ by the seed.")] = None,
    judge: Annotated[
        str | None,
        typer.Option(help="The true reward: module:function of (prompt, response), or another reward model's folder."),
    ] = None,
    labels: Annotated[
        int | None, typer.Option(min=40, help="Responses that the judge is asked about on the way, at most.")
    ] = None,
    people: Annotated[
        str | None, typer.Option(help="Let people judge: a folder for files of pairs, at which the training waits.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="A trained reward model, for --mode policy: a checkpoint folder.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Train the policy alone, against the reward model and with the settings of this run: `rm-opt runs`.",
            autocompletion=run_names,
        ),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Start from a named run; default: rlhf.")] = None,
) -> None:
    """Train a reward model and a policy against it: a better policy, or a clear no.

    The policy is trained by GRPO. A judge watches it with few labels: where the true reward has turned, training ends,
    and the best checkpoint is kept. Everything is cached: the same command continues where it was stopped. Examples:

    rm-opt rlhf

    rm-opt rlhf --seeds 3

    rm-opt rlhf --preference-data pairs.parquet --rm-base-model my-base --policy-model my-policy --judge mine:judge

    rm-opt rlhf --preference-data pairs.parquet --policy-model my-policy --people to_judge --labels 200

    rm-opt rlhf --from RUN --seeds 3

    rm-opt rlhf --mode policy --checkpoint out/best --policy-steps 20
    """
    recorded: PipelineConfig | None = None
    if run is not None:
        has: dict[str, object] = {"--preset": preset, "--config": given.config, "--checkpoint": checkpoint}
        has |= {"--mode": mode if mode == "rm" else None}
        has |= {"--preference-data": preference_data, "--rm-base-model": rm_base_model, "--rm-steps": rm_steps}
        recorded, checkpoint = named_run(run, has)
        mode = "policy"
    own = {
        "policy.name": policy_model,
        "model.name": rm_base_model,
        "data.source": preference_data,
        "train.steps": rm_steps,
        "rlhf.steps": policy_steps,
        "rlhf.num_seeds": seeds,
        "policy.judge": judge,
        "rlhf.watch.labels": labels,
        "rlhf.watch.people": None if people is None else str(Path(people).resolve()),
    }
    settings = settings_of(own)
    asks = judge or people or labels
    says = given.config is not None or any(one.startswith(WATCHED) for one in given.set_ or [])
    if recorded is not None:
        has_judge = recorded.policy is not None and recorded.policy.judge is not None
        says = says or recorded.rlhf is not None or has_judge
        preference_data = None if recorded.is_gold else recorded.data.source
        recorded = _with_training(recorded)
        settings += ["policy.samples=null"] if policy_model is not None else []
    if preference_data is not None and not asks and not says:
        settings += ["rlhf.watch=null", "rlhf.kl_target=null"]
        print(
            "note: nothing watches this training, because no judge is named for these pairs. It ends "
            "with its steps. --judge or --people names a judge, who ends it where the policy stops gaining.",
            file=sys.stderr,
        )
    if (mode == "policy") != (checkpoint is not None):
        raise ConfigError("--mode policy goes with --checkpoint, and no other mode does: the others train their own.")
    preset = preset or (None if recorded else "rlhf")
    outcome = run_configured("flows.policy:rlhf", preset, given, settings, recorded, mode=mode, checkpoint=checkpoint)
    if mode != "rm":
        from rmcore.reporting.html.rlhf import rlhf_block

        record = outcome["results"] if mode == "policy" else outcome["results"]["rlhf"]
        told = rlhf_block(record)
        print_block(told._replace(text=(told.title,)))
    if mode == "policy":
        print_places(outcome)
    else:
        print_reported(outcome)


def _with_training(config: PipelineConfig) -> PipelineConfig:
    """The settings of a run with a training of the policy: its own, else the preset's, as far as its plan goes."""
    usual = PRESETS["rlhf"].rlhf
    if config.rlhf is None and usual is not None:
        far = usual.model_copy(update={"kl_target": config.readiness.planned_kl})
        config = config.model_copy(update={"rlhf": far})
    return config.model_copy(update={"policy": config.policy or PolicyConfig()})
