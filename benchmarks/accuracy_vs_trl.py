"""Train the same model on the same pairs with TRL's RewardTrainer and judge it by the same metrics.

Reads the `prepare` artifact of a finished pipeline run (its summary names it), so that both sides see the same tokens
of the same pairs, the same learning rate, schedule, batch and precision; the loss is each side's own default. TRL is no
dependency: `pip install trl`.

    rm-opt run --preset minilm --config benchmarks/alpacaeval.yaml --summary ours.json \
        --set data.source=$RM_OPT_DATA/alpacaeval_train.parquet \
        --set data.eval_source=$RM_OPT_DATA/alpacaeval_test.parquet
    python benchmarks/accuracy_vs_trl.py --summary ours.json --out trl_checkpoint
"""

import argparse
import json
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from rmcore.data.pair import PreferencePair
from rmcore.data.rendering import Rendering
from rmcore.data.table import read_pairs
from rmcore.metrics.comparison import paired_comparison
from rmcore.metrics.report_card import evaluate_pairs
from rmcore.model import BradleyTerryRM, resolve_model
from rmcore.scoring.score import score_pairs_table

SHOWN = ("pairwise_accuracy", "length_matched_accuracy", "longer_wins_accuracy", "loss", "ece_debiased")


def token_rows(pairs: list[PreferencePair], checkpoint: Path) -> Dataset:
    """The token ids of our own training, cut to the limit: TRL by itself would drop every pair with a longer side."""
    tokenized = BradleyTerryRM.from_pretrained(checkpoint).renderer.tokenize_pairs(pairs)
    return Dataset.from_list([{"chosen_ids": pair.chosen.ids, "rejected_ids": pair.rejected.ids} for pair in tokenized])


def train_with_trl(config: dict, rows: Dataset, out: Path) -> float:
    """Train and save; returns the wall seconds of TRL's `train`."""
    source, settings = resolve_model(config["model"]["name"]), config["train"]
    tokenizer = AutoTokenizer.from_pretrained(source)
    if tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.sep_token  # TRL's RewardTrainer needs one
    torch.manual_seed(config["seed"])
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    arguments = RewardConfig(
        output_dir=str(out / "trl"),
        per_device_train_batch_size=settings["pairs_per_step"],
        num_train_epochs=settings["epochs"],
        learning_rate=settings["lr"],
        lr_scheduler_type="cosine",
        warmup_steps=settings["warmup_steps"],
        weight_decay=settings["weight_decay"],
        max_length=config["model"]["max_seq_len"],
        bf16=settings["precision"] == "bf16",
        gradient_checkpointing=settings["gradient_checkpointing"],
        use_cpu=not torch.cuda.is_available(),
        seed=config["seed"],
        logging_steps=20,
        save_strategy="no",
        report_to=[],
    )
    trainer = RewardTrainer(model=model, args=arguments, processing_class=tokenizer, train_dataset=rows)
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    model.config.problem_type = "regression"
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)
    Rendering("plain", config["model"]["max_seq_len"]).save(out)
    return seconds


def main() -> None:
    """Print one table with both sides, and the paired comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summary", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    ours = json.loads(arguments.summary.read_text())
    results = ours["results"]
    prepared = Path(next(stage["path"] for stage in results["stages"] if stage["name"] == "prepare"))
    train, test = read_pairs(prepared / "train.parquet"), read_pairs(prepared / "test.parquet")
    rows = token_rows(train, Path(ours["checkpoint"]))
    seconds = train_with_trl(results["config"], rows, arguments.out)
    tables = {}
    for name, folder in (("rm-opt", Path(ours["checkpoint"])), ("TRL", arguments.out)):
        tables[name], _ = score_pairs_table(BradleyTerryRM.from_pretrained(folder), test)
    print(f"{len(train)} training pairs, {len(test)} test pairs\n")
    print("| | " + " | ".join(SHOWN) + " | training, s |")
    print("| --- |" + " ---: |" * (len(SHOWN) + 1))
    for name, table in tables.items():
        card = evaluate_pairs(table)
        cells = [f"{card[key].value:.3f} [{card[key].ci_low:.3f}, {card[key].ci_high:.3f}]" for key in SHOWN]
        spent = seconds if name == "TRL" else results["training"]["wall_seconds"]
        print(f"| {name} | " + " | ".join(cells) + f" | {spent:.0f} |")
    compared = paired_comparison(tables["rm-opt"], tables["TRL"])
    difference, p_value = compared["accuracy_difference"], compared["sign_flip_p"]
    interval = f"[{difference['ci_low']:+.3f}, {difference['ci_high']:+.3f}]"
    print(f"\nrm-opt minus TRL: {difference['value']:+.3f} {interval} accuracy, sign-flip p {p_value:.3f}")


if __name__ == "__main__":
    main()
