"""The form of a flow that runs under a config: a preset, what is changed most, and all other settings by name.

A run's start has the same three parts everywhere: the form, a schedule, `prefect deployment run`, and the command line.
So the page of each run shows what was chosen, and an artifact there shows what follows from it.
"""

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import Annotated, Any

from coolname.data import config as word_lists
from prefect import Flow, flow, runtime
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.utilities.callables import parameter_schema
from pydantic import MISSING, ValidationError, WithJsonSchema

from experiments.presets import DESCRIBED, PRESETS
from flows.cancellation import ended_on_its_page
from flows.prefect_api import end_without_server
from flows.prefect_client import claim_loaded_run, claim_run, prefect_at
from flows.settings import (
    DEFAULT_PRESET,
    EPOCHS,
    GROUPS,
    OWN_DATA_PRESET,
    SOURCE,
    STEPS,
    base_preset,
    changes_of,
    flat_overrides,
    form_config,
    named_changes,
    require_names,
)
from rmcore.cli.guard import describe_validation
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from tasks.home import FOLDER_VARIABLE

Outcome = dict[str, Any]
FIELDS = {
    "data": "data.source",
    "model": "model.name",
    "steps": "train.steps",
    "epochs": "train.epochs",
    "lr": "train.lr",
    "pairs_per_step": "train.pairs_per_step",
    "seed": "seed",
    "study": "study",
}
"""Fields of a form by the setting that each one is: what is changed most of a training."""
HELP = {
    STEPS: "Optimizer steps, in place of the preset's steps or epochs.",
    EPOCHS: "Passes over the training pairs, in place of the preset's steps or epochs.",
}
"""Groups of settings that stand for each other in a form."""
PRESET_FIELD, OVERRIDES = "preset", "overrides"
_WORD_LISTS: dict[str, Any] = dict(word_lists)
_SERVERS_WORDS = frozenset(word for words in _WORD_LISTS.values() for word in words.get("words", ()))
"""Prefect's server names a run that was given no name by an adjective and an animal: brave-otter."""
_FORMS_LETTERS = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|chi"
    "|psi|omega"
)
_FORMS_NAME = re.compile(rf"(?:{_FORMS_LETTERS})\d*(?:-[a-z]+){{1,4}}")
"""The form of Prefect's UI writes a Greek letter and a star or planet into the field of the name: theta3-vega-cloud."""


@dataclass(frozen=True, slots=True)
class Form:
    """The fields that a flow's form asks for."""

    preset: str
    """The one that is taken where none is chosen; for DEFAULT_PRESET, `base_preset` says which."""
    fields: Mapping[str, str]
    """Dotted setting by field."""
    sections: tuple[str, ...]
    """Sections of the config that the flow reads."""
    presets: tuple[str, ...]
    """Those to choose from."""
    requires: Callable[[PipelineConfig], object] | None = None
    """Refuses settings with which the flow could not come to its end, before its first stage."""

    def config(self, given: Mapping[str, Any]) -> PipelineConfig:
        """The config that a run's parameters stand for; those of the flow's own are not looked at.

        Raises:
            ConfigError: a preset, setting or value is not allowed, as the command line says it.
        """
        filled = {setting: given.get(field) for field, setting in self.fields.items()}
        chosen = {setting: value for setting, value in filled.items() if value not in (None, "")}
        try:
            return form_config(self.preset_of(given), chosen, given.get(OVERRIDES) or {})
        except ValidationError as error:
            raise ConfigError(describe_validation(error)) from None

    def preset_of(self, given: Mapping[str, Any]) -> str:
        """The preset that a run's parameters change: the one that is chosen, or the one of a command without any.

        Raises:
            ConfigError: there is no such preset, or the overrides are no settings.
        """
        named = given.get(PRESET_FIELD) or (None if self.preset == DEFAULT_PRESET else self.preset)
        field = next((field for field, setting in self.fields.items() if setting == SOURCE), "")
        return base_preset(named, None, given.get(field) or flat_overrides(given.get(OVERRIDES) or {}).get(SOURCE))

    def parameters(self) -> list[inspect.Parameter]:
        """The fields as a function's parameters, with their JSON schema: type, bounds and help of the setting."""
        is_open = self.preset == DEFAULT_PRESET
        preset = {
            "type": "string",
            "enum": list(self.presets),
            "description": "The run that is changed below: a field that is left empty is as it has it. Left empty: "
            + (f"{DEFAULT_PRESET}, or with data of your own {OWN_DATA_PRESET}" if is_open else self.preset)
            + ".\n\n"
            # The page joins lines that no empty one divides.
            + "\n\n".join(f"- `{name}`: {DESCRIBED[name].purpose}{_time(name)}" for name in self.presets),
        }
        overrides = {
            "type": "object",
            "description": 'All other settings, as --set names them: {"model.max_seq_len": 256, "train.optimizer": '
            f'"muon"}}. This flow reads the sections {", ".join(self.sections)}; `rm-opt init` writes the most common '
            "settings of a preset down, each with its help.",
        }
        return [
            _parameter(PRESET_FIELD, preset, None if is_open else self.preset),
            *(_parameter(field, _schema(setting), None) for field, setting in self.fields.items()),
            _parameter(OVERRIDES, overrides, {}),
        ]


def configured_flow(
    name: str, form: Form, picture: str, suffix: str = "", **options: Any
) -> Callable[[Callable[..., Outcome]], Flow[..., Outcome]]:
    """Make a flow of a function whose first argument is a config; in its place the flow takes the form's fields.

    Args:
        name: of the flow.
        form: the fields to fill in; the function's other arguments follow its fields.
        picture: the chain of stages, drawn with characters.
        suffix: of a run's name, after study and seed; what it changes of its preset follows.
        options: of Prefect's.
    """

    def suggest(parameters: Mapping[str, Any]) -> str | None:
        try:
            config = form.config(parameters)
        except ConfigError:  # the run is about to say so
            return None
        # Three runs of one study with one name could not be told apart in Prefect's list.
        changes = named_changes(config.model_copy(update={"seed": PRESETS[form.preset].seed}).model_dump(mode="json"))
        return f"{config.study}-seed{config.seed}{suffix} · {changes}"

    def decorate(body: Callable[..., Outcome]) -> Flow[..., Outcome]:
        own = [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for one in list(inspect.signature(body).parameters.values())[1:]
        ]
        fields = form.parameters()
        signature = inspect.Signature([*fields[:-1], *own, fields[-1]])

        @wraps(body)
        def run(**given: Any) -> Outcome:
            bound = signature.bind(**given)
            bound.apply_defaults()
            with _flow_run():
                config = form.config(bound.arguments)
                if runtime.flow_run.id is not None:
                    _show(form, form.preset_of(bound.arguments), config)
                require_names(config)
                if form.requires is not None:
                    form.requires(config)
                return body(config, **{one.name: bound.arguments[one.name] for one in own})

        run.__signature__ = signature  # type: ignore[attr-defined]
        text = description(body, picture)
        made: Flow[..., Outcome] = flow(name=name, description=text, flow_run_name=named(suggest), **options)(run)
        # Prefect draws the form from here. A default of null there would be what an empty field holds, and be refused.
        without = [one.replace(default=MISSING if one.default is None else one.default) for one in fields]
        made.__signature__ = inspect.Signature([*without[:-1], *own, without[-1]])  # type: ignore[attr-defined]
        made.parameters = parameter_schema(made)
        claim_loaded_run()
        return made

    return decorate


def described_flow(
    name: str, picture: str, run_name: Callable[[Mapping[str, Any]], str], **options: Any
) -> Callable[[Callable[..., Outcome]], Flow[..., Outcome]]:
    """Make a flow of a function whose arguments are its form.

    Args:
        name: of the flow.
        picture: what it does in which order, drawn with characters.
        run_name: of a run, given its parameters.
        options: of Prefect's.
    """

    def decorate(body: Callable[..., Outcome]) -> Flow[..., Outcome]:
        @wraps(body)
        def run(*args: Any, **given: Any) -> Outcome:
            with _flow_run():
                return body(*args, **given)

        made: Flow[..., Outcome] = flow(
            name=name, description=description(body, picture), flow_run_name=named(run_name), **options
        )(run)
        claim_loaded_run()
        return made

    return decorate


@contextmanager
def _flow_run() -> Iterator[None]:
    """Wrap a flow run in what all have in common: it has an owner, and ends with Prefect's server or as cancelled."""
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    if run is None:
        yield
        return
    with ExitStack() as around:
        if "PREFECT_API_URL" in os.environ:
            around.enter_context(end_without_server("Finished stages are stored: start the run again."))
            around.enter_context(ended_on_its_page(run.id))
        with prefect_at(None) as client:
            claim_run(client, run.id)
        _go_to_users_folder()
        yield


def _go_to_users_folder() -> None:
    """Read paths as where the worker was started: Prefect starts its runs in the folder that holds the packages."""
    if FOLDER_VARIABLE not in os.environ:
        return
    try:
        os.chdir(os.environ[FOLDER_VARIABLE])
    except OSError as error:
        get_run_logger().warning(
            "Relative paths are read in %s: the folder where the worker was started cannot be opened (%s). Start the "
            "services (rm-opt up) or the worker (rm-opt worker) again in the folder of your data.",
            os.getcwd(),
            error,
        )


def description(body: Callable[..., Any], picture: str) -> str:
    """Describe a flow on its deployment's page: what it does, and its stages (Markdown)."""
    said = (inspect.getdoc(body) or "").partition("\n\nArgs:")[0]
    stages = "\n".join(f"    {line}" for line in inspect.cleandoc(picture).splitlines())
    return f"{said}\n\n{stages}"


def _time(preset: str) -> str:
    time = DESCRIBED[preset].time
    return "" if time is None else f" ({time} on two cores)"


def presets_for(*commands: str) -> tuple[str, ...]:
    """The presets that these commands start from, those of the first one first."""
    return tuple(name for command in commands for name, one in DESCRIBED.items() if one.command == command)


def _parameter(name: str, schema: Mapping[str, Any], default: Any) -> inspect.Parameter:
    # Any: the config checks the value, so that it is refused in the same words wherever it comes from.
    annotation = Annotated[Any, WithJsonSchema(dict(schema))]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@cache
def _properties(group: str) -> dict[str, Any]:
    """The JSON schemas of a group of settings, which forms ask for 56 times: pydantic takes 20 ms each time."""
    properties: dict[str, Any] = GROUPS[group].model_json_schema()["properties"]
    return properties


def _schema(setting: str) -> dict[str, Any]:
    """The JSON schema of a setting, where being left out takes the place of a default and of null."""
    group, _, name = setting.rpartition(".")
    owner = GROUPS[group]
    schema = dict(_properties(group)[name])
    for part in schema.pop("anyOf", []):
        schema |= {} if part == {"type": "null"} else part
    described = HELP.get(setting) or " ".join(str(owner.model_fields[name].description).split())
    kept = {key: value for key, value in schema.items() if key not in ("default", "title")}
    return kept | {"description": f"{setting}: {described}"}


def _show(form: Form, preset: str, config: PipelineConfig) -> None:
    """Say in the flow run's log what was changed, and what of that is not read."""
    changes = changes_of(preset, config)
    said = ", ".join(f"{name}={value}" for name, value in changes.items())
    log = get_run_logger()
    log.info(f"settings    preset {preset}; {f'changed: {said}' if said else 'nothing of it is changed'}")
    if unread := sorted({name.partition(".")[0] for name in changes} - {"study", "seed", "device", *form.sections}):
        log.warning(f"this flow does not read {', '.join(unread)}: what was changed there has no effect")


def is_made_up(name: str) -> bool:
    """Whether Prefect has made the name of a flow run up. One that looks so, such as beta-run, counts as such, too."""
    words = name.split("-")
    return bool(_FORMS_NAME.fullmatch(name)) or (len(words) == 2 and _SERVERS_WORDS.issuperset(words))


def named(suggest: Callable[[Mapping[str, Any]], str | None]) -> Callable[[], str]:
    """Make what `@flow(flow_run_name=…)` takes: a given name stays, a made-up one becomes the suggested one.

    Args:
        suggest: given the parameters of the run; None where they do not say.
    """

    def name() -> str:
        given = str(runtime.flow_run.name)
        return (suggest(runtime.flow_run.parameters) or given) if is_made_up(given) else given

    return name
