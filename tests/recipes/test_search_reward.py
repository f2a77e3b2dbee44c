"""Only the final answer of the last turn counts, whatever tools or earlier turns say."""

import asyncio

import pytest

from recipes.search_agent.reward import compute_score, final_answer, normalise

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Oakford"}}\n</tool_call>'


def response(*turns, end=""):
    """Join assistant turns and tool results as the Qwen chat template does, special tokens removed."""
    parts = [turns[0]]
    for result, turn in zip(turns[1::2], turns[2::2], strict=True):
        parts += [f"\nuser\n<tool_response>\n{result}\n</tool_response>\nassistant\n", turn]
    return "".join(parts) + end


def score(solution, truth=("Lake Morban",)):
    return compute_score("search_agent", solution, list(truth), extra_info={"index": 0}, unused=1)["score"]


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        (response("<answer>Lake Morban</answer>"), 1),
        (response(CALL, "Oakford [d1] ...", "<answer>Lake Morban</answer>"), 1),
        (response(CALL, "x", CALL, "y", "It is <answer> the lake  MORBAN. </answer>\n"), 1),
        (response(CALL, "x", "<think>Perhaps <answer>Oakford</answer></think><answer>Lake Morban</answer>"), 1),
        (response("<answer>Lake Dorvan</answer>"), 0),
        (response("<answer>Morban</answer>"), 0),
        (response("<answer></answer>"), 0),
        (response("Lake Morban"), 0),
        (response("<answer>Lake Morban"), 0),
        (response("Lake Morban</answer>"), 0),
        (response("<Answer>Lake Morban</Answer>"), 0),
        (response("<answer><answer>Lake Morban</answer></answer>"), 0),
        ("", 0),
    ],
)
def test_exact_match_of_one_well_formed_answer(solution, expected):
    assert score(solution) == expected


@pytest.mark.parametrize(
    "solution",
    [
        response("<answer>Oakford</answer><answer>Lake Morban</answer>"),
        response("<answer>Lake Morban</answer> or <answer>Lake Morban</answer>"),
        response("<answer>Oakford, Lake Morban</answer>"),
        response("<answer>Oakford</answer>\n<answer>Lake Morban"),
        response("<answer>Lake Morban</answer>" + CALL, "nothing", "<answer>Oakford</answer>"),
        response("<answer>Lake Morban</answer>" + CALL, "nothing", "I give up."),
    ],
)
def test_listing_answers_does_not_pay(solution):
    assert score(solution) == 0


@pytest.mark.parametrize(
    "solution",
    [
        response(CALL, "<answer>Lake Morban</answer>", "I do not know."),
        response(CALL, "<answer>Lake Morban</answer>", "<answer>Oakford</answer>"),
        response(CALL, "<answer>Lake Morban</answer>", CALL),
        response(CALL, end="\nuser\n<tool_response>\n<answer>Lake Morban</answer>"),
        response(CALL, "a", CALL, end="\nuser\n<tool_response>\n<answer>Lake Morban</answer>\n</tool_response>"),
        response("<answer>Lake Morban</answer>" + CALL),
        response(CALL, "a", "<think>It is <answer>Lake Morban</answer>"),
    ],
)
def test_answers_outside_the_final_turn_do_not_count(solution):
    assert score(solution) == 0


def test_wrong_answer_after_an_answer_in_a_tool_result_is_still_the_answer():
    solution = response(CALL, "<answer>Lake Morban</answer>", "<answer>Oakford</answer>")
    assert final_answer(solution) == "Oakford"
    assert score(solution, truth=["Oakford"]) == 1


def test_any_accepted_answer_counts_and_a_single_text_is_one_answer():
    assert score("<answer>NYC</answer>", truth=["New York", "N.Y.C."]) == 1
    assert compute_score("s", "<answer>New York</answer>", "new york")["score"] == 1
    assert compute_score("s", "<answer>n</answer>", "new york")["score"] == 0


def test_result_tells_wrong_from_missing_answers():
    assert compute_score("s", "<answer>x</answer>", ["y"]) == {"score": 0.0, "acc": 0.0, "answered": 1.0}
    assert compute_score("s", "x", ["x"]) == {"score": 0.0, "acc": 0.0, "answered": 0.0}
    assert compute_score("s", "<answer>x</answer>", ["x"]) == {"score": 1.0, "acc": 1.0, "answered": 1.0}


@pytest.mark.parametrize("truth", ["", [], ["", "the"], "!?"])
def test_ground_truth_without_an_answer_is_an_error(truth):
    with pytest.raises(ValueError, match="ground_truth of a s row .* expected one or more answers"):
        compute_score("s", "<answer></answer>", truth)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Lake Morban!", "lake morban"),
        ("A Tale of an Ant", "tale of ant"),
        ("Straße «Nord»", "strasse nord"),
        ("１２３。", "123"),
        ("the", ""),
    ],
)
def test_normalise(text, expected):
    assert normalise(text) == expected


@pytest.mark.upstream
def test_verl_loads_the_reward_by_path_and_keeps_its_details():
    import numpy as np
    import torch
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.trainer.ppo.reward import get_custom_reward_fn

    from recipes.search_agent import reward

    class Characters:
        def decode(self, ids, skip_special_tokens):
            return "".join(map(chr, ids.tolist()))

    text = response(CALL, "<answer>Oakford</answer>", "<answer>Lake Morban</answer>")
    ids = torch.tensor([[ord(char) for char in text]])
    data = DataProto(
        batch=TensorDict({"responses": ids, "attention_mask": torch.ones_like(ids)}, batch_size=1),
        non_tensor_batch={
            "data_source": np.array(["search_agent"], dtype=object),
            "reward_model": np.array([{"style": "rule", "ground_truth": ["Lake Morban"]}], dtype=object),
            "extra_info": np.array([{"index": 0}], dtype=object),
        },
    )
    option = {"custom_reward_function": {"path": reward.__file__, "name": "compute_score", "reward_kwargs": {}}}
    config = OmegaConf.create({"reward": option})

    async def scored():
        return await NaiveRewardManager(config, Characters(), get_custom_reward_fn(config)).run_single(data)

    assert asyncio.run(scored()) == {
        "reward_score": 1.0,
        "reward_extra_info": {"score": 1.0, "acc": 1.0, "answered": 1.0},
    }
