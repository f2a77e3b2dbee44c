import dataclasses

import pytest
import yaml

from verl_war.core.config import WarConfig, parse_war_config
from verl_war.core.config_parsing import ROOT_KEY


def test_missing_settings_are_the_defaults():
    assert parse_war_config(None) == parse_war_config({}) == WarConfig()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"sed": 1}, [f"unknown key {ROOT_KEY}.sed (did you mean 'seed'", "allowed keys: speculation"]),
        ({"speculation": {"on": True}}, [f"unknown key {ROOT_KEY}.speculation.on; allowed keys: mode"]),
        (
            {"speculation": {"max_draft_tokens": 65}},
            ["speculation.max_draft_tokens=65", "between 1 and 64"],
        ),
        ({"speculation": {"max_draft_tokens": 1.5}}, [f"{ROOT_KEY}.speculation.max_draft_tokens=1.5", "expected int"]),
        ({"speculation": {"mode": "on"}}, [f"{ROOT_KEY}.speculation.mode='on'", "auto, always, off"]),
        ({"speculation": {"dwell_s": -1}}, [f"{ROOT_KEY}.speculation.dwell_s=-1", "between 0.0 and 86400.0"]),
        ({"speculation": {"dwell_s": float("nan")}}, [f"{ROOT_KEY}.speculation.dwell_s=nan", "between 0.0"]),
        ({"speculation": {"share_peers": -1}}, [f"{ROOT_KEY}.speculation.share_peers=-1", "between 0"]),
        (
            {"speculation": {"history": {"size": 1}}},
            ["speculation.history.size; allowed keys: max_bytes"],
        ),
        ({"speculation": {"history": {"sources": "own"}}}, ["history.sources='own' is str", "a list of names"]),
        ({"speculation": {"history": {"sources": ["mine"]}}}, ["unknown name 'mine'", "siblings"]),
        ({"speculation": {"history_on_damage": "cry"}}, ["history_on_damage='cry'", "error, discard"]),
        ({"speculation": True}, [f"{ROOT_KEY}.speculation=True", "bool", "mapping"]),
        ({"scheduling": {"enabled": "yes"}}, [f"{ROOT_KEY}.scheduling.enabled='yes'", "str", "expected bool"]),
        ({"scheduling": {"enabled": None}}, [f"{ROOT_KEY}.scheduling.enabled=None", "expected bool"]),
        ({"block_size_tokens": True}, [f"{ROOT_KEY}.block_size_tokens=True", "bool", "expected int"]),
        ({"block_size_tokens": 0}, [f"{ROOT_KEY}.block_size_tokens=0", "between 1 and 4096"]),
        ({"block_size_tokens": 6.5}, [f"{ROOT_KEY}.block_size_tokens=6.5", "float", "expected int"]),
        ({"metrics_timeout_s": -1}, [f"{ROOT_KEY}.metrics_timeout_s=-1", "over 0"]),
        ({"metrics_timeout_s": float("nan")}, [f"{ROOT_KEY}.metrics_timeout_s=nan", "over 0"]),
        ({"seed": "42"}, [f"{ROOT_KEY}.seed='42'", "expected int or null"]),
        ({"admission": {"admit_fraction": 0}}, [f"{ROOT_KEY}.admission.admit_fraction=0.0", "between"]),
        ({"admission": {"admit_fraction": 1.2}}, ["admit_fraction=1.2", "pause_fraction=1.0", "at most the same"]),
        ({"admission": {"max_hold_s": float("nan")}}, [f"{ROOT_KEY}.admission.max_hold_s=nan", "between"]),
        ({"admission": {"trajectory_ttl_s": 0}}, [f"{ROOT_KEY}.admission.trajectory_ttl_s=0.0", "between"]),
        ({"scheduling": {"move_min_turns": -1}}, [f"{ROOT_KEY}.scheduling.move_min_turns=-1", "between"]),
        ({"failures": {"retries": -1}}, [f"{ROOT_KEY}.failures.retries=-1", "between 0 and 100"]),
        ({"failures": {"turn_deadline_s": 0}}, [f"{ROOT_KEY}.failures.turn_deadline_s=0.0", "between"]),
        ({"failures": {"replica_hang_s": float("nan")}}, [f"{ROOT_KEY}.failures.replica_hang_s=nan", "between"]),
        ({"journal_path": 3}, [f"{ROOT_KEY}.journal_path=3", "expected str or null"]),
        ({"profile_path": 3}, [f"{ROOT_KEY}.profile_path=3", "expected str or null"]),
        ([1], [f"{ROOT_KEY}=[1]", "list", "mapping"]),
    ],
)
def test_mistakes_name_key_value_and_what_is_allowed(raw, words):
    with pytest.raises(ValueError) as error:
        parse_war_config(raw)
    for word in words:
        assert word in str(error.value)


def test_speculation_takes_limits_and_history():
    raw = {"enabled": True, "mode": False, "max_draft_tokens": 8, "history": {"sources": ["own"], "max_bytes": 1 << 21}}
    speculation = parse_war_config({"speculation": raw}).speculation
    assert speculation.enabled and speculation.mode == "off", "YAML 1.1 reads a bare off as False"
    assert speculation.max_draft_tokens == 8 and speculation.history.sources == ("own",)


def test_scheduling_and_admission_can_be_switched_on_alone():
    config = parse_war_config({"scheduling": {"enabled": True}, "admission": {"max_hold_s": 60}})
    assert config.scheduling.enabled and not config.admission.enabled and config.admission.max_hold_s == 60.0


def test_integers_are_taken_where_seconds_are_expected():
    assert parse_war_config({"metrics_timeout_s": 5, "seed": 7}) == WarConfig(metrics_timeout_s=5.0, seed=7)


def test_shipped_yaml_states_the_defaults_and_switches_everything_on():
    from importlib.resources import files

    shipped = yaml.safe_load((files("verl_war") / "config" / "rollout" / "war.yaml").read_text())
    war = parse_war_config(shipped["custom"]["war"])
    assert war.speculation.enabled
    controls = {name: getattr(war, name) for name in ("speculation", "scheduling", "admission")}
    assert all(control.enabled for control in controls.values())
    off = {name: dataclasses.replace(control, enabled=False) for name, control in controls.items()}
    assert dataclasses.replace(war, **off) == WarConfig()
    assert set(shipped["custom"]["war"]["speculation"]) == {f.name for f in dataclasses.fields(war.speculation)}
    assert set(shipped["custom"]["war"]) == {"speculation", "scheduling", "admission", "regime", "guard", "failures",
                                             "block_size_tokens", "metrics_timeout_s", "seed", "profile_path",
                                             "journal_path"}  # fmt: skip
