"""The tool that makes the demo's policy: the player that is imitated, and that a seed gives one policy."""

import importlib.util
from itertools import pairwise

import numpy as np
import pytest

from deltawire import digest
from deltawire_demo.policy import Policy
from deltawire_demo.shape import Shape
from deltawire_demo.tokens import answer_of, guess_of
from deltawire_demo.wordle.game import feedback
from support import ROOT

SMALL = Shape(hidden=32, num_heads=2, head_dim=16, inner=48)


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("pretrain_demo", ROOT / "tools" / "pretrain_demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def guesses_of(targets):
    return [guess_of(targets[start : start + 5]) for start in range(0, len(targets), 10)]


def test_the_player_uses_all_clues(tool, monkeypatch):
    monkeypatch.setattr(tool, "REPEATS", 0.0)
    monkeypatch.setattr(tool, "TYPOS", 0.0)
    rng = np.random.default_rng(0)
    for _ in range(30):
        tokens, targets = tool.imitated_game(rng, 6)
        guesses = guesses_of(targets)
        for later in range(1, len(guesses)):
            for number, guess in enumerate(guesses[:later]):
                answer = tokens[6 + 10 * number : 11 + 10 * number]
                assert answer_of(guess, feedback(guesses[later], guess)) == answer


def test_the_player_repeats_and_mistypes(tool):
    rng = np.random.default_rng(0)
    games = [guesses_of(tool.imitated_game(rng, 6)[1]) for _ in range(300)]
    pairs = [pair for game in games for pair in pairwise(game)]
    assert 0.45 < sum(first == second for first, second in pairs) / len(pairs) < 0.6
    typos = sum(game[0] not in tool.NUMBERS for game in games) / len(games)
    assert 0.12 < typos < 0.28
    tokens, targets = tool.imitated_batch(rng, 7, 3)
    letters = targets >= 0
    assert (tokens[:, 1:][letters[:, :-1]] == targets[:, :-1][letters[:, :-1]]).all()


def test_a_seed_gives_one_policy(tool, monkeypatch):
    monkeypatch.setattr(tool, "STAGES", ((1.0, 2, 4),))
    found = []
    for seed in (0, 0, 1):
        policy = Policy(SMALL)
        tool.pretrain(policy, 3, seed)
        found.append(digest(policy.state_dict()))
    assert found[0] == found[1] != found[2]
