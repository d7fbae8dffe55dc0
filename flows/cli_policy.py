"""`rm-opt best-of-n` and `rm-opt readiness`: whether a policy may be optimised against a reward model."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flows.cli_common import FlowOptions, print_places, run_configured, settings_of
from rmcore.cli.common import print_block
from rmcore.cli.measure import readiness_app
from rmcore.cli.options import options
from rmcore.cli.verdict import print_verdict


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Which policy is measured, by which reward model, on what."""

    checkpoint: Annotated[
        str | None, typer.Option(help="A trained reward model, in place of training the preset's.")
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(help="The policy: a folder or hub name of a causal model, or sft, which trains one; default sft."),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(help="Preference pairs: a file, a datasets folder or a hub name; default: the gold world."),
    ] = None
    samples: Annotated[
        str | None,
        typer.Option(
            help="Samples drawn before, with columns prompt, response and the judge's: nothing is sampled then."
        ),
    ] = None
    preset: Annotated[str, typer.Option(help="Start from a named run.")] = "policy"

    def settings(self) -> list[str]:
        """The settings behind them. A given reward model was not trained here, so more pairs are left to measure."""
        own = {"policy.name": self.policy, "data.source": self.data, "policy.samples": self.samples}
        more = self.checkpoint is not None and self.data is not None
        return settings_of(own) + (["data.test_fraction=0.5"] if more else [])


@options()
def best_of_n(
    inputs: PolicyOptions,
    given: FlowOptions,
    n: Annotated[int | None, typer.Option(min=4, help="Samples of each prompt; default 64.")] = None,
    prompts: Annotated[int | None, typer.Option(min=4, help="Held-out prompts at most; default 150.")] = None,
) -> None:
    """Draw a policy's samples, and show what choosing the best of n by this model gives.

    Samples are stored: another reward model scores the same ones. Example: rm-opt best-of-n, then
    rm-opt best-of-n --checkpoint out/best --policy my-policy --data pairs.parquet
    """
    from rmcore.reporting.html.policy import best_of_n_block

    wanted = settings_of({"policy.samples_per_prompt": n, "policy.num_prompts": prompts})
    outcome = run_configured(_loader("best_of_n", inputs), inputs.preset, given, [*inputs.settings(), *wanted])
    print_block(best_of_n_block(outcome["results"]))
    print_places(outcome)


@readiness_app.command("policy")
@options()
def readiness(
    inputs: PolicyOptions,
    given: FlowOptions,
    kl: Annotated[float | None, typer.Option(help="Nats that the policy is to be moved by; default 3.")] = None,
) -> None:
    """Judge by the policy's own samples, as the gold world or your judge's column sees them: readiness v2, rung 3.

    Examples:
    rm-opt readiness policy --policy sft

    rm-opt readiness policy --checkpoint out/best --data pairs.parquet --samples judged.parquet
    """
    from rmcore.reporting.html.policy import readiness_block

    wanted = settings_of({"readiness.planned_kl": kl})
    outcome = run_configured(_loader("readiness", inputs), inputs.preset, given, [*inputs.settings(), *wanted])
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
    """Serve best-of-n on fresh prompts, as far as is planned, and say what was gained: rung 4.

    The chosen response and one that it was not chosen from are judged, prompt after prompt, until it is decided. For
    example:
    rm-opt readiness confirm --policy world

    rm-opt readiness confirm --checkpoint out/best --data pairs.parquet --policy my-policy --judge mine:judge

    rm-opt readiness confirm --checkpoint out/best --data pairs.parquet --policy my-policy --people to_judge
    """
    from rmcore.reporting.html.policy import confirmation_block

    own = {
        "readiness.planned_kl": kl,
        "policy.fresh_prompts": prompts,
        "policy.judge": judge,
        "policy.people": None if people is None else str(Path(people).resolve()),
    }
    wanted = settings_of(own)
    outcome = run_configured(_loader("confirm", inputs), inputs.preset, given, [*inputs.settings(), *wanted])
    results = outcome["results"]
    print()
    print_verdict(results["verdict"], None)
    print_block(confirmation_block(results)._replace(findings=()))  # they are in the verdict above
    print_places(outcome)


def _loader(name: Literal["best_of_n", "readiness", "confirm"], inputs: PolicyOptions) -> Any:
    """Make a function that imports a flow with its checkpoint; Prefect reads its address then, not before."""

    def load() -> Any:
        from flows import policy

        return partial(getattr(policy, name), checkpoint=inputs.checkpoint)

    return load
