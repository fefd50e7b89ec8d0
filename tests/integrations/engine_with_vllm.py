"""vLLM's engine on a tiny random model, with the plugin and without: the same output.

    python tests/integrations/engine_with_vllm.py

Run by a Python that has kvcache and a vLLM that can compute on the CPU. 64 prompts with
shared prefixes are served greedily, prefix caching on, with so few blocks that some are
evicted and requests preempted. Each side is a process of its own; token ids, hits of
each request and KV events must be the same.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BLOCK_SIZE = 32
NUM_BLOCKS = 40
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1_000,
    "max_position_embeddings": 1_024,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}


def make_prompts() -> list[list[int]]:
    generator = random.Random(1)
    shared = [[generator.randrange(1, 1_000) for _ in range(160)] for _ in range(4)]
    return [
        generator.choice(shared)[: generator.randint(0, 160)]
        + [generator.randrange(1, 1_000) for _ in range(generator.randint(1, 60))]
        for _ in range(64)
    ]


def serve(folder: str) -> dict[str, Any]:
    """What one engine gives, and how often it preempted."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig

    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        seed=1,
        max_model_len=512,
        max_num_seqs=16,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS,
        enable_prefix_caching=True,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    events: list[str] = []
    publisher = scheduler.kv_event_publisher
    publisher.publish = lambda batch: events.extend(map(repr, batch.events))
    preempt, preempted = scheduler._preempt_request, []

    def counted(request: Any, *args: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **options)

    scheduler._preempt_request = counted
    sampling = SamplingParams(
        temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in make_prompts()],
        sampling,
        use_tqdm=False,
    )
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "hits": [output.num_cached_tokens for output in outputs],
        "events": events,
        "preempted": len(preempted),
        "pool": type(scheduler.kv_cache_manager.block_pool).__module__,
        "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }


def run(folder: str, mode: str) -> dict[str, Any]:
    report = Path(folder, f"report-{mode}.json")
    environment = {
        **os.environ,
        "KVCACHE_VLLM": mode,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
    }
    command = [sys.executable, __file__, folder, str(report)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    said: dict[str, Any] = json.loads(report.read_text())
    return said


def main() -> int:
    if len(sys.argv) == 3:
        Path(sys.argv[2]).write_text(json.dumps(serve(sys.argv[1])))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        stock, ours = run(folder, "0"), run(folder, "manager")
    swapped = stock["pool"].startswith("vllm") and ours["pool"].startswith("kvcache")
    differ = [
        name
        for name in ("tokens", "hits", "events", "preempted", "free")
        if stock[name] != ours[name]
    ]
    evicted = sum(event.startswith("BlockRemoved") for event in ours["events"])
    print(
        f"{len(ours['tokens'])} prompts, {sum(ours['hits'])} tokens hit,"
        f" {ours['preempted']} preemptions, {len(ours['events'])} events,"
        f" {evicted} of them removals:"
        f" {'the same' if not differ else 'different ' + ', '.join(differ)}"
    )
    if not swapped:
        print(f"not swapped: {stock['pool']} and {ours['pool']}")
    idle = not (evicted and ours["preempted"] and sum(ours["hits"]))
    return 1 if differ or not swapped or idle else 0


if __name__ == "__main__":
    sys.exit(main())
