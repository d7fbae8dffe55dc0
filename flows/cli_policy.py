"""`rm-opt readiness best-of-n | policy | confirm`: whether a policy may be optimised against a reward model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flows.cli_common import FlowOptions, print_places, run_configured, settings_of
from flows.cli_runs import named_run, run_names
from rmcore.cli.common import print_block, print_verdict
from rmcore.cli.measure import readiness_app
from rmcore.cli.options import options
from rmcore.config.policy import PolicyConfig


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
