"""vLLM engines with the demo policy in float32, in this process or in one of their own, and what they are asked."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "recipes" / "demo_model" / "checkpoint"
MAX_DRAFT_TOKENS = 16
MAX_MODEL_LEN = 512
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",  # compiles one helper of log-probs for 20 s
}


def make_engine(war=None, **options):
    """An engine; with ``war`` it speculates with WAR's drafts under these limits."""
    from vllm import LLM

    if war is not None:
        from verl_war.integration.vllm.proposer import engine_options

        options |= engine_options(war, MAX_DRAFT_TOKENS)
        options["worker_extension_cls"] = "verl_war.integration.vllm.worker.SpeculationCalls"
    return LLM(
        **{
            "model": str(MODEL),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 128,
            "max_num_batched_tokens": 2048,
            "block_size": 32,
            "num_gpu_blocks_override": 320,  # few enough that requests are preempted
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "seed": 0,
        }
        | options
    )


def runner_of(engine):
    """The model runner of an engine in this process."""
    return engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def generate(engine, prompts, params, trajectories=None):
    """Token ids and log-probs of every prompt; ``params`` are keyword arguments of `SamplingParams`."""
    from vllm import SamplingParams

    sampling = []
    for i in range(len(prompts)):
        extra = {} if trajectories is None else {"extra_args": {"war": {"trajectory": trajectories[i], "step": 0}}}
        sampling.append(SamplingParams(**{"logprobs": 0} | params | extra))
    outputs = engine.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
    answers = []
    for output in outputs:
        (answer,) = output.outputs
        assert len(answer.logprobs) == len(answer.token_ids)
        answers.append(
            {
                "tokens": list(answer.token_ids),
                "logprobs": [
                    position[token].logprob for position, token in zip(answer.logprobs, answer.token_ids, strict=True)
                ],
                "finish": answer.finish_reason,
                "stop": answer.stop_reason,
                "text": answer.text,
            }
        )
    return answers


def conversations(tokenizer, count=8):
    """Contexts of agent conversations with quoted files: what the policy was trained on, cut at various places."""
    words = "parse load value index config result total buffer token limit".split()
    rng = random.Random(7)
    contexts = []
    for _ in range(count):
        names = rng.sample(words, 4)
        code = "".join(f"def {a}_{b}(x):\n    return {b}(x) + {a}\n\n" for a in names[:2] for b in names[2:])
        messages = [
            {"role": "user", "content": f"Fix {names[0]}_{names[2]} in main.py."},
            {"role": "assistant", "content": f"I read it first.\n{code}"},
            {"role": "user", "content": f"{code}{names[0]} fails, write {names[1]}_{names[3]} again."},
        ]
        contexts.append(
            tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        )
    return contexts


def multi_turn(engine, contexts, params, turns=3, name="t"):
    """Plays conversations whose tool outputs quote the answers; returns the answers of all turns."""
    contexts = [list(context) for context in contexts]
    names = [f"{name}{i}" for i in range(len(contexts))]
    answers = []
    for turn in range(turns):
        said = generate(engine, contexts, params, names)
        answers.append(said)
        for i, answer in enumerate(said):
            quoted = contexts[i][5 * turn : 5 * turn + 20]
            contexts[i] = contexts[i] + answer["tokens"] + quoted + answer["tokens"][: 10 + 3 * i]
    return answers


GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
CASES = {
    "greedy": GREEDY,
    "penalties": GREEDY | {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "min tokens": {"temperature": 0.0, "max_tokens": 40, "min_tokens": 15},
    "bad words": GREEDY | {"bad_words": ["return", "def"]},
    "allowed tokens": GREEDY | {"allowed_token_ids": list(range(40, 400))},
    "stop string": GREEDY | {"stop": ["x)", "value"]},
    "stop string kept": GREEDY | {"stop": ["return", "x)"], "include_stop_str_in_output": True},
    "stop string after some": GREEDY | {"stop": ["x", "e"], "min_tokens": 7},
    "stop tokens": GREEDY | {"stop_token_ids": list(range(300, 420))},
}
STRUCTURED = {"structured_outputs": {"regex": r"[a-z]{3} = [0-9]{2,4}(, [a-z]{3} = [0-9]{2,4}){2}"}}


def with_structure(params):
    from vllm.sampling_params import StructuredOutputsParams

    return {
        key: StructuredOutputsParams(**value) if key == "structured_outputs" else value for key, value in params.items()
    }


def ask_everything(engine):
    """What both engines are asked; everything is greedy, so that the answers must be the same."""
    contexts = conversations(engine.get_tokenizer())
    answers = {name: generate(engine, contexts, params) for name, params in CASES.items()}
    answers["structured"] = generate(engine, contexts, with_structure(GREEDY | STRUCTURED | {"ignore_eos": False}))
    answers["multi turn"] = [a for turn in multi_turn(engine, contexts, GREEDY) for a in turn]
    answers["short prompts"] = generate(engine, [[5], [7, 7], contexts[0][:3]], GREEDY)
    long = [(contexts[0] * 9)[: MAX_MODEL_LEN - left] for left in (1, 2, 9, 30)]
    answers["end of the context"] = generate(engine, [*contexts[:4], *long], GREEDY | {"max_tokens": 60})
    answers["preempted"] = generate(engine, preempted_prompts(contexts), GREEDY | {"max_tokens": 150})
    return answers


def preempted_prompts(contexts):
    """Prompts that share nothing and, with 150 tokens each, need more KV than there is."""
    return [[5 + i, *(contexts[i % len(contexts)] * 9)[:349]] for i in range(26)]


def reference_answers():
    """Answers of an engine without speculation, in a process of its own."""
    return run_alone("json.dump(e.ask_everything(e.make_engine()), out)")


def answers_of_a_worker_process():
    """Greedy answers of a speculating engine as verl runs it: engine and worker are processes, and do not share one."""
    return run_alone(
        "json.dump(e.watch_drafts(e.make_engine({'mode': 'always'}, distributed_executor_backend='mp')), out)",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # functions are sent to the worker
    )


def watch_drafts(engine):
    """Greedy answers, how often the engine asked its worker for drafts, and what came of them."""

    def count(wrapper):
        worker = wrapper.worker
        ask, worker.times_asked = worker.take_draft_token_ids, 0

        def counted():
            worker.times_asked += 1
            return ask()

        worker.take_draft_token_ids = counted

    engine.collective_rpc(count)
    answers = generate(engine, conversations(engine.get_tokenizer()), GREEDY)
    (times_asked,) = engine.collective_rpc(lambda wrapper: wrapper.worker.times_asked)
    (report,) = engine.collective_rpc("war_speculation_stats")
    return {"answers": answers, "times_asked": times_asked, "report": report}


def run_alone(statement, **environment):
    """What a statement writes to `out` in a process of its own, where `e` is this module."""
    code = f"import json, sys; from tests.exactness import engine as e\nwith open(sys.argv[1], 'w') as out: {statement}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.json"
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(path.read_text())
