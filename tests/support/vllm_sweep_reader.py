"""Reads a folder of results as the installed vLLM's `bench sweep plot` and `plot_pareto` do, without drawing.

    python -m tests.support.vllm_sweep_reader plot|plot_pareto FOLDER [option …]

Both readers are vLLM's own files. The rest of vLLM takes six seconds to import: of it they get its argument parser's
and its logger's place filled by the standard library's.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType

PACKAGES = ("vllm", "vllm.utils", "vllm.benchmarks", "vllm.benchmarks.sweep")


def main() -> None:
    reader, *words = sys.argv[1:]
    spec = importlib.util.find_spec("vllm")  # imports nothing of it
    assert spec is not None
    assert spec.submodule_search_locations is not None
    top = Path(spec.submodule_search_locations[0])
    for name in PACKAGES:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(top.joinpath(*name.split(".")[1:]))]
    for name, value in (
        ("vllm.utils.argparse_utils.FlexibleArgumentParser", argparse.ArgumentParser),
        ("vllm.logger.init_logger", logging.getLogger),
    ):
        module, _, attribute = name.rpartition(".")
        setattr(sys.modules.setdefault(module, ModuleType(module)), attribute, value)

    own = importlib.import_module(f"vllm.benchmarks.sweep.{reader}")
    arguments = own.SweepPlotArgs if reader == "plot" else own.SweepPlotParetoArgs
    parser = argparse.ArgumentParser()
    arguments.add_cli_args(parser)
    own.main(parser.parse_args([*words, "--dry-run"]))
    if reader == "plot_pareto":  # the curve itself, which is drawn from these
        parsed = arguments.from_cli_args(parser.parse_args(words))
        runs = [run for path in parsed.output_dir.rglob("**/summary.json") for run in own._json_load_bytes(path)]
        for point in own._prepare_records(
            runs, user_count_var=parsed.user_count_var, gpu_count_var=parsed.gpu_count_var
        )[0]:
            print(f"{point['user_count_estimate']:g} users, {point['tokens_per_user']:.2f} tokens/s each")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        sys.exit(0)
    main()
