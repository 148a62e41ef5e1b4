"""The constants of `deltawire estimate`, and the sizes and times that follow from them."""

import json
import math
import subprocess
import sys
from statistics import mean

import pytest
from generate import RESULTS, read

from deltawire.estimate.architecture import count_weights, read_size
from deltawire.estimate.plan import Plan, at_density, density_of, measured, moved
from support import ROOT


@pytest.mark.process
def test_constants_are_what_their_script_makes(tmp_path):
    made = tmp_path / "measured.json"
    subprocess.run(
        [sys.executable, ROOT / "benchmarks/estimate_data.py", "--output", made], check=True, capture_output=True
    )
    assert (ROOT / "src/deltawire/estimate/measured.json").read_text() == made.read_text()


def test_every_constant_is_from_a_file():
    assert measured("from").keys() == measured().keys()
    for files in measured("from").values():
        for name in files.split(", "):
            assert (RESULTS / name).exists() or (ROOT / "src/deltawire/pages/static/explain" / name).exists()


def test_the_learning_rate_gives_the_density_that_was_recorded():
    rows = read("grpo.csv")[1]
    for lr in (1e-6, 3e-6):
        own = [float(row["density"]) for row in rows if float(row["lr"]) == lr][-20:]
        assert density_of(lr) == pytest.approx(sum(own) / len(own), rel=0.25)
    assert density_of(1.0) == 1


def test_a_delta_has_the_size_of_a_published_one():
    row = next(row for row in read("gpu_publish.csv")[1] if row["model"] == "Qwen3-8B" and row["method"] == "deltawire")
    plan = Plan(8.19e9, float(row["density"]), 1440)
    assert plan.delta_bytes() == pytest.approx(int(row["payload_bytes"]), rel=0.1)
    assert plan.delta_bytes(4) < 3 * plan.delta_bytes()
    assert Plan(8.19e9, 1.0, 1440).delta_bytes(1000) <= 1.01 * plan.anchor_bytes


def test_changes_of_several_steps_overlap_as_recorded():
    recorded = json.loads((ROOT / "src/deltawire/pages/static/explain/recorded.json").read_text())["recordings"]
    for each in recorded.values():
        hops = [hop for hop in each["bucket"]["hops"] if hop["base"] is not None]
        one, four = (mean(h["bytes"] for h in hops if h["version"] - h["base"] == span) for span in (1, 4))
        row = each["sizes"][0]
        plan = Plan(row["weights"], row["changed"] / row["weights"], 1440, num_tensors=6)
        assert plan.delta_bytes(4) / plan.delta_bytes() == pytest.approx(four / one, rel=0.03)


def test_how_far_weights_move():
    """By hand: the correlations of two steps, of three; long after, momentum makes a random walk of longer steps."""
    assert moved(1) == pytest.approx(1)
    assert moved(2) == pytest.approx(math.sqrt(2 + 2 * 0.9))
    assert moved(3) == pytest.approx(math.sqrt(3 + 4 * 0.9 + 2 * 0.81))
    assert moved(40_000) / moved(10_000) == pytest.approx(2, rel=1e-3)


def test_times_are_the_measured_ones_at_the_sizes_that_were_measured():
    row = next(row for row in read("gpu_publish.csv")[1] if row["model"] == "Qwen3-8B" and row["method"] == "deltawire")
    gpu = Plan(measured()["gpu"]["most_weights"], float(row["density"]), 1440)
    assert gpu.blocked_seconds == pytest.approx(float(row["blocked_ms"]) / 1000, rel=0.01)
    assert Plan(1e12, 0.01, 50).blocked_seconds < 1.01 * gpu.blocked_seconds, "a large model is on many GPUs"
    chain = read("chain.csv")[1][0]["phases_seconds"].split()
    times = dict(zip(chain[::2], map(float, chain[1::2]), strict=True))
    cpu = Plan(128e6, 0.0115, 1440, machine="cpu")
    assert cpu.blocked_seconds == pytest.approx(times["diff"], rel=0.01)
    assert cpu.encode_seconds == pytest.approx(times["encode"], rel=0.1)
    assert cpu.decode_seconds == pytest.approx(times["decode"], rel=0.1)
    vllm = next(row for row in read("vllm.csv")[1] if row["mode"] == "deltawire")
    assert Plan(131748096, 0.01, 1440, machine="cpu").pause_seconds == pytest.approx(
        float(vllm["pause_ms"]) / 1000, rel=0.001
    )


def test_between_measured_densities_lines_are_straight():
    rows = measured()["codec"]
    for row in rows:
        assert at_density("bytes_per_change", row["density"]) == pytest.approx(row["bytes_per_change"])
    assert at_density("bytes_per_change", 1e-9) == rows[0]["bytes_per_change"]
    assert at_density("bytes_per_change", 1.0) == rows[-1]["bytes_per_change"]
    assert rows[3]["bytes_per_change"] < at_density("bytes_per_change", 0.01) < rows[2]["bytes_per_change"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": 0}, {"weights": float("nan")}, {"weights": 1e15}, {"density": 0}, {"density": 1.1},
        {"steps_a_day": -1}, {"sites": 0}, {"sites": 9}, {"replicas": 10**6}, {"site_mbits": float("inf")},
        {"machine": "tpu"}, {"joins_a_day": -1}, {"poll_seconds": 0},
    ],
)  # fmt: skip
def test_a_plan_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)) if "sites" not in wrong else "replicas"):
        Plan(**{"weights": 8e9, "density": 0.01, "steps_a_day": 100, "replicas": 8} | wrong)


@pytest.mark.parametrize(("text", "weights"), [("8b", 8e9), ("0.6B", 6e8), ("135m", 1.35e8), ("1t", 1e12),
                                               ("8_190_735_360", 8190735360), (" 8B ", 8e9)])  # fmt: skip
def test_sizes(text, weights):
    assert read_size(text) == weights


@pytest.mark.parametrize("text", ["", "b", "eight", "-1b", "nan", "inf", "0b", "8bb", "8 gb"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="8b"):
        read_size(text)


QWEN3_8B = {
    "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B_A3B = {
    "hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3 = {
    "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3, "num_attention_heads": 128,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "vocab_size": 129280, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (QWEN3_8B, 8.190735360e9),
        (QWEN3_8B | {"tie_word_embeddings": True}, 8.190735360e9 - 151936 * 4096),
        ({"text_config": QWEN3_8B, "vision_config": {}}, 8.190735360e9),
        (QWEN3_30B_A3B, 30.532e9),
        (DEEPSEEK_V3, 671.026e9),
    ],
)
def test_weights_of_a_config(tmp_path, config, weights):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert count_weights(path)[0] == pytest.approx(weights, rel=1e-4)


def test_tensors_of_a_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_8B))
    assert count_weights(path)[1] == 2 + 36 * 9 + 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hidden_size": "x"}', "[" * 5000,
                                  '{"hidden_size": 1e400}', json.dumps(QWEN3_8B | {"hidden_size": 10**400}),
                                  json.dumps(QWEN3_8B | {"num_attention_heads": 0, "head_dim": None}),
                                  json.dumps({k: v for k, v in QWEN3_8B.items() if k != "vocab_size"})])  # fmt: skip
def test_a_config_that_is_none(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="--params"):
        count_weights(path)
