"""The pairs, models and data that runs name are looked for before anything starts: offline, libraries try for long."""

from rmcore.config.data import GOLD, NO_PAIRS
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.hub import require_model


def require_names(*configs: PipelineConfig) -> None:
    """Refuse runs that name no pairs, and ask the hub once for each model and data set that is only there.

    Raises:
        ConfigError: the preset is for the user's own pairs and none are named, or a model is `minilm`, whose package is
            not installed.
        ModelError, DataError: the hub does not answer or does not show them.
    """
    from rmcore.data.readers.hub import hub_revision
    from rmcore.data.readers.sources import source_kind

    models, sources = dict[str, None](), dict[str, None]()  # in order, each once
    for config in configs:
        if config.data.source == NO_PAIRS:
            raise ConfigError(
                "this preset is for pairs of your own and none are named: name them by --data FILE, in the field data "
                f"of a form, or in a settings file as data.source ({GOLD} is the synthetic benchmark)."
            )
        models[config.model.name] = None
        if config.policy is not None and config.needs_policy:
            models |= {config.policy.name: None, config.policy.base: None}
        sources |= dict.fromkeys(source for source in (config.data.source, config.data.eval_source) if source)
    for model in models:
        require_model(model)
    for source in sources:
        if source != GOLD and source_kind(source) == "hub":
            hub_revision(source)
