"""The command `bench attention`."""

import sys

from transformer_jax.benchmark import attention_report
from transformer_jax.benchmark.attention import measure
from transformer_jax.cli.commands import BenchAttention
from transformer_jax.cli.pictures import require_matplotlib
from transformer_jax.files import local_path
from transformer_jax.user_code import is_function_name, search_current_folder


def run(options: BenchAttention) -> None:
    """Prints a table as it is measured, and writes what `--out` and `--dump` ask for."""
    if options.out is not None:
        require_matplotlib("--out")
    if any(map(is_function_name, options.kernels)):
        search_current_folder()
    measured = measure(options, options.dump)
    if options.out is not None:
        local_path(options.out, "--out").parent.mkdir(parents=True, exist_ok=True)
    if options.dump is not None:
        local_path(options.dump, "--dump").mkdir(parents=True, exist_ok=True)
    command = " ".join(["transformer-jax bench attention", *sys.argv[3:]])
    records: list[attention_report.Record] = []
    for case in measured:
        print("\n".join(attention_report.table_lines(case, records)), flush=True)
        records += case
        if options.out is not None:  # after each case, since the last ones take longest
            attention_report.write(options.out, command, options, records)
