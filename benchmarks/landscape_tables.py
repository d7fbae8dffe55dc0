"""The Markdown tables of benchmarks/landscape.py, from the records of its cells."""

from collections.abc import Sequence

import numpy as np


def products_table(records: Sequence[dict]) -> list[str]:
    """One row a kind of product."""
    lines = ["| product | graph | vectors | seconds a vector | gradients a vector | by CPU | peak memory, MiB |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for record in records:
        costs = {name: np.median(times, axis=0) for name, times in record["seconds"].items()}
        mib = {name: f"{num_bytes / 2**20:,.0f}" for name, num_bytes in record["peak_bytes"].items()}
        for name, cost in costs.items():
            kind, graph, count = name, "", ""
            if name.startswith("graph"):
                kind, (graph, count) = record["cell"]["side"], name.removeprefix("graph ").split(", ")
            seconds = cost / int(count or 1)
            ratio, cpu = seconds / costs["gradient"]
            lines.append(
                f"| {kind} | {graph} | {count} | {seconds[0]:.3f} | {ratio:.2f} | {cpu:.2f} | {mib.get(name, '')} |"
            )
    return lines


def eigenvalues_table(records: Sequence[dict]) -> list[str]:
    """One row a side; below it the eigenvalues, to which `deviation` compares those of the other sides."""
    ours = next((one for one in records if one["cell"]["side"] == "rm-opt" and "values" in one), None)
    lines = [
        "| side | seconds | times rm-opt | CPU, s | times rm-opt | products | worst residual | budget | grew by, MiB "
        "| deviation |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    lines += [f"| {record['cell']['side']} | {' | '.join(_eigenvalues_row(record, ours))} |" for record in records]
    if ours:
        lines.append("\nEigenvalues: " + ", ".join(f"{value:.4g}" for value in ours["values"]) + ".")
    return lines


def _eigenvalues_row(record: dict, ours: dict | None) -> list[str]:
    if "values" in record:
        costs = np.median(record["seconds"], axis=0)
        times = costs / np.median(ours["seconds"], axis=0) if ours else [np.nan, np.nan]
        deviations = np.divide(record["values"], ours["values"]) - 1 if ours else [np.nan]
        return [
            f"{costs[0]:.1f}",
            f"{times[0]:.2f}",
            f"{costs[1]:.1f}",
            f"{times[1]:.2f}",
            str(record["num_products"]),
            f"{max(record['residuals']):.2%}",
            f"{record['budget']:g}",
            f"{record['peak_bytes'] / 2**20:,.0f}",
            f"{np.abs(deviations).max():.2%}",
        ]
    if "refused" in record:
        return [f"cannot run: {record['refused']}", *[""] * 8]
    best = f"{record['tried'][-1][3]:.1%}" if record["tried"] else ""
    if "limit" in record:
        return [f"stopped after {record['limit']:.0f}", "", "", "", str(record["num_products"]), best, *[""] * 3]
    return ["not reached", "", "", "", "", best, *[""] * 3]


def gram_table(records: Sequence[dict]) -> list[str]:
    """One row a run."""
    lines = ["| model | pairs | seconds | peak memory, MiB | gradients | lambda max, 95 % | effective rank, 95 % |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | --- | --- |")
    for record in records:
        cell, ends = record["cell"], ("lambda_max", "effective_rank")
        intervals = [" ".join(f"{x:.3g}" for x in record[name] if x is not None) for name in ends]
        lines.append(
            f"| {cell['model']} | {cell['pairs']} | {record['seconds']:.0f} | {record['peak_bytes'] / 2**20:,.0f} | "
            f"{record['num_gradients']} | {intervals[0]} | {intervals[1]} |"
        )
    return lines


TABLES = {"products": products_table, "eigenvalues": eigenvalues_table, "gram": gram_table}
