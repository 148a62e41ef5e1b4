"""Wordle: the rules against a second implementation, rewards by hand, sessions, and the server over real sockets."""

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire_demo.wordle.client import WordleGames
from deltawire_demo.wordle.game import Game, choose, feedback, view
from deltawire_demo.wordle.sessions import Move, SessionError, Sessions, Start
from deltawire_demo.wordle.words import WORDS
from support import ROOT

WORD = st.text("abcde", min_size=5, max_size=5)
SECRETS_OF_SEEDS = [164, 110, 35, 126, 97, 67]


def index(word):
    return WORDS.index(word)


def play(secret, *guesses):
    game = Game(index(secret))
    for guess in guesses:
        game.play(guess)
    return game


def naive_feedback(secret, guess):
    """Cross letters out on two sheets of paper: first those in place, then the first one that is left elsewhere."""
    wanted, given, colours = list(secret), list(guess), ["-"] * 5
    for at in range(5):
        if given[at] == wanted[at]:
            colours[at], wanted[at], given[at] = "G", None, None
    for at in range(5):
        if given[at] is not None and given[at] in wanted:
            wanted[wanted.index(given[at])] = None
            colours[at] = "Y"
    return "".join(colours)


def test_the_words():
    assert len(WORDS) == len(set(WORDS)) == 200
    assert all(len(word) == 5 and word.isascii() and word.islower() and word.isalpha() for word in WORDS)
    assert list(WORDS) == sorted(WORDS)


@pytest.mark.parametrize(
    ("secret", "guess", "colours"),
    [
        ("crane", "crane", "GGGGG"),
        ("crane", "night", "Y----"),
        ("crane", "cream", "GGYY-"),
        ("apple", "paper", "YYGY-"),
        ("sheet", "eagle", "Y---Y"),  # two in the secret: both are yellow
        ("green", "eagle", "Y-Y-Y"),
        ("plane", "apple", "YY-YG"),  # one p in the secret: the first is yellow, the second gray
        ("water", "sweet", "-Y-GY"),  # one e, in place later in the guess: the first is gray
        ("sweet", "eagle", "Y---Y"),
        ("clear", "apple", "Y--YY"),
        ("alone", "allow", "GG-Y-"),  # one l, in place: the other is gray
        ("level", "wheel", "--YGG"),
        ("wheel", "level", "-Y-GG"),
    ],
)
def test_colours_by_hand(secret, guess, colours):
    assert feedback(secret, guess) == colours


@given(secret=WORD, guess=WORD)
def test_colours_as_a_second_implementation_finds_them(secret, guess):
    assert feedback(secret, guess) == naive_feedback(secret, guess)


@given(secret=WORD, guess=WORD)
def test_no_letter_is_coloured_more_often_than_the_secret_has_it(secret, guess):
    colours = feedback(secret, guess)
    for letter in set(guess):
        coloured = sum(given == letter and colour != "-" for given, colour in zip(guess, colours, strict=True))
        assert coloured == min(secret.count(letter), guess.count(letter))


@pytest.mark.parametrize(
    ("guesses", "rewards", "score"),
    [
        (["crane"], [2.0], 2.0),
        (["zzzzz", "crane"], [-0.1, 1.9], 1.8),
        (["cream", "crane"], [0.3, 1.6], 1.9),
        (["night", "cream", "cream", "crane"], [0.05, 0.25, 0.0, 1.4], 1.7),
        (["cream", "night", "apple"], [0.3, 0.0, 0.0], 0.3),  # a worse guess takes nothing away
        (["xxxxx"] * 6, [-0.1] * 6, -0.6),
        (["night"] * 5 + ["crane"], [0.05, 0, 0, 0, 0, 1.45], 1.5),
        (["", "cran", "cranes", "CRANE"], [-0.1, -0.1, -0.1, 1.7], 1.4),
    ],
)
def test_rewards_by_hand(guesses, rewards, score):
    game = play("crane", *guesses)
    assert [turn.reward for turn in game.turns] == rewards
    assert game.score == score


@given(secret=st.integers(0, 199), guesses=st.lists(st.sampled_from([*WORDS, "qqqqq", ""]), max_size=6))
def test_the_score_is_best_and_win_less_invalid(secret, guesses):
    game = Game(secret)
    for guess in guesses:
        if not game.done:
            game.play(guess)
    valid = [turn for turn in game.turns if turn.feedback != "XXXXX"]
    best = max((10 * turn.feedback.count("G") + 5 * turn.feedback.count("Y") for turn in valid), default=0)
    win = 100 + 10 * (6 - len(game.turns)) if WORDS[secret] in [turn.guess for turn in game.turns] else 0
    assert game.score == (best + win - 10 * (len(game.turns) - len(valid))) / 100
    assert game.score == pytest.approx(sum(turn.reward for turn in game.turns))
    assert -0.6 <= game.score <= 2.0
    assert max((turn.credit for turn in valid), default=0) == best / 100


def test_a_game_ends_and_then_tells_its_secret():
    game = play("crane", *["night"] * 5)
    assert (game.done, view(game).secret, view(game).guesses_left) == (False, None, 1)
    game.play("apple")
    assert (game.done, game.won, view(game).secret) == (True, False, "crane")
    with pytest.raises(ValueError, match="over"):
        game.play("crane")
    with pytest.raises(ValueError, match="over"):
        play("crane", "crane", "crane")


def test_an_invalid_guess_costs_its_turn():
    seen = view(play("crane", "qqqqq"))
    assert (seen.feedback, seen.valid, seen.guesses_left, seen.credit) == ("XXXXX", False, 5, 0)


def test_seeds_choose_the_same_secrets_for_ever():
    assert [choose(seed) for seed in range(6)] == SECRETS_OF_SEEDS
    assert len({choose(seed) for seed in range(2000)}) == 200
    assert len({choose() for _ in range(200)}) > 50


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def sessions(max_sessions=4, clock=None):
    return Sessions(max_sessions=max_sessions, expire_seconds=60, clock=clock or Clock())


def refused(call, code):
    with pytest.raises(SessionError) as caught:
        call()
    assert caught.value.code == code
    return caught.value


def test_capacity_and_expiry():
    clock = Clock()
    table = sessions(clock=clock)
    names = [name for name, _ in table.reset([Start(secret=0)] * 3)]
    error = refused(lambda: table.reset([Start()] * 2), "CAPACITY_REACHED")
    assert "3 of 4" in str(error)
    assert len(table) == 3
    clock.now = 50
    table.step([Move(names[1], "crane")])
    clock.now = 60
    assert len(table) == 1
    refused(lambda: table.step([Move(names[0], "crane")]), "UNKNOWN_SESSION")
    table.reset([Start()] * 3)
    assert len(table) == 4
    assert table.close([*names, "never"]) == 1
    assert len(table) == 3


def test_a_session_is_used_again_when_all_are_taken():
    table = sessions(max_sessions=1)
    ((name, _),) = table.reset([Start(secret=0)])
    ((again, game),) = table.reset([Start(name, secret=1)])
    assert (again, game.secret, len(table)) == (name, 1, 1)


def test_a_bad_move_changes_nothing():
    table = sessions()
    (one, game), (two, other) = table.reset([Start(secret=index("crane"))] * 2)
    refused(lambda: table.step([Move(one, "crane"), Move("nobody", "crane")]), "UNKNOWN_SESSION")
    refused(lambda: table.step([Move(one, "crane"), Move(one, "crane")]), "BAD_INPUT")
    refused(lambda: table.step([Move(one, "crane"), Move(two, "crane", turn=1)]), "TURN_MISMATCH")
    table.step([Move(two, "crane")])
    refused(lambda: table.step([Move(one, "crane"), Move(two, "crane")]), "GAME_OVER")
    assert (len(game.turns), len(other.turns)) == (0, 1)
    refused(lambda: table.reset([Start(one), Start(secret=200)]), "BAD_INPUT")
    refused(lambda: table.reset([Start(one, seed=1, secret=2)]), "BAD_INPUT")
    assert table.step([Move(one, "crane")]) == [game]


def test_a_move_that_is_sent_again_is_made_once():
    table = sessions()
    ((name, game),) = table.reset([Start(secret=index("crane"))])
    for _ in range(2):
        table.step([Move(name, "night", turn=0)])
    assert len(game.turns) == 1
    refused(lambda: table.step([Move(name, "apple", turn=0)]), "TURN_MISMATCH")
    for _ in range(2):
        table.step([Move(name, "crane", turn=1)])
    assert (len(game.turns), game.won) == (2, True)


# From here on: the real server, as a process of its own, on the loopback interface.


@contextmanager
def serving(*arguments, token=""):
    command = [sys.executable, "-m", "deltawire_demo.wordle", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "WORDLE_TOKEN": token})
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), "it is to bind to the loopback interface, and say where"
        yield url
    finally:
        process.terminate()
        process.wait(120)
        process.stdout.close()


@pytest.fixture(scope="module")
def url():
    pytest.importorskip("openenv")
    with serving("--max-sessions", "256") as address:
        yield address


@pytest.fixture(scope="module")
def env():
    pytest.importorskip("openenv")
    from deltawire_demo.wordle import env

    return env


@pytest.mark.process
def test_openenvs_own_client(url, env):
    with env.WordleEnv(base_url=url).sync() as client:
        first = client.reset(secret=index("crane"), episode_id="one")
        assert (first.done, first.reward, first.observation.guesses_left) == (False, None, 6)
        result = client.step(env.WordleAction(guess="cream"))
        assert (result.reward, result.done, result.observation.feedback) == (0.3, False, "GGYY-")
        assert client.step(env.WordleAction(guess="qqqqq")).observation.valid is False
        state = client.state()
        assert (state.episode_id, state.step_count, state.guesses) == ("one", 2, ["cream", "qqqqq"])
        assert state.secret is None
        won = client.step(env.WordleAction(guess="crane"))
        assert (won.done, won.observation.won, won.observation.secret, won.observation.score) == (
            True, True, "crane", 1.7,
        )  # fmt: skip
        assert client.reset(seed=3).observation.guesses == []
        client.step(env.WordleAction(guess=WORDS[choose(3)]))
        assert client.state().won


@pytest.mark.process
def test_openenvs_generic_client(url, env):
    from openenv import GenericEnvClient

    with GenericEnvClient(base_url=url).sync() as client:
        client.reset(secret=index("crane"))
        assert client.step({"guess": "cream"}).observation["feedback"] == "GGYY-"


@pytest.mark.process
def test_bad_input_over_openenv_leaves_the_session_alive(url, env):
    from openenv import GenericEnvClient

    with GenericEnvClient(base_url=url).sync() as client:
        with pytest.raises(RuntimeError, match="reset first"):
            client.step({"guess": "crane"})
        for bad, reason in [
            ({"secret": 200}, "from 0 to 199"), ({"seed": -1}, "from 0"), ({"seed": "x"}, "integer"),
            ({"seed": 1, "secret": 1}, "not both"), ({"level": 3}, "not level"),
        ]:  # fmt: skip
            with pytest.raises(RuntimeError, match=reason):
                client.reset(**bad)
        client.reset(secret=index("crane"))
        for bad in ({}, {"guess": 5}, {"guess": "x" * 65}, {"guess": "crane", "more": 1}):
            with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
                client.step(bad)
        assert client.step({"guess": "crane"}).done
        with pytest.raises(RuntimeError, match="over"):
            client.step({"guess": "crane"})
        assert client.reset().observation["guesses_left"] == 6


@pytest.mark.process
def test_bad_input_over_http(url):
    with httpx.Client(base_url=url) as client:
        for path, body, status in [
            ("/batch/step", {"steps": [{"session": "nobody", "guess": "crane"}]}, 404),
            ("/batch/step", {"steps": [{"session": "nobody"}]}, 422),
            ("/batch/step", {"steps": [{"session": "nobody", "guess": "x" * 65}]}, 422),
            ("/batch/step", {"steps": {}}, 422),
            ("/batch/reset", {"games": [{"seed": "1"}]}, 422),
            ("/batch/reset", {"games": [{"seed": -1}]}, 422),
            ("/batch/reset", {"games": [{"secret": 200}]}, 422),
            ("/batch/reset", {"games": [{"level": 1}]}, 422),
            ("/batch/reset", {"games": [{}] * 257}, 503),
            ("/batch/reset", {"games": [{}], "padding": "x" * (1 << 20)}, 413),
            ("/step", {"action": {"guess": "crane"}}, 409),
        ]:
            response = client.post(path, json=body)
            assert response.status_code == status, (path, body, response.text[:300])
            assert response.json()["detail"]
        assert client.post("/batch/reset", content=b"{").status_code == 422
        assert client.post("/batch/reset", content=iter([b"{}"])).status_code == 413, "no length was stated"
        assert client.get("/health").json() == {"status": "healthy"}


@pytest.mark.process
def test_a_batch_equals_single_steps(url, env):
    secrets = [index("crane"), index("sweet"), index("apple")]
    guesses = ["cream", "sweet", "qqqqq", "paper", "apple", "crane"]
    with WordleGames(url) as games:
        batch = [games.reset(secrets=secrets)]
        for guess in guesses:
            games.step(dict.fromkeys(games.open, guess))
            batch.append(games.views)
        assert games.open == []
    for number, secret in enumerate(secrets):
        with env.WordleEnv(base_url=url).sync() as client:
            seen = client.reset(secret=secret).observation
            for turn, guess in enumerate([*guesses, None]):
                ours = batch[turn][number]
                assert {name: getattr(seen, name) for name in ours.__slots__} == {
                    name: getattr(ours, name) for name in ours.__slots__
                }
                if guess and not seen.done:
                    seen = client.step(env.WordleAction(guess=guess)).observation


@pytest.mark.process
def test_the_batch_client(url):
    with WordleGames(url) as games:
        games.reset(num_games=200)
        first = games._sessions.copy()
        games.reset(seeds=range(128))
        assert games._sessions == first[:128], "sessions are used again"
        views = games.step({number: WORDS[choose(number)] for number in range(0, 128, 2)})
        assert all(seen.won and seen.reward == 2.0 for seen in views.values())
        assert games.open == list(range(1, 128, 2))
        httpx.post(f"{url}/batch/close", json={"sessions": first[:5]})
        refused(lambda: games.step({1: "crane"}), "UNKNOWN_SESSION")
        assert len(games.reset(num_games=128)) == 128, "lost sessions are created again"
        refused(lambda: games.reset(num_games=257), "CAPACITY_REACHED")
        with pytest.raises(ValueError, match="one of"):
            games.reset(num_games=1, seeds=[1])
    with WordleGames(url) as games:
        assert len(games.reset(num_games=256)) == 256, "closing gave all of them back"


@pytest.mark.process
def test_256_sessions_at_a_time_and_no_more(url, env):
    async def all_games():
        async def connected(number):
            client = env.WordleEnv(base_url=url, connect_timeout_s=60)
            await client.connect()
            return client, await client.reset(secret=number % 200)

        pairs = await asyncio.gather(*(connected(number) for number in range(256)))
        clients = [client for client, _ in pairs]

        async def finish(number, client):
            results = [await client.step(env.WordleAction(guess=guess)) for guess in ("qqqqq", "zzzzz")]
            return [*results, await client.step(env.WordleAction(guess=WORDS[number % 200]))]

        one_more = env.WordleEnv(base_url=url)
        with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
            await one_more.reset()
        await one_more.close()
        games = await asyncio.gather(*(finish(number, client) for number, client in enumerate(clients)))
        await asyncio.gather(*(client.close() for client in clients))
        return games

    started = time.monotonic()
    games = asyncio.run(all_games())
    print(f"256 sessions: {time.monotonic() - started:.1f} s")
    for number, results in enumerate(games):
        secret = number % 200
        assert [result.done for result in results] == [False, False, True]
        assert results[-1].observation.guesses == ["qqqqq", "zzzzz", WORDS[secret]]
        assert results[-1].observation.won
        assert results[-1].observation.score == 1.6


def is_full(env, address):
    with env.WordleEnv(base_url=address).sync() as client:
        try:
            client.reset(seed=1)
        except RuntimeError as error:
            return "CAPACITY_REACHED" in str(error)
        return False


@pytest.mark.process
def test_a_silent_session_is_given_up(env):
    with (
        serving("--max-sessions", "1", "--expire", "1") as address,
        WordleGames(address) as games,
        env.WordleEnv(base_url=address).sync() as client,
    ):
        games.reset(num_games=1)
        client.reset(seed=1)
        assert is_full(env, address)
        deadline = time.monotonic() + 180
        while is_full(env, address):  # OpenEnv looks every five seconds
            assert time.monotonic() < deadline
            time.sleep(0.2)
        with pytest.raises(RuntimeError, match="expired after"):
            client.step(env.WordleAction(guess="crane"))
        refused(lambda: games.step({0: "crane"}), "UNKNOWN_SESSION")


@pytest.mark.process
def test_a_port_that_is_taken_is_an_error(url):
    command = [sys.executable, "-m", "deltawire_demo.wordle", "--port", url.rpartition(":")[2]]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "cannot listen on 127.0.0.1" in ended.stderr


@pytest.mark.process
def test_strangers_play_nothing(env):
    token = "players-of-Wordle"
    headers = {"Authorization": f"Bearer {token}"}
    with serving(token=token) as address:
        for bad in ({}, {"Authorization": token}, {"Authorization": f"Bearer {token}x"},
                    {"Authorization": f"Bearer {token.lower()}"}):  # fmt: skip
            with httpx.Client(base_url=address, headers=bad) as client:
                for path in ("/", "/docs", "/openapi.json", "/reset", "/batch/reset", "/health/"):
                    answer = client.post(path, json={})
                    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), path
                assert client.get("/health").json() == {"status": "healthy"}, "for probes, which have no token"
            with pytest.raises(ConnectionError, match="401"):
                env.WordleEnv(base_url=address, headers=bad).sync().reset(seed=1)
            with WordleGames(address, headers=bad) as games:
                refused(lambda: games.reset(num_games=1), "UNAUTHORIZED")
        with WordleGames(address, headers=headers) as games:
            assert len(games.reset(num_games=2)) == 2
        with env.WordleEnv(base_url=address, headers=headers).sync() as client:
            assert client.reset(seed=1).observation.guesses_left == 6


@pytest.mark.process
@pytest.mark.parametrize(
    ("host", "token"), [("0.0.0.0", ""), ("::", ""), ("127.0.0.1", "short"), ("127.0.0.1", "$" * 16)]
)
def test_other_machines_need_a_token(host, token):
    command = [sys.executable, "-m", "deltawire_demo.wordle", "--port", "0", "--host", host]
    ended = subprocess.run(
        command, env={**os.environ, "WORDLE_TOKEN": token}, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "WORDLE_TOKEN must be 16 to 200 characters" in ended.stderr
    assert not token or token not in ended.stderr


@pytest.mark.process
def test_rules_and_batch_client_load_nothing_large():
    program = (
        "import sys, json\nimport deltawire_demo.wordle.client\n"
        "print(json.dumps([n for n in ('openenv', 'gradio', 'torch', 'numpy', 'pydantic') if n in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(out.stdout) == []
