"""The demo: policy and sampler, the trainer's sums, a replica's endpoint, and whole runs as users start them."""

import json
import os
import re
import signal
import time
import tomllib
from importlib.metadata import packages_distributions
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deltawire import Publisher, digest
from deltawire.cli.demo import NEEDED, options_of
from deltawire.engines.agent import Agent
from deltawire.engines.torch import TorchEngine
from deltawire.errors import CorruptObject, EngineUnavailable
from deltawire_demo import rollout
from deltawire_demo.checkpoint import Progress, load_progress, save_progress
from deltawire_demo.games import Episode, boards
from deltawire_demo.policy import Policy, Sampler, load, save
from deltawire_demo.replica import Completions, Wanted, application
from deltawire_demo.shape import START, Shape
from deltawire_demo.story import Story
from deltawire_demo.summary import summary_text
from deltawire_demo.tokens import BEGIN, NO_WORD, NUM_TOKENS, answer_of, guess_of, letters_of
from deltawire_demo.trainer import Settings, Trainer, advantages_of, batch_of, log_probs_of, returns_of
from deltawire_demo.view import screen_text, step_text
from deltawire_demo.wordle.game import Game, view
from deltawire_demo.wordle.words import WORDS
from support import ROOT
from support.demo_run import events, processes, started, step_of
from support.servers import WEED
from support.waiting import PATIENCE, eventually

SMALL = Shape(hidden=32, num_heads=2, head_dim=16, inner=48)


def fresh_policy(shape, seed=0):
    policy, generator = Policy(shape), torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    return policy


def small_policy(seed=0):
    return fresh_policy(SMALL, seed)


def played(policy, secrets, seed=0, temperature=1.0):
    """Games without any process between."""
    sampler, generator = Sampler(policy), torch.Generator().manual_seed(seed)
    games, episodes = [Game(secret) for secret in secrets], [Episode(secret) for secret in secrets]
    while numbers := [number for number, game in enumerate(games) if not game.done]:
        written = sampler.sample([episodes[number].tokens for number in numbers], 5, temperature, generator)
        for number, letters, log_probs in zip(numbers, *written, strict=True):
            games[number].play(guess_of(letters))
            episodes[number].add(letters, log_probs, 0, view(games[number]))
    return episodes


def game_of(secret, *guesses):
    game, episode = Game(WORDS.index(secret)), Episode(WORDS.index(secret))
    for guess in guesses:
        game.play(guess)
        episode.add(letters_of(guess), [-1.0] * 5, 0, view(game))
    return episode


def mixed_group(policy):
    """Good and bad games of one secret, as if the policy had made these guesses."""
    group = [game_of("crane", *guesses) for guesses in (["crane"], ["cream", "crane"], ["night"] * 6, ["qqqqq"] * 6)]
    for episode in group:
        batch = batch_of([(episode, torch.zeros(len(episode.log_probs)))])
        episode.log_probs = log_probs_of(policy, batch).tolist()
    return group


def test_tokens():
    assert NUM_TOKENS == 106
    assert letters_of("crane") == [2, 17, 0, 13, 4]
    assert guess_of([2, 17, 0, 13, 4]) == "crane"
    assert answer_of("cream", "GGYY-") == [26 + 3 * 2 + 2, 26 + 3 * 17 + 2, 26 + 3 * 4 + 1, 26 + 1, 26 + 3 * 12]
    assert answer_of("qqqqq", "XXXXX") == [NO_WORD] * 5
    every = {
        token for letter in "abcdefghijklmnopqrstuvwxyz" for colour in "-YG" for token in answer_of(letter, colour)
    }
    assert every == set(range(26, NO_WORD))


def test_logits_are_those_of_transformers():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    policy = fresh_policy(Shape(), 1)
    assert sum(parameter.numel() for parameter in policy.parameters()) == 1_366_400
    reference = Qwen3ForCausalLM(Qwen3Config(**policy.shape.config())).eval()
    reference.load_state_dict(policy.state_dict(), strict=True)
    tokens = torch.randint(0, NUM_TOKENS, (3, 61), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(policy(tokens), reference(tokens).logits, atol=2e-5)


def test_the_sampler_and_the_trainer_agree():
    policy = small_policy()
    with torch.no_grad():  # larger, so that letters differ in probability
        policy.lm_head.weight.mul_(20)
    episodes = played(policy, range(40))
    batch = batch_of([(episode, torch.zeros(len(episode.log_probs))) for episode in episodes])
    with torch.no_grad():
        found = log_probs_of(policy, batch)
    assert batch.written.tolist() == [
        letter for episode in episodes for guess in episode.seen.guesses for letter in letters_of(guess)
    ]
    assert torch.allclose(found, batch.log_probs, atol=1e-4)
    assert found.std() > 0.1


def test_what_the_sampler_remembers_changes_nothing():
    policy = small_policy()
    remembering, fresh = Sampler(policy), Sampler(policy, num_remembered=0)
    prompts = [[BEGIN]] * 6
    for turn in range(3):
        first, second = (
            each.sample(prompts, 5, 1.0, torch.Generator().manual_seed(turn)) for each in (remembering, fresh)
        )
        assert first[0] == second[0]
        assert np.allclose(first[1], second[1], atol=1e-5)
        prompts = [[*prompt, *letters, *[NO_WORD] * 5] for prompt, letters in zip(prompts, first[0], strict=True)][1:]


def test_what_a_letter_led_to():
    episode = game_of("crane", "cream", "qqqqq", "crane")
    won = 1.0 + 0.3 + 0.5
    invalid = -0.1 + 0.5 * won
    expected = [
        [0.3 + 0.5 * invalid, 0.2 + 0.5 * invalid, 0.1 + 0.5 * invalid, 0.05 + 0.5 * invalid, 0.5 * invalid],
        [invalid] * 5,
        [won, won - 0.1, won - 0.2, won - 0.3, won - 0.4],
    ]
    assert torch.allclose(returns_of(episode, 0.5), torch.tensor(expected))


def test_advantages_are_within_the_group_and_the_turn():
    group = [game_of("crane", "crane"), game_of("crane", "cream", "crane"), game_of("crane", "night", "crane")]
    first, second, third = advantages_of(group, 0.5)
    assert [len(each) for each in (first, second, third)] == [5, 10, 10]
    assert abs(first[0] + second[0] + third[0]) < 1e-5
    assert first[0] > second[0] > third[0]
    assert second[5:].tolist() == [0] * 5, "in the second turn both did the same"


def test_a_step_makes_better_games_likelier():
    policy = small_policy()
    trainer = Trainer(policy, Settings(lr=1e-3, head_lr=1e-3, norm_lr=1e-3, warmup_steps=1))
    group = mixed_group(policy)
    batch = batch_of(list(zip(group, advantages_of(group, 0.5), strict=True)))
    before = (log_probs_of(policy, batch) * batch.advantages).mean()
    told = trainer.step(1, [group])
    assert told["clipped"] == 0
    assert (log_probs_of(policy, batch) * batch.advantages).mean() > before


def test_a_checkpoint_is_where_it_was(tmp_path):
    first, group = Trainer(small_policy(), Settings()), mixed_group(small_policy())
    start = digest(first.policy.state_dict())
    first.step(1, [group])
    assert digest(first.policy.state_dict()) != start
    save_progress(tmp_path / "c", first.policy, first.optimizer, Progress(step=1))
    second = Trainer(small_policy(seed=5), Settings())
    assert load_progress(tmp_path / "c", second.policy, second.optimizer).step == 1
    for trainer in (first, second):
        trainer.step(2, [group])
    assert digest(first.policy.state_dict()) == digest(second.policy.state_dict())
    (tmp_path / "c").write_bytes(b"other")
    with pytest.raises(CorruptObject, match="--folder"):
        load_progress(tmp_path / "c", second.policy, second.optimizer)


def test_a_policy_is_in_its_file(tmp_path):
    policy = small_policy()
    save(policy, tmp_path / "policy")
    found = load(tmp_path / "policy", SMALL)
    assert digest(found.state_dict()) == digest(policy.bfloat16().float().state_dict())
    (tmp_path / "other").write_bytes(b"other")
    with pytest.raises(CorruptObject, match="install deltawire again"):
        load(tmp_path / "other", SMALL)


def test_the_shipped_policy_has_habits_that_a_lower_temperature_makes_worse():
    assert START.stat().st_size < 3_000_000
    policy = load(START)
    repeated = {}
    for temperature in (1.0, 0.4):
        games = [episode.seen.guesses for episode in played(policy, range(0, 200, 8), temperature=temperature)]
        pairs = [first == second for guesses in games for first, second in pairwise(guesses)]
        repeated[temperature] = sum(pairs) / len(pairs)
    assert 0.35 < repeated[1.0] < 0.65
    assert repeated[0.4] > 0.8


def test_boards_are_of_every_tenth_word():
    episodes = [game_of("about", "about"), game_of("above", "above"), game_of("angle", "table", "angle")]
    assert boards(episodes) == [
        {"word": "about", "won": True, "guesses": ["about"], "feedbacks": ["GGGGG"]},
        {"word": "angle", "won": True, "guesses": ["table", "angle"], "feedbacks": ["-Y-GG", "GGGGG"]},
    ]


def required(extra):
    """The packages of an extra, with those of the extras that it names."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in map(Requirement, extras[extra]):
        yield canonicalize_name(requirement.name)
        for inner in requirement.extras:
            yield from required(inner)


def test_the_extra_has_all_that_the_demo_needs():
    found, distributions = set(required("demo")), packages_distributions()
    assert not [name for name in NEEDED if found.isdisjoint(map(canonicalize_name, distributions[name]))]


@pytest.mark.parametrize(
    ("given", "planned"),
    [
        ({}, (20, 40)), ({"num_steps": 60}, (10, 20)), ({"kill_replica_at": 0}, (0, 40)),
        ({"late_join_at": 5}, (20, 5)),
        ({"engine": "vllm"}, (0, 0)), ({"engine": "vllm", "kill_replica_at": 2}, (2, 0)),
    ],
)  # fmt: skip
def test_what_is_planned(tmp_path, given, planned):
    unset = {"folder": tmp_path, "kill_replica_at": None, "late_join_at": None}
    options = options_of("wordle", False, unset | given)
    assert (options.kill_replica_at, options.late_join_at) == planned


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ([], "object"), ({}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "at least one token"),
        ({"prompt": [[106]]}, "from 0 to 105"), ({"prompt": [[True]]}, "from 0 to 105"),
        ({"prompt": ["crane"]}, "token"),
        ({"prompt": [[1]], "max_tokens": 0}, "max_tokens"), ({"prompt": [[1] * 57], "max_tokens": 5}, "at most 61"),
        ({"prompt": [[1]], "temperature": -1}, "temperature"), ({"prompt": [[1]], "seed": -1}, "seed"),
        ({"prompt": [[1]] * 1025}, "1024"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused(body, reason):
    with pytest.raises(ValueError, match=reason):
        Wanted.parse(body)


def test_a_replica_tells_the_version_of_what_it_sampled():
    from starlette.testclient import TestClient

    trained, served = small_policy(), Policy(SMALL).bfloat16().requires_grad_(False)
    engine = TorchEngine(served, threads=1)
    request = {"prompt": [[BEGIN], [BEGIN, *[NO_WORD] * 10], [BEGIN]], "max_tokens": 5, "seed": 7}
    with pytest.raises(EngineUnavailable, match="no weights"):
        Completions(engine, served).complete(Wanted.parse(request))
    with (
        Publisher("memory:demo-replica", trained) as publisher,
        Agent(engine, "memory:demo-replica", name="one") as agent,
        TestClient(application(agent, engine, served)) as client,
    ):
        answers = []
        for version in range(2):
            publisher.publish().wait()
            agent.replica.pull()
            answer = client.post("/v1/completions", json=request).json()
            answers.append([choice["token_ids"] for choice in answer["choices"]])
            assert answer["weight_version"] == version
            narrow = {name: value.detach().bfloat16() for name, value in trained.named_parameters()}
            expected = Policy(SMALL)
            expected.load_state_dict({name: value.float() for name, value in narrow.items()})
            alone = Sampler(expected).sample([[BEGIN], [BEGIN]], 5, 1.0, torch.Generator().manual_seed(7))
            assert [answers[-1][0], answers[-1][2]] == alone[0]
            assert [answer["choices"][i]["logprobs"]["token_logprobs"] for i in (0, 2)] == alone[1]
            assert client.get("/digest").json() == {"version": version, "digest": str(digest(narrow))}
            with torch.no_grad():
                trained.lm_head.weight.mul_(-30)
        assert answers[0] != answers[1]
        assert client.get("/health").status_code == 200
        refused = client.post("/v1/completions", content=b"{")
        assert (refused.status_code, "error" in refused.json()) == (400, True)


class SlowPlayer:
    """Takes a fifth of the patience that there is."""

    def __init__(self, url):
        self.url = url

    def version(self):
        return 7

    def play(self, tasks, *, temperature, seed):
        time.sleep(0.2)
        return [SimpleNamespace(versions=[7]) for _ in tasks]

    def close(self):
        pass


def test_slow_replicas_are_waited_for_as_long_as_they_get_on(monkeypatch):
    monkeypatch.setattr(rollout, "PATIENCE_SECONDS", 1.0)
    told = {"num_tasks": 4, "on_fault": lambda *_: None}
    rollouts = rollout.Rollouts(SlowPlayer, ["x"], group_size=1, groups_per_batch=1, num_ahead=4, seed=0, **told)
    rollouts.start()
    assert len(list(rollouts.take(8, lambda: False))) == 8
    rollouts.stop()
    found = rollout.episodes_at(SlowPlayer, ["x"], 7, temperature=1.0, rounds=4, progress=lambda _: None, **told)
    assert len(found) == 16
    with pytest.raises(EngineUnavailable, match="within 1 s"):
        rollout.episodes_at(SlowPlayer, ["x"], 8, temperature=1.0, rounds=2, progress=lambda _: None, **told)


def test_a_story_is_read_again(tmp_path):
    story = Story(tmp_path / "events", 10)
    for step in range(1, 4):
        story.add({"event": "step", "step": step, "reward": step / 10})
        story.add({"event": "published", "version": step, "bytes": 10, "full_bytes": 100})
    again = Story(tmp_path / "events", 10)
    again.read()
    assert (again.step, again.version, again.rewards()) == (3, 3, [0.1, 0.2, 0.3])
    again.add({"event": "resumed", "step": 2})
    assert again.step == 2
    assert again.moving_reward() == pytest.approx(0.15)


def pull(replica, version, anchor=False):
    return {"event": "pull", "replica": replica, "version": version, "pause_seconds": 0.0015, "bytes": 50_000,
            "anchor": anchor}  # fmt: skip


def test_a_replica_that_was_killed_is_back_when_it_has_an_anchor(tmp_path):
    story = Story(tmp_path / "events", 10)
    story.add({"event": "step", "step": 4, "reward": 0.1})
    told = {"event": "disturbance", "what": "killed", "part": "replica-0", "replica": "replica-0", "step": 4}
    story.add(told)
    story.add(pull("replica-0", 4))
    story.add(pull("replica-1", 5, anchor=True))
    assert "seconds" not in story.disturbances[0], "an event from before the kill, or of another replica"
    story.add({"event": "step", "step": 9, "reward": 0.1})
    story.add(pull("replica-0", 9, anchor=True))
    (back,) = story.disturbances
    assert (back["version"], back["steps"]) == (9, 5)
    story.add({**told, "part": "vllm-0"})
    story.add(pull("replica-0", 10))
    assert story.disturbances[1]["version"] == 10, "the agent was not killed, and needs no anchor"


def told_story(folder):
    """A story with everything that a summary shows."""
    story = Story(folder / "events", 10, phase="training", dashboard="http://127.0.0.1:15000/")
    story.add({"event": "published", "version": 0, "bytes": 2_740_000, "full_bytes": 2_732_800, "density": 1.0})
    for step in range(1, 31):
        story.add({"event": "step", "step": step, "reward": step / 10, "wins": 0.25, "games": 64, "seconds": 0.5,
                   "staleness": 1.5, "max_staleness": 2, "dropped": 0})  # fmt: skip
        story.add({"event": "published", "version": step, "bytes": 50_000, "full_bytes": 2_732_800, "density": 0.05,
                   "changed": 68_320, "diff_seconds": 0.005})  # fmt: skip
    story.add({"event": "disturbance", "what": "killed", "part": "replica-0", "replica": "replica-0", "step": 20})
    story.add(pull("replica-0", 28, anchor=True))
    story.add(pull("replica-0", 29))
    story.add({"event": "fault", "part": "http://127.0.0.1:1", "reason": "ReadError"})
    return story


def finish(story):
    story.add({"event": "done", "version": 30, "digest": "d" * 32})
    kinds = ("deltas", "skip deltas", "anchors", "documents")
    story.add({"event": "uploaded", "kinds": {kind: {"num_objects": 5, "num_bytes": 250_000} for kind in kinds}})
    lost = {"word": "crane", "won": False, "guesses": ["night"] * 6, "feedbacks": ["Y----"] * 6}
    won = {"word": "crane", "won": True, "guesses": ["cream", "crane"], "feedbacks": ["GGYY-", "GGGGG"]}
    for which, rewards, game in (("start", (0.4, 1.0), lost), ("final", (1.1, 1.2), won)):
        for temperature, reward in zip((1.0, 0.4), rewards, strict=True):
            story.add({"event": "evaluation", "which": which, "temperature": temperature, "num_games": 600,
                       "reward": reward, "wins": reward / 2, "valid": 0.9, "samples": [game]})  # fmt: skip
    story.replicas["replica-0"].version, story.replicas["replica-0"].digest = 30, "d" * 32
    return {**story.summary(), "publishes": True, "verified": True, "store": "s", "folder": "f", "keeps_store": True}


def test_what_is_shown(tmp_path):
    text = screen_text(story := told_story(tmp_path))
    for shown_part in ("30 of 10", "2.050", "50.00 kB, 1/55 of all", "5.00 % of the weights", "1.50 versions",
                       "replica-0       29    1        2", "1.5 ms", "ReadError", "http://127.0.0.1:15000/",
                       "replica-0 killed at step 20",
                       "replica-0 at version 28 after 0.0 s, 10 steps later"):  # fmt: skip
        assert shown_part in text, text
    assert max(map(len, text.splitlines())) < 80
    assert "replicas at 29" in step_text(story)
    story.add({"event": "phase", "name": "playing after training"})
    story.add({"event": "played", "num_done": 400, "total": 1200})
    assert "playing after training: 400 of 1,200 games" in screen_text(story)


def test_the_summary_in_the_end(tmp_path):
    story = told_story(tmp_path)
    text = summary_text(summary := finish(story))
    for shown_part in ("0.800 in the first 15 steps, 2.300 in the last 15", "50.00 kB, 1/55 of all weights, 0.73 bytes",
                       "the same bits", "deltawire verify s", "deltawire ls s",
                       "killed     replica-0 at step 20: at version 28",
                       "Sent 1.00 MB instead of 84.72 MB, 1/85.",
                       "Per version: 32.26 kB in total, 50.00 kB as a delta.", "reward +0.200, wins +10.0 points.",
                       "The word is crane."):  # fmt: skip
        assert shown_part in text, text
    assert re.search(r"before  \(best\) +0.4 +600 +1.000", text)
    lost, won = "\U0001f7e8" + "\u2b1b" * 4, "\U0001f7e9" * 2 + "\U0001f7e8" * 2 + "\u2b1b"
    assert re.search(f"{lost}  night +{won}  cream", text)
    assert max(map(len, text.splitlines())) <= 80
    story.replicas["replica-0"].digest = "e" * 32
    assert "WRONG" in summary_text({**summary, **story.summary()})


# From here on: the command, with all its processes.


@pytest.mark.process
def test_a_run_with_kills_and_a_late_replica(tmp_path):
    pytest.importorskip("openenv")
    folder = tmp_path / "run"
    store = ["--s3"] if WEED.exists() else []
    with started(
        folder, "--steps", "8", "--kill-replica-at", "2", "--late-join-at", "3", "--format", "json", *store
    ) as demo:
        eventually(lambda: step_of(folder) >= 6, "step 6")
        for pid, words in processes(folder).items():
            if {"deltawire_demo.trainer", "deltawire_demo.wordle"} & set(words):
                os.kill(pid, signal.SIGKILL)
        out, err = demo.communicate(timeout=PATIENCE)
        assert demo.returncode == 0, out + err
        assert processes(folder) == {}
    summary = json.loads(out)
    assert (summary["ok"], summary["exact"], summary["verified"], summary["steps"]) == (True, True, True, 8)
    assert [each["name"] for each in summary["replicas"]] == ["replica-0", "replica-1", "replica-2"]
    assert {each["digest"] for each in summary["replicas"]} == {summary["digest"]}
    assert {each["version"] for each in summary["replicas"]} == {summary["version"]}
    told = events(folder)
    ended = [(event["part"], event["status"]) for event in told if event["event"] == "ended"]
    assert sorted(ended) == [("environment", -9), ("replica-0", -9), ("trainer", -9)]
    (resumed,) = [event for event in told if event["event"] == "resumed"]
    assert resumed["step"] == 5, "the last checkpoint"
    versions = [event["version"] for event in told if event["event"] == "published"]
    # One that was committed when the trainer was killed may never have been reported.
    assert versions == sorted(set(versions)), "one chain, with nothing twice"
    assert summary["version"] == versions[-1]
    assert summary["verify"]["report"]["ok"]
    assert 0 < summary["density"] < 0.5
    games = [(which, each["temperature"], each["num_games"]) for which, found in summary["evaluations"].items()
             for each in found]  # fmt: skip
    assert games == [(which, temperature, 200) for which in ("start", "final") for temperature in (1.0, 0.7, 0.4)]
    assert [(each["what"], each["part"]) for each in summary["disturbances"]] == [
        ("killed", "replica-0"), ("started", "replica-2"),
    ]  # fmt: skip
    assert all(each["seconds"] > 0 for each in summary["disturbances"])
    assert summary["uploads"]["deltas"]["num_objects"] >= 8


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_leaves_nothing_and_the_run_goes_on_later(tmp_path):
    folder = tmp_path / "run"
    with started(folder, "--steps", "1000", "--evaluate", "0") as demo:
        eventually(lambda: step_of(folder) >= 2, "step 2")
        assert len(processes(folder)) == 4
        demo.send_signal(signal.SIGINT)
        out, err = demo.communicate(timeout=PATIENCE)
        assert demo.returncode == 130, out + err
        assert f"--folder {folder}" in err
        assert "stopping; press Ctrl-C again" in out
        assert processes(folder) == {}
    done = step_of(folder)
    with started(folder, "--steps", str(done + 1), "--evaluate", "0", "--format", "json") as demo:
        out, err = demo.communicate(timeout=PATIENCE)
        assert demo.returncode == 0, out + err
    summary = json.loads(out)
    assert (summary["ok"], summary["steps"], summary["version"]) == (True, done + 1, done + 1)
    densities = [event["density"] for event in events(folder) if event["event"] == "published"]
    assert densities[0] == 1
    assert all(0 < each < 0.5 for each in densities[1:]), "nothing was sent as a whole again"


@pytest.mark.slow
@pytest.mark.process
def test_parts_end_when_the_demo_is_killed(tmp_path):
    folder = tmp_path / "run"
    with started(folder, "--steps", "1000", "--evaluate", "0") as demo:
        eventually(lambda: len(processes(folder)) == 4 and step_of(folder), "a step")
        demo.kill()
        eventually(lambda: not processes(folder), "all parts to end")
