"""The estimate command."""

import json
import signal
import urllib.request

import pytest

from support.command_line import program, run, told


def test_an_estimate_as_text_and_as_data():
    arguments = ["estimate", "--params", "8b", "--sites", 2, "--replicas", 64]
    text = run(*arguments)
    assert text.exit_code == 0
    data = told(*arguments)
    assert data["plan"]["weights"] == 8e9
    assert data["from"]["gpu"] == "gpu_publish.csv, vllm_gpu.csv"
    assert [(each["ships"], each["caches"]) for each in data["ways"]] == [
        ("deltas", False), ("deltas", True), ("all weights", False), ("all weights", True),
    ]  # fmt: skip
    assert "64 replicas at 2 sites" in text.stdout
    assert f"${data['ways'][0]['day']['usd']['total']:,.0f}" in text.stdout


def test_every_option_changes_something():
    base = ["--params", "8b", "--sites", 2, "--replicas", 16, "--joins-per-day", 5]
    before = told("estimate", *base)
    for option in (
        ["--lr", "3e-6"], ["--density", 0.05], ["--steps-per-day", 100], ["--trainer-mbits", 100],
        ["--site-mbits", 100], ["--inside-mbits", 100], ["--round-trip", 200], ["--poll", 5], ["--machine", "cpu"],
        ["--store", "gcs"], ["--egress-price", 0.02], ["--storage-price", 1], ["--put-price", 1], ["--get-price", 1],
        ["--keep-days", 1], ["--versions", 3], ["--seed", 1],
    ):  # fmt: skip
        after = told("estimate", *base, *option)
        assert after["ways"] != before["ways"], option
    assert told("estimate", *base)["ways"] == before["ways"]


def test_a_recorded_density_and_a_config(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
    }))  # fmt: skip
    data = told("estimate", "--config", config, "--density", 0.0115)
    assert data["plan"]["weights"] == pytest.approx(8.19e9, rel=0.001)
    assert (data["plan"]["density"], data["plan"]["num_tensors"]) == (0.0115, 327)


@pytest.mark.parametrize(
    ("arguments", "code", "told_why"),
    [
        ([], 2, "--params 8b"),
        (["--params", "8b", "--config", "c.json"], 2, "--params 8b"),
        (["--params", "8b", "--lr", 1e-6, "--density", 0.1], 2, "leave one out"),
        (["--params", "8b", "--port", 1], 2, "--page"),
        (["--params", "huge"], 2, "8b, 0.6b"),
        (["--config", "no-such-file"], 1, "no-such-file"),
        (["--params", "8b", "--sites", 9], 2, "at least as many as sites"),
        (["--params", "8b", "--density", 2], 2, "density"),
        (["--params", "8b", "--egress-price", "nan"], 2, "price"),
        (["--params", "8b", "--put-price", "inf"], 2, "price"),
        (["--params", "8b", "--get-price", 1e308], 2, "price"),
        (["--params", "8b", "--poll", 1e-300], 2, "0.01<=x<=86400"),
        (["--params", "8b", "--poll", "nan"], 2, "poll_seconds"),
        (["--params", "8b", "--joins-per-day", 1e300], 2, "0<=x<=1000000"),
        (["--params", "8b", "--steps-per-day", 1e-300], 2, "0.01<=x<=864000"),
        (["--params", "8b", "--round-trip", 1e300], 2, "0<=x<=60000"),
        (["--params", "8b", "--trainer-mbits", 1e-300], 2, "0.1<=x<="),
        (["--params", "8b", "--site-mbits", 1e-300], 2, "0.1<=x<="),
        (["--params", "8b", "--inside-mbits", 1e300], 2, "0.1<=x<="),
        (["--params", "8b", "--keep-days", 1e300], 2, "0<=x<=36500"),
    ],
)
def test_wrong_options(arguments, code, told_why):
    result = run("estimate", *arguments)
    assert result.exit_code == code
    assert told_why in result.output
    assert "Traceback" not in result.output


@pytest.mark.process
def test_the_page_is_served_until_it_is_ended():
    with program("estimate", "--page") as process:
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(url) as page:
            assert b"What a run will cost" in page.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
