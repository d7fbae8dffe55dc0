"""`rm-opt best-of-n` and `rm-opt readiness`: whether a policy may be optimised against a reward model."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from experiments.presets import PRESETS
from flows.cli_common import (
    ConfigOption,
    SetOption,
    SummaryOption,
    print_findings,
    print_places,
    run_configured,
    settings_of,
)
from rmcore.cli.inputs import (
    ChosenColumn,
    Device,
    Limit,
    MaxLen,
    MeasuredModel,
    NumPairs,
    PairSource,
    PromptColumn,
    RejectedColumn,
    RenderFn,
    Seed,
    Split,
)
from rmcore.cli.measure import v1_readiness
from rmcore.config.pipeline import LandscapeConfig
from rmcore.core.errors import ConfigError

LANDSCAPE = LandscapeConfig()
PolicyOption = Annotated[
    str | None,
    typer.Option(help="The policy: a folder or hub name of a causal model, or sft, which trains one; default sft."),
]
CheckpointOption = Annotated[
    str | None, typer.Option(help="A trained reward model, in place of training the preset's.")
]
DataOption = Annotated[
    str | None, typer.Option(help="Preference pairs: a file, a datasets folder or a hub name; default: the gold world.")
]
SamplesOption = Annotated[
    str | None,
    typer.Option(help="Samples drawn before, with columns prompt, response and the judge's: nothing is sampled then."),
]
Size = Literal["smoke", "full"]


def _num_models(preset: str) -> int:
    study = PRESETS[preset].validation
    return 0 if study is None else study.num_models


def best_of_n(
    checkpoint: CheckpointOption = None,
    policy: PolicyOption = None,
    data: DataOption = None,
    samples: SamplesOption = None,
    n: Annotated[int | None, typer.Option(min=4, help="Samples of each prompt; default 64.")] = None,
    prompts: Annotated[int | None, typer.Option(min=4, help="Held-out prompts at most; default 150.")] = None,
    preset: Annotated[str, typer.Option(help="Start from a named run.")] = "policy",
    config: ConfigOption = None,
    set_: SetOption = None,
    summary: SummaryOption = None,
) -> None:
    """Draw a policy's samples, score them, and show what choosing the best of n by this reward model would do.

    Samples are stored: another reward model scores the same ones. Example: rm-opt best-of-n, then
    rm-opt best-of-n --checkpoint out/best --policy my-policy --data pairs.parquet
    """
    from rmcore.reporting.html.policy import BEST_OF_N_HEADINGS, best_of_n_findings, best_of_n_rows

    wanted = _assignments(checkpoint, policy, data, samples)
    wanted += [] if n is None else [f"policy.samples_per_prompt={n}"]
    wanted += [] if prompts is None else [f"policy.num_prompts={prompts}"]
    outcome = run_configured(_loader("best_of_n", checkpoint), preset, config, [*wanted, *(set_ or [])], summary)
    print_findings(BEST_OF_N_HEADINGS, best_of_n_rows(outcome["results"]), best_of_n_findings(outcome["results"]))
    print_places(outcome)


def readiness(
    checkpoint: CheckpointOption = None,
    policy: PolicyOption = None,
    data: DataOption = None,
    samples: SamplesOption = None,
    kl: Annotated[float | None, typer.Option(help="Nats that the policy is to be moved by; default 3.")] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Run the study that tests readiness against the truth instead.")
    ] = False,
    size: Annotated[
        Size,
        typer.Option(
            help=f"Of that study: full ({_num_models('validation')} reward models, about 40 minutes) or smoke "
            f"({_num_models('validation-smoke')}, a minute)."
        ),
    ] = "full",
    train_data: Annotated[
        str | None, typer.Option(help="v1: pairs it was trained on, for the train-test gap; without, that check fails.")
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="v1: also write the result as JSON.")] = None,
    limit: Limit = None,
    split: Split = "train",
    prompt_column: PromptColumn = None,
    chosen_column: ChosenColumn = None,
    rejected_column: RejectedColumn = None,
    num_pairs: NumPairs = LANDSCAPE.num_pairs,
    max_seq_len: MaxLen = None,
    render_fn: RenderFn = None,
    device: Device = "auto",
    seed: Seed = 0,
    preset: Annotated[str, typer.Option(help="v2: start from a named run.")] = "policy",
    config: ConfigOption = None,
    set_: SetOption = None,
    summary: SummaryOption = None,
) -> None:
    """Judge whether a policy may be optimised against a reward model.

    With a policy (or samples of one) that is readiness v2: on the policy's own samples, judged by the gold world or by
    your judge's column; how pairs are read is then told with --set (data.split, data.limit, ...). Without, readiness
    v1: on labelled pairs alone. Examples:

    rm-opt readiness --policy sft

    rm-opt readiness --checkpoint out/best --data pairs.parquet --samples judged.parquet

    rm-opt readiness --checkpoint out/best --data test.parquet --train-data train.parquet

    rm-opt readiness --validate --size smoke
    """
    if validate:
        _validate(size, config, set_ or [], summary)
        return
    if policy is None and samples is None and checkpoint is not None:
        if data is None:
            raise ConfigError("readiness v1 is measured on labelled pairs; name them with --data, or give a --policy.")
        v1_readiness(
            MeasuredModel(checkpoint, max_seq_len, render_fn, device),
            PairSource(data, split, limit, (prompt_column, chosen_column, rejected_column)),
            train_data=train_data,
            num_pairs=num_pairs,
            seed=seed,
            json_out=json_out,
        )
        return
    wanted = _assignments(checkpoint, policy, data, samples)
    wanted += [] if kl is None else [f"readiness.planned_kl={kl}"]
    outcome = run_configured(_loader("readiness", checkpoint), preset, config, [*wanted, *(set_ or [])], summary)
    from rmcore.reporting.html.policy import readiness_rows

    results = outcome["results"]
    print(f"\n{results['verdict']['headline']}")
    checks = [f"{'pass' if check['passed'] else 'FAIL'}  {check['text']}" for check in results["gate"]]
    print_findings(("part", "value, 95 %"), readiness_rows(results), checks)
    print_places(outcome)


def _validate(size: Size, config: Path | None, assignments: list[str], summary: Path | None) -> None:
    from rmcore.reporting.html.policy import VALIDATION_HEADINGS, validation_rows

    preset = "validation" if size == "full" else "validation-smoke"
    outcome = run_configured(_load_validation, preset, config, assignments, summary)
    print_findings(VALIDATION_HEADINGS, validation_rows(outcome["results"]), [outcome["results"]["verdict"]])
    print_places(outcome)


def _assignments(checkpoint: str | None, policy: str | None, data: str | None, samples: str | None) -> list[str]:
    """The settings behind the options. A given reward model was not trained here, so more pairs are left to measure."""
    given = {"policy.name": policy, "data.source": data, "policy.samples": samples}
    return settings_of(given) + (["data.test_fraction=0.5"] if checkpoint is not None and data is not None else [])


def _loader(name: Literal["best_of_n", "readiness"], checkpoint: str | None) -> Any:
    """What imports a flow with its checkpoint; Prefect reads its address then, so not before it is called."""

    def load() -> Any:
        from flows import policy

        return partial(getattr(policy, name), checkpoint=checkpoint)

    return load


def _load_validation() -> Any:
    from flows.policy import readiness_validation

    return readiness_validation


def add_to(app: typer.Typer) -> None:
    """Mount the commands."""
    app.command("best-of-n")(best_of_n)
    app.command()(readiness)
