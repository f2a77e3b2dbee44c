"""Every configuration that we ship composes, and one override makes the difference between stock verl and WAR."""

import itertools
import warnings
from pathlib import Path

import pytest

pytestmark = pytest.mark.upstream

ROOT = Path(__file__).parents[2]
RECIPES = ("code_agent", "search_agent")
MACHINES = ("cpu", "gpu_8b", "gpu_32b")


def compose(recipe, name, *overrides):
    import verl  # noqa: F401  (its plugin registers the search path and the resolver)
    from hydra import compose, initialize_config_dir

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with initialize_config_dir(str(ROOT / "recipes" / recipe / "config"), version_base=None):
            return compose(name, overrides=list(overrides))


def plain(config):
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config, resolve=True)


@pytest.mark.parametrize(("recipe", "algorithm", "machine"), itertools.product(RECIPES, ("grpo", "ppo"), MACHINES))
def test_recipes_compose_and_pass_the_launch_check(recipe, algorithm, machine, tmp_path):
    from verl.trainer.ppo.utils import need_critic

    from verl_war.integration.verl.settings import check_launch

    machine_override = f"machine={machine}"
    model = f"actor_rollout_ref.model.path={tmp_path}"
    stock = compose(recipe, algorithm, machine_override, model)
    war = compose(recipe, algorithm, machine_override, model, "rollout@actor_rollout_ref.rollout=war")
    assert need_critic(stock) == (algorithm == "ppo")
    assert check_launch(stock) is None
    settings = check_launch(war)
    assert settings.speculation.enabled and settings.scheduling.enabled and settings.admission.enabled


MAX_POSITIONS = {"Qwen/Qwen3-8B": 40960, "Qwen/Qwen3-32B": 40960}
"""`max_position_embeddings` of the published models; vLLM refuses to start beyond it."""


@pytest.mark.parametrize(("recipe", "machine"), itertools.product(RECIPES, ("gpu_8b", "gpu_32b")))
def test_gpu_budgets_hold_the_longest_sequence(recipe, machine):
    from verl.utils.config import omega_conf_to_dataclass

    # The critic's configuration loads its model, which a test cannot fetch; its size does not matter here.
    local = ROOT / "recipes" / "demo_model" / "checkpoint"
    critic_model = (f"critic.model.path={local}", f"critic.model.tokenizer_path={local}")
    config = compose(recipe, "ppo", f"machine={machine}", *critic_model)
    rollout = config.actor_rollout_ref.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert longest <= rollout.max_model_len <= MAX_POSITIONS[config.actor_rollout_ref.model.path]

    actor, critic = omega_conf_to_dataclass(config.actor_rollout_ref.actor), omega_conf_to_dataclass(config.critic)
    actor_sp = actor.engine.ulysses_sequence_parallel_size
    assert actor.ppo_max_token_len_per_gpu * actor_sp >= longest
    assert rollout.log_prob_max_token_len_per_gpu * actor_sp >= longest
    critic_sp = critic.engine.ulysses_sequence_parallel_size
    assert critic_sp == actor_sp > 1
    assert min(critic.ppo_max_token_len_per_gpu, critic.ppo_infer_max_token_len_per_gpu) * critic_sp >= longest

    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert gpus % actor_sp == 0
    assert gpus // rollout.tensor_model_parallel_size == {"gpu_8b": 8, "gpu_32b": 4}[machine], "replicas"


def test_the_war_override_changes_the_rollout_section_only_where_it_must():
    stock, war = (
        plain(compose("code_agent", "grpo", *overrides))
        for overrides in ((), ("rollout@actor_rollout_ref.rollout=war",))
    )
    stock_rollout, war_rollout = (config["actor_rollout_ref"].pop("rollout") for config in (stock, war))
    assert war == stock
    assert war_rollout.pop("router_config_path").endswith("war_router.yaml")
    assert war_rollout["agent"].pop("agent_loop_manager_class").endswith("WarAgentLoopManager")
    assert set(war_rollout.pop("custom")) == {"war"}
    assert stock_rollout.pop("router_config_path") is None
    assert war_rollout == stock_rollout


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.rollout.name=sglang", ["rollout.name='sglang'", "allowed: 'vllm'"]),
        (
            "+actor_rollout_ref.rollout.custom.war.sed=1",
            ["unknown key actor_rollout_ref.rollout.custom.war.sed ", "did you mean 'seed'"],
        ),
        ("actor_rollout_ref.rollout.custom.war.block_size_tokens=0", ["block_size_tokens=0", "between 1 and 4096"]),
        ("actor_rollout_ref.rollout.custom.war.speculation.enabled=yes_please", ["'yes_please'", "expected bool"]),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.method=ngram",
            ["engine_kwargs.vllm.speculative_config={'method': 'ngram'}", "WAR sets it"],
        ),
        ("actor_rollout_ref.rollout.full_determinism=True", ["full_determinism=True", "speculation.enabled=False"]),
        ("actor_rollout_ref.rollout.data_parallel_size=2", ["data_parallel_size=2", "speculation.enabled=False"]),
        ("actor_rollout_ref.rollout.enable_rollout_routing_replay=True", ["routing_replay=True", "enabled=False"]),
        ("actor_rollout_ref.rollout.custom.war.speculation.history_dir=history", ["history_dir='history'", "absolute"]),
        ("actor_rollout_ref.rollout.custom.war.speculation.history.sources=[mine]", ["unknown name 'mine'"]),
        ("actor_rollout_ref.rollout.custom.war.profile_path=p.json", ["profile_path='p.json'", "absolute"]),
        ("actor_rollout_ref.rollout.custom.war.profile_path=/no/p.json", ["'/no/p.json' cannot be read", "calibrate"]),
        ("trainer.use_v1=False", ["trainer.use_v1=False", "allowed: True"]),
        ("trainer.v1.trainer_mode=eager", ["trainer_mode='eager'", "'colocate_async'"]),
        ("actor_rollout_ref.rollout.router_config_path=/mine.yaml", ["router_config_path='/mine.yaml'", "remove"]),
        ("actor_rollout_ref.rollout.agent.agent_loop_manager_class=a.B", ["'a.B'", "WarAgentLoopManager"]),
        ("data.max_prompt_length=1536", ["max_prompt_length=1536", "no room"]),
        ("actor_rollout_ref.rollout.custom.war=null", ["custom.war=null", "rollout=rollout for stock verl"]),
        ("actor_rollout_ref.model.path=recipes/no/model", ["'recipes/no/model' does not exist"]),
        ("data.max_prompt_length=40000", ["max_prompt_length=40000", "no room"]),
        ("actor_rollout_ref.model.path=/no/such/model", ["'/no/such/model' does not exist"]),
    ],
)
def test_mistakes_are_refused_before_ray_starts(override, words):
    from verl.utils.config import validate_config

    config = compose("code_agent", "grpo", "rollout@actor_rollout_ref.rollout=war", override)
    with pytest.raises(ValueError) as error:
        validate_config(config, use_reference_policy=False, use_critic=False)
    for word in words:
        assert word in str(error.value)


def test_a_profile_of_another_model_is_refused_before_ray_starts(tmp_path):
    import json

    from tests.core.test_machine_profile import PROFILE
    from verl_war.integration.verl.settings import check_launch

    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE.as_dict()))
    override = f"actor_rollout_ref.rollout.custom.war.profile_path={path}"
    config = compose("code_agent", "grpo", "rollout@actor_rollout_ref.rollout=war", override)
    with pytest.raises(ValueError, match=r"the profile is of demo .*is another model \(Qwen3ForCausalLM"):
        check_launch(config)
