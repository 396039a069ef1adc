"""The ranks that the installed vLLM puts on a node for given command lines, in a process of its own: it is slow to
import and logs much.

Reads [[word, …], …], the words after `vllm serve`, from stdin. Writes of each line where vLLM puts ranks: the first
data-parallel rank on the node, how many there are, the node's place within a rank, and how requests are balanced.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any


def main() -> None:
    lines = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        def ranks(words: list[str]) -> list[Any]:
            args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
            args.model = args.model_tag
            config = AsyncEngineArgs.from_cli_args(args).create_engine_config(headless=args.headless).parallel_config
            by = "external" if config.data_parallel_external_lb else "internal"
            by = "hybrid" if config.data_parallel_hybrid_lb else by
            return [
                config.data_parallel_rank,
                config.data_parallel_size_local,
                config.node_rank_within_dp,
                config.data_parallel_backend,
                by,
            ]

        found = [ranks(words) for words in lines]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
