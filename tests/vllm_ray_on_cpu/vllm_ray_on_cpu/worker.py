"""vLLM 0.32's CPU worker, with pipeline parallelism mended for --enforce-eager.

There the warm-up is skipped, which alone makes the buffers that a later pipeline stage receives into: the first request
ends the engine with `assert self.intermediate_tensors is not None`.
"""

from __future__ import annotations

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes


class EagerPipelineWorker(CPUWorker):
    """Makes those buffers at the end of the start, where nothing else has."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        times = super().compile_or_warm_up_model()
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return times
