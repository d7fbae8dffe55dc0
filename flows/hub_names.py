"""Models and data of other places are looked for before anything starts: offline, the libraries try for a minute."""

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.hub import require_model


def require_hub_names(*configs: PipelineConfig) -> None:
    """Ask the hub once for each model and data set of these runs that is only there.

    Raises:
        ConfigError: a model is `minilm`, whose package is not installed.
        ModelError, DataError: the hub does not answer or does not show them.
    """
    from rmcore.data.readers.hub import hub_revision
    from rmcore.data.readers.sources import source_kind

    models, sources = dict[str, None](), dict[str, None]()  # in order, each once
    for config in configs:
        models[config.model.name] = None
        if config.policy is not None and config.needs_policy:
            models |= {config.policy.name: None, config.policy.base: None}
        sources |= dict.fromkeys(source for source in (config.data.source, config.data.eval_source) if source)
    for model in models:
        require_model(model)
    for source in sources:
        if source != "gold" and source_kind(source) == "hub":
            hub_revision(source)
