"""vLLM's own scheduler, with the plugin and without, in one process, in turns.

    python asv_bench/vllm_scheduler.py [--rounds N] [--steps N]

Run by a Python that has kvcache and vLLM. Rows: a step of 256 decoding requests; the
admission of 256 requests of 1,024 tokens, of which the first half is cached; making
such requests, hashing included. Only what is named is timed: not what the model would
do, and not what the scheduler does with its answer. Both sides get the same requests
and must schedule the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns as clock
from typing import Any

from measure import Side, Unavailable

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_PLUGINS"] = ""  # this script registers and unregisters by itself

BLOCK_SIZE = 16
RUNNING = 256
PROMPT = 1_024
POOL = 60_000
AT_ONCE = 16
LONGEST = 1_024  # steps, before requests start anew
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1_000,
    "max_position_embeddings": 8_192,
    "torch_dtype": "float32",
}


def make_scheduler(folder: str) -> Any:
    import torch
    from vllm.config import (
        CacheConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    budget = RUNNING * PROMPT
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = POOL
    config = VllmConfig(
        model_config=ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=8_192
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=RUNNING,
            max_num_batched_tokens=budget,
            max_model_len=8_192,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            watermark=0.0,
        ),
        cache_config=cache,
        parallel_config=ParallelConfig(),
    )
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=POOL,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        block_size=BLOCK_SIZE,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )


class Engine:
    """A scheduler and what it needs; made and used while its side is in place."""

    def __init__(self, folder: str) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.utils import hashing
        from vllm.v1.core import kv_cache_utils

        kv_cache_utils.init_none_hash(hashing.sha256)
        self.hasher = kv_cache_utils.get_request_block_hasher(
            BLOCK_SIZE, hashing.sha256
        )
        self.sampling = SamplingParams(max_tokens=8_000, ignore_eos=True)
        self.sampling.update_from_generation_config({}, 0)
        self.scheduler = make_scheduler(folder)
        self.made = 0

    def requests(self, prompts: list[list[int]]) -> list[Any]:
        from vllm.v1.request import Request

        made = []
        for prompt in prompts:
            self.made += 1
            made.append(
                Request(
                    str(self.made),
                    prompt,
                    self.sampling,
                    None,
                    block_hasher=self.hasher,
                )
            )
        return made

    def step(self) -> tuple[int, dict[str, int]]:
        """Schedule, and have each request get a token: nanoseconds of the former."""
        from vllm.v1.outputs import ModelRunnerOutput

        start = clock()
        output = self.scheduler.schedule()
        spent = clock() - start
        names = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[[7]] * len(names),
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        return spent, dict(output.num_scheduled_tokens)

    def finish_all(self) -> None:
        from vllm.v1.request import RequestStatus

        names = [request.request_id for request in self.scheduler.running]
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)


def prompts(first: int) -> list[list[int]]:
    """The first half is that of the same request of another round."""
    half = PROMPT // 2
    return [
        [i % 1_000] * half + [(first + i + k) % 1_000 for k in range(half)]
        for i in range(RUNNING)
    ]


def decode(engine: Engine, turn: int, steps: int) -> tuple[float, Any]:
    """Nanoseconds of a step: the median of `steps`, of requests that run already."""
    if not engine.scheduler.running:
        # Of all lengths: in each step as many take a block, or fill one.
        shorter = [prompt[i % BLOCK_SIZE :] for i, prompt in enumerate(prompts(0))]
        for request in engine.requests(shorter):
            engine.scheduler.add_request(request)
        engine.step()
    done = [engine.step() for _ in range(steps)]
    return median(spent for spent, _ in done), [tokens for _, tokens in done]


def decoding(with_plugin: bool) -> Side:
    """One side's steps of decoding, `AT_ONCE` a loop, as side_by_side.py runs them."""
    from kvcache.integrations import vllm as plugin

    def place() -> contextlib.AbstractContextManager[None]:
        return in_place(plugin) if with_plugin else contextlib.nullcontext()

    with tempfile.TemporaryDirectory() as folder, place():
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        engine = Engine(folder)
    one_each = [1] * RUNNING
    steps = 0

    def run(loops: int) -> int:
        nonlocal steps
        with place():
            # Not counted: putting the plugin in place undoes what Python had cached.
            decode(engine, 0, 2)
            done = [engine.step() for _ in range(loops * AT_ONCE)]
            steps += loops * AT_ONCE
            if steps > LONGEST:
                engine.finish_all()
                steps = 0
        if any(list(tokens.values()) != one_each for _, tokens in done):
            raise AssertionError("not every request got a token, and one only")
        return round(median(spent for spent, _ in done) * len(done))

    return Side(run, RUNNING * AT_ONCE)


def prefill(engine: Engine, turn: int, steps: int) -> tuple[float, Any]:
    """Nanoseconds of the step that admits all requests."""
    for request in engine.requests(prompts(turn + 1)):
        engine.scheduler.add_request(request)
    spent, tokens = engine.step()
    engine.finish_all()
    return spent, sorted(tokens.values())


def creation(engine: Engine, turn: int, steps: int) -> tuple[float, Any]:
    """Nanoseconds to make all requests; their last hashes."""
    wanted = prompts(turn)
    start = clock()
    made = engine.requests(wanted)
    spent = clock() - start
    return spent, [request.block_hashes[-1] for request in made]


@contextlib.contextmanager
def in_place(plugin: Any) -> Iterator[None]:
    """Have kvcache in vLLM's place, and vLLM's own back afterwards."""
    mode = os.environ.pop("KVCACHE_VLLM", None)
    with contextlib.redirect_stdout(None):  # it tells each time
        swapped = plugin.register()
    if not swapped:
        raise Unavailable("the plugin does not know this vLLM")
    try:
        yield
    finally:
        plugin.unregister()
        if mode is not None:
            os.environ["KVCACHE_VLLM"] = mode


def compare(
    work: Callable[..., tuple[float, Any]], folder: str, rounds: int, steps: int
) -> None:
    from kvcache.integrations import vllm as plugin

    stock = Engine(folder)
    with in_place(plugin):
        ours = Engine(folder)
    ratios, times = [], []
    gc.collect()
    gc.disable()
    for turn in range(rounds + 1):
        theirs_ns, theirs_said = work(stock, turn, steps)
        with in_place(plugin):
            ours_ns, ours_said = work(ours, turn, steps)
        if ours_said != theirs_said:
            raise SystemExit(f"{work.__name__}: the two sides differ")
        if turn:  # the first warms up
            ratios.append(theirs_ns / ours_ns)
            times.append((ours_ns, theirs_ns))
    gc.enable()
    low, *_, high = quantiles(ratios, n=10, method="inclusive")
    mine, other = (median(side) / 1e6 for side in zip(*times, strict=True))
    print(
        f"{work.__name__:10} {mine:8.3f} ms {other:8.3f} ms"
        f" {median(ratios):6.2f}x  {low:.2f}-{high:.2f}x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=48, help="of decoding, a round")
    options = parser.parse_args()
    import vllm

    print(f"vLLM {vllm.__version__}, {RUNNING} requests of {PROMPT} tokens")
    print("work          kvcache       stock   ratio  spread")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        for work in (decode, prefill, creation):
            compare(work, folder, options.rounds, options.steps)


if __name__ == "__main__":
    main()
