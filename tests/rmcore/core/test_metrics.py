"""The registry: one record a metric, whoever asks for it."""

from rmcore.config.train import TrainConfig
from rmcore.core.metrics import CELL_METRICS, CURVES, METRICS, metric_order, metric_spec
from rmcore.training.selection import HIGHER_IS_BETTER


def test_unknown_metrics_keep_their_name():
    assert metric_spec("brand_new").label == "brand new"
    assert metric_spec("brand_new").unit == metric_spec("brand_new").definition == ""
    assert metric_spec("pairwise_accuracy[a[b]]").label == "accuracy: a[b]"
    assert metric_spec("fpr@0.3").label == "false positive rate at 0.3"


def test_a_table_has_the_listed_ones_first_then_families_then_the_rest():
    names = ["zeta", "fpr@0.3", "brier", "alpha", "pairwise_accuracy[x]", "pairwise_accuracy"]
    assert sorted(names, key=metric_order) == [
        "pairwise_accuracy", "brier", "pairwise_accuracy[x]", "fpr@0.3", "alpha", "zeta",
    ]  # fmt: skip


def test_no_two_have_one_name():
    assert len(CELL_METRICS) == sum(bool(spec.cell_name) for spec in METRICS.values())
    assert all(spec.stage is not None for spec in CELL_METRICS.values())
    assert all(not spec.needs_target and spec.bands is None for spec in METRICS.values() if not spec.cell_name)


def test_the_unit_of_the_mean_margin_is_that_of_the_margins():
    assert {spec.unit for name, spec in METRICS.items() if "margin" in name and "rate" not in name} == {"logits"}


def test_what_training_selects_by_is_directed_as_the_registry_has_it():
    """Training keeps its own direction: a reworded label must not have every checkpoint computed again."""
    for name, spec in {**CURVES, "eval/loss": METRICS["loss"], "eval/ece": METRICS["ece_debiased"]}.items():
        if name in HIGHER_IS_BETTER:
            assert HIGHER_IS_BETTER[name] == spec.higher_is_better, name
    assert TrainConfig().best_metric in HIGHER_IS_BETTER
