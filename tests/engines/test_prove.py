"""Which parameters answers depend on: a server in this process, with copies that nothing shows."""

import pytest
import torch

from deltawire.engines import prove as proving
from deltawire.testing import Parameter, Probed, Subject, prove

VOCABULARY, HIDDEN, EXPERTS = 128, 16, 4


class Server(Probed):
    """Reads a prompt, keeps its context, and computes a next token by other code: as engines do.

    `copies` are parameters of which prompts, or next tokens, see the values that they had at the start.
    """

    def __init__(self, copies=(), block_size=8, steers=True, noisy=False):
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "embed": (VOCABULARY, HIDDEN), "mix": (HIDDEN, HIDDEN), "zero": (HIDDEN,), "gate": (EXPERTS, HIDDEN),
            "experts": (EXPERTS, HIDDEN, HIDDEN), "head": (VOCABULARY, HIDDEN), "unused": (3,),
        }  # fmt: skip
        self.own = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        self.own["zero"].zero_()
        self.first = {name: value.clone() for name, value in self.own.items()}
        self.copies, self.block_size, self.steers, self.noisy = set(copies), block_size, steers, noisy
        self.kept, self.contexts = {}, {}

    def subject(self):
        parameters = [Parameter(0, name, EXPERTS if name == "experts" else 0) for name in self.own]
        return Subject({"model": "tiny"}, parameters, self.block_size)

    def _keep(self, name):
        self.kept.setdefault(name, self.own[name].clone())
        return self.own[name]

    def disturb(self, rank, name, part, strength):
        value = self._keep(name)
        value = value if part is None else value[part]
        value += strength * torch.randn(value.shape, generator=torch.Generator().manual_seed(1))

    def steer(self, name, part, seed):
        gate = self._keep("gate")
        gate.zero_()
        gate[part] = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed))
        return self.steers

    def restore(self):
        for name, value in self.kept.items():
            self.own[name].copy_(value)
        self.kept.clear()

    def _values(self, what):
        return {name: self.first[name] if (what, name) in self.copies else self.own[name] for name in self.own}

    def _layer(self, tokens, values):
        hidden = values["embed"][tokens] @ values["mix"] + values["zero"]
        chosen = (hidden @ values["gate"].t()).argmax(-1)
        return torch.stack([each @ values["experts"][number] for each, number in zip(hidden, chosen, strict=True)])

    def ask(self, prompt, salt, *, decodes):
        tokens = torch.tensor(prompt)
        values = self._values("prompt")
        if not decodes:
            hidden = self._layer(tokens, values).cumsum(0)
        else:
            if salt not in self.contexts:
                self.contexts[salt] = self._layer(tokens[:-1], values).sum(0)
            values = self._values("next")
            hidden = self.contexts[salt] + self._layer(tokens[-1:], values)[0]
        noise = torch.rand(1).item() if self.noisy else 0
        return [*torch.log_softmax(hidden @ values["head"].t(), -1).reshape(-1).tolist(), noise]


def states(proof, name):
    return {(each.prefill, each.decode) for each in proof.found if each.name == name}


def test_each_parameter_is_alive_but_those_that_are_not():
    server = Server()
    proof = prove(server)
    for name in ("embed", "mix", "zero", "head", "gate"):
        assert states(proof, name) == {("alive", "alive")}, name
    assert states(proof, "unused") == {("dead", "dead")}
    assert not proof.holds
    assert [each.part for each in proof.found if each.name == "experts"] == list(range(EXPERTS))
    assert {each.prefill for each in proof.found if each.name == "experts"} == {"alive"}
    assert all(torch.equal(value, server.first[name]) for name, value in server.own.items())


@pytest.mark.parametrize("name", ["mix", "zero", "head", "embed"])
def test_a_copy_for_prompts_or_for_next_tokens_is_found(name):
    assert states(prove(Server({("prompt", name)})), name) == {("dead", "alive")}
    assert states(prove(Server({("next", name)})), name) == {("alive", "dead")}


def test_a_copy_of_experts_is_found_where_tokens_reach_them():
    found = states(prove(Server({("prompt", "experts"), ("next", "experts")})), "experts")
    assert ("dead", "dead") in found
    assert not any("alive" in each for each in found)
    assert states(prove(Server(steers=False)), "experts") == {("unclear", "unclear")}


def test_answers_that_vary_tell_nothing():
    proof = prove(Server(noisy=True))
    assert {(each.prefill, each.decode) for each in proof.found} == {("unclear", "unclear")}
    assert proof.holds


def test_a_proof_is_remembered_for_the_same_subject(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    proof = prove(Server())
    assert proving.remembered(proof.about) is None
    path = proving.remember(proof)
    assert proving.remembered(proof.about) == proof
    assert proving.remembered({**proof.about, "flags": "others"}) is None
    path.write_text("{")
    assert proving.remembered(proof.about) is None
