"""`deltawire explain` in a real browser: its arithmetic, and what its scenes show."""

import base64
import re
from statistics import median

import ml_dtypes
import numpy as np
import pytest
from generate import read

from deltawire.estimate.bill import planned
from deltawire.estimate.plan import Plan
from deltawire.run.keys import read_document_key, read_object_key
from support.explain import RECORDED, info, press, slide, unfold
from support.recorded import recorded_steps

LR1 = RECORDED["recordings"]["rl-lr1e-6"]
MEASURED = RECORDED["measured"]
RUN = MEASURED["runs"][0]


# Arithmetic: the same in JavaScript and here


def test_rounding_to_bf16_is_that_of_ml_dtypes(explain):
    rng = np.random.default_rng(7)
    halves = rng.integers(0, 1 << 16, 20_000, dtype=np.uint32) << 16
    patterns = np.concatenate([
        rng.integers(0, 1 << 32, 60_000, dtype=np.uint32),
        halves | 0x8000,  # ties
        halves | 0x7FFF, halves | 0x8001,
        rng.integers(0, 1 << 23, 5_000, dtype=np.uint32),  # subnormals
        np.array([0, 0x80000000, 1, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFF800001,
                  0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32),
    ])  # fmt: skip
    with np.errstate(invalid="ignore"):
        expected = patterns.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    with explain() as page:
        got = page.evaluate(
            """async (text) => {
                const bf16 = await import("explain/bf16");
                const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
                const rounded = Uint16Array.from(new Uint32Array(bytes.buffer), bf16.roundBits);
                return Array.from(new Uint8Array(rounded.buffer), (each) => String.fromCharCode(each)).join("");
            }""",
            base64.b64encode(patterns.tobytes()).decode(),
        )
        strange = page.evaluate(
            """async () => {
                const { fromBf16, toBf16, bitsOfFloat, placeOf, atPlace } = await import("explain/bf16");
                const all = Array.from({ length: 65536 }, (_, i) => i);
                const isReal = (i) => (i & 0x7fff) <= 0x7f80;
                return all.filter((i) => atPlace(placeOf(i)) !== i
                    || (isReal(i) && (toBf16(fromBf16(i)) !== i || bitsOfFloat(fromBf16(i)) !== i * 65536)));
            }"""
        )
    assert np.isnan(expected.view(ml_dtypes.bfloat16)).any()
    assert np.array_equal(np.frombuffer(got.encode("latin-1"), "<u2"), expected)
    assert strange == []


def test_classes_and_gaps_of_the_field(explain):
    (step,) = (each for each in recorded_steps("rl-lr1e-6") if each.number == 0 and "embed" in each.tensor)
    old, new = step.old[:4096], step.new[:4096]
    about = LR1["classes"][0]
    group = 11
    classes = np.clip(((old >> 7) & 255).astype(int) - about["first"], 0, 15)
    changed = (old != new)[classes == group]
    gaps = np.diff(np.flatnonzero(changed), prepend=-1) - 1
    with explain() as page:
        unfold(page)
        press(page, "packets", "End")
        slide(page, "packets", "class", 1 + group)
        inside = page.evaluate("({...document.querySelector('[data-inside]').dataset})")
        code = page.locator("#packets .codes li").first.inner_text().split()
    assert int(inside["members"]) == len(changed)
    assert int(inside["changed"]) == changed.sum() > 0
    assert [int(gap) for gap in inside["gaps"].split()] == gaps.tolist()
    parameter = about["rows"][group]["parameter"]
    remainder = f"{gaps[0] & ((1 << parameter) - 1):0{parameter}b}"
    assert code == [str(gaps[0]), "0" * (gaps[0] >> parameter) + "1" + remainder]


# Scenes

RATES = [float(f"{digit}e{power}") for power in range(-8, -3) for digit in range(1, 10)] + [1e-3]


def steps_until_change(bits, lr):
    """In numpy's arithmetic: how many steps of lr away from zero until bf16 sees another weight."""
    start = np.uint16(bits)
    master = start.view(ml_dtypes.bfloat16).astype(np.float32)
    step = np.float32(-lr if bits & 0x8000 else lr)
    for number in range(1, 401):
        master = np.float32(master + step)
        if master.astype(ml_dtypes.bfloat16).view(np.uint16) != start:
            return str(number)
    return ""


def test_the_weight_changes_when_arithmetic_says_so(explain):
    seen = set()
    with explain() as page:
        unfold(page)
        press(page, "weight", "Home")
        for size in ("typical", "small", "large"):
            page.locator("#weight [data-input=size] select").select_option(size)
            for lr in (1e-6, 1e-8, 3e-6, 1e-4):
                slide(page, "weight", "lr", RATES.index(lr))
                now = info(page, "weight")
                assert now["flips"] == steps_until_change(int(now["start"]), lr)
                seen.add(now["flips"])
        page.locator("#weight [data-input=size] select").select_option("typical")
        slide(page, "weight", "lr", RATES.index(1e-6))
        press(page, "weight", "Home", *["ArrowRight"] * 4)
        before = info(page, "weight")
        assert before["cast"] == before["start"]
        assert page.locator("#weight .served.lit").count() == 0
        assert page.locator("#weight .low.lit").count() > 0
        press(page, "weight", "ArrowRight")
        after = info(page, "weight")
        changed = int(after["cast"]) ^ int(after["start"])
        assert after["step"] == after["flips"]
        assert page.locator("#weight .served.lit").count() == changed.bit_count() > 0
    assert len(seen) > 5


def test_cells_are_lit_as_recorded(explain):
    with explain() as page:
        for recording in ("rl-lr1e-6", "rl-lr3e-6"):
            page.evaluate(f"location.hash = '#weight?recording={recording}'")
            press(page, "weight", "Home", *["ArrowRight"] * 8)
            now = info(page, "weight")
            (step,) = (each for each in recorded_steps(recording) if each.number == 2 and "embed" in each.tensor)
            assert now["recorded"] == "3"
            assert int(now["lit"]) == np.count_nonzero(step.old[:4096] != step.new[:4096]) > 20
            assert f"{now['lit']} of these 4,096 weights" in page.inner_text("#weight [data-status]")


def test_density_and_ratio_are_those_of_the_whole_run(explain):
    rows = [row for row in read("grpo.csv")[1] if float(row["lr"]) == 1e-6 and int(row["step"]) >= 10]
    density, ratio = (median(float(row[name]) for row in rows) for name in ("density", "ratio_to_full"))
    with explain() as page:
        assert page.inner_text("#weight [data-share]") == f"{100 * density:.3g} %"
        assert page.inner_text("#packets [data-share]") == f"1/{1 / ratio:.0f}"
        unfold(page)
        assert page.locator("#packets [data-input=density] output").inner_text() == f"{100 * density:.3g} %"


def test_areas_are_bytes(explain):
    with explain() as page:
        press(page, "packets", "Home")
        widths = page.evaluate(
            "[...document.querySelectorAll('#packets .packet')].map((e) => +e.getAttribute('width'))"
        )
        now = info(page, "packets")
        assert (widths[0] / widths[1]) ** 2 == pytest.approx(float(now["fullBytes"]) / float(now["deltaBytes"]))
        assert float(now["fullBytes"]) == 2 * 8.19e9
        assert float(now["deltaBytes"]) == pytest.approx(8.19e9 * RUN["density"] * RUN["bytes_per_change"])
        press(page, "packets", "End")
        assert page.get_attribute("#packets .landed", "d").count("z") == int(info(page, "packets")["arrived"])
        assert int(info(page, "packets")["arrived"]) == int(float(now["fullBytes"]) / float(now["deltaBytes"]))


# From 1.1 to 1.25 % the second anchor moves into the 500 steps, in one of them, and the page has a straight line.
@pytest.mark.parametrize("density", [0.001, 0.005, 0.01, 0.0125, RUN["density"], 0.028, 0.1])
def test_the_total_upload_is_that_of_an_estimate(explain, density):
    plan = Plan(8.19e9, density, 1440)
    with explain(link=f"#packets?density={density}") as page:
        page.wait_for_selector("#packets[data-delta-bytes]")
        text = page.inner_text("#packets [data-uploaded]")
        delta = float(info(page, "packets")["deltaBytes"])
    size, unit, times = re.search(r"joiners: ([\d.]+) (\w+) a step, ([\d.]+) times the delta", text).groups()
    assert float(size) * {"MB": 1e6, "GB": 1e9}[unit] == pytest.approx(float(times) * delta, rel=0.01)
    assert float(times) == pytest.approx(planned(plan).uploaded_bytes / plan.delta_bytes(), rel=0.06)


def phases(page):
    # They are drawn once the page knows its width.
    page.wait_for_selector("#tokens [data-phase]", state="attached")
    return page.evaluate(
        """Object.fromEntries([...document.querySelectorAll("#tokens [data-phase]")].map(
            (each) => [each.dataset.phase, Number(each.dataset.seconds)]))"""
    )


def test_times_are_the_measured_ones_where_they_were_measured(explain):
    with explain() as page:
        unfold(page)
        press(page, "tokens", "End")
        page.click("#tokens button:has-text('128 M on two cores')")
        seconds = phases(page)
        checks = page.evaluate(
            """async () => (await import("explain/cost")).checks(
                (await (await fetch("recorded.json")).json()).measured)"""
        )
    chain, vllm = MEASURED["chain"]["loopback"], MEASURED["vllm"]
    for ours, theirs in (("diff", "diff"), ("encode", "encode"), ("commit", "commit"), ("verify and decode", "decode")):
        assert seconds[ours] == pytest.approx(chain["phases"][theirs])
    write = vllm["write"] * (128e6 * 0.0115) / (vllm["weights"] * vllm["density"])
    assert seconds["pause and write"] == pytest.approx(vllm["pause"] - vllm["write"] + write)
    row = read("engine_split.csv")[1][0]
    staged = sum(float(row[f"{name}, ns a change"]) for name in ("split", "save"))
    assert seconds["stage"] == pytest.approx(128e6 * 0.0115 * staged / 1e9)
    assert len(checks) == 6
    for name, computed, measured in checks:
        # The changes of that run take more bytes than those of recorded ones, and a slow line starts slowly.
        close = 0.25 if name == "delta, 100 Mbit/s" else 0.05
        assert computed == pytest.approx(measured, rel=close), name


def test_the_gpu_times_go_through_the_measured_models(explain):
    small, large = MEASURED["gpu"]["models"]
    with explain(link="#tokens?density=0.01&weights=596050000") as page:
        press(page, "tokens", "End")
        assert phases(page)["diff"] == pytest.approx(small["blocked"], rel=1e-3)
    with explain(link="#tokens?density=0.01") as page:
        press(page, "tokens", "End")
        seconds = phases(page)
        expected = [large["blocked"], large["encode"], large["stage"], large["pause"]]
        names = ("diff", "encode", "verify, decode and stage", "pause and write")
        assert [seconds[name] for name in names] == pytest.approx(expected, rel=1e-3)
        assert "stage" not in seconds


@pytest.mark.parametrize(("weights", "density"), [(596050000, 0.05), (8.19e9, 0.016), (405e9, 0.01), (405e9, 0.002)])
def test_the_gpu_times_are_those_of_an_estimate(explain, weights, density):
    with explain(link=f"#tokens?density={density}&weights={weights:.0f}") as page:
        press(page, "tokens", "End")
        seconds = phases(page)
    plan = Plan(weights, density, 1440)
    # A slider has steps.
    assert seconds["pause and write"] == pytest.approx(plan.pause_seconds, rel=3e-3)
    assert seconds["verify, decode and stage"] == pytest.approx(plan.decode_seconds, rel=3e-3)


def test_idle_time_of_an_hour(explain):
    """Every version's pause counts, however many a picture shows."""
    with explain() as page:
        press(page, "tokens", "End")
        for link, step, replicas in (("", 60, 8), ("?replicas=64&stepSeconds=5", 5, 64)):
            page.evaluate(f"location.hash = '#tokens{link}'")
            now = info(page, "tokens")
            seconds = phases(page)
            pause, full = seconds["pause and write"], seconds["pause"] + seconds["broadcast"]
            # A version each step, as none of the parts takes longer.
            assert float(now["hourDelta"]) == pytest.approx(3600 * replicas * pause / (step + seconds["diff"]))
            assert float(now["hourFull"]) == pytest.approx(3600 * replicas * full / (step + full))


def test_tokens_stop_in_red(explain):
    with explain() as page:

        def boxes():
            """The colour of the first engine of each way, and whether it says that it is stopped."""
            return page.evaluate(
                """[...document.querySelectorAll("#tokens .way")].map((way) => [way.classList.contains("stopped"),
                    [...way.querySelector("canvas").getContext("2d").getImageData(4, 16, 1, 1).data].slice(0, 3)])"""
            )

        press(page, "tokens", "Home")
        serving = boxes()
        press(page, "tokens", "ArrowRight")
        (full, red), (delta, green) = boxes()
        assert (full, delta) == (True, False)
        assert red[0] > 2 * red[1]
        assert green == serving[1][1] == serving[0][1]
        assert green[1] > 2 * green[0]
        press(page, "tokens", "End")
        ways = page.evaluate("[...document.querySelectorAll('#tokens .way')].map((each) => ({...each.dataset}))")
        pauses = page.evaluate("[...document.querySelectorAll('#tokens [data-pause]')].map((e) => +e.dataset.pause)")
        assert [way["versions"] for way in ways] == ["3", "3"]
        assert [float(way["idle"]) for way in ways] == pytest.approx([3 * each for each in pauses])
        assert pauses[0] > 100 * pauses[1]


def test_a_slow_line_and_a_fast_one(explain):
    stop = MEASURED["gpu"]["reload"]["stop"]
    with explain(link="#tokens?gbits=0.1") as page:
        press(page, "tokens", "End")
        slow = info(page, "tokens")
        assert float(slow["fullSeconds"]) == pytest.approx(2 * 8.19e9 / (0.1e9 / 8) + stop)
        assert "times sooner" in page.inner_text("#tokens [data-status]")
        press(page, "tokens", "Home", "ArrowRight")
        stopped = page.locator("#tokens .way.stopped").evaluate_all("all => all.map((each) => ({...each.dataset}))")
        assert [way["way"] for way in stopped] == ["full"]
        assert float(stopped[0]["idle"]) == pytest.approx(float(slow["fullSeconds"]) / 2), "in the middle of it"
        press(page, "tokens", "End")
        page.evaluate("location.hash = '#tokens?gbits=0.1&full=checkpoint'")
        assert float(info(page, "tokens")["fullSeconds"]) > 1.99 * float(slow["fullSeconds"])
        page.evaluate("location.hash = '#tokens?gbits=400'")
        assert float(info(page, "tokens")["fullSeconds"]) < 0.5
        assert "served sooner in full" in page.inner_text("#tokens [data-status]")


def test_late_replica_takes_the_planned_route(explain):
    cases = [
        (True, False, "anchor 0, 0 → 4, 4 → 5, 5 → 6"),
        (False, False, "anchor 0, 0 → 1, 1 → 2, 2 → 3, 3 → 4, 4 → 5, 5 → 6"),
        (True, True, "anchor 5, 5 → 6"),
    ]
    sizes = {
        f"anchor {hop['version']}" if hop["base"] is None else f"{hop['base']} → {hop['version']}": hop["bytes"]
        for hop in LR1["bucket"]["hops"]
    }
    with explain() as page:
        unfold(page)
        for skips, anchors, expected in cases:
            page.set_checked("#bucket label:has-text('skip deltas') input", skips)
            page.set_checked("#bucket label:has-text('second anchor') input", anchors)
            press(page, "bucket", "Home", *["ArrowRight"] * 6)
            assert info(page, "bucket")["late"] == ""
            press(page, "bucket", "ArrowRight")
            now = info(page, "bucket")
            assert (now["version"], now["late"]) == ("6", expected)
            assert int(now["lateBytes"]) == sum(sizes[name] for name in expected.split(", "))
        slide(page, "bucket", "joins", 6)
        assert info(page, "bucket")["late"] == ""


def test_files_land_under_their_names(explain):
    """Each version brings its files and then its manifest, under keys of a run."""
    names = [file["key"] for file in LR1["bucket"]["files"] if "00000005-" not in file["key"] or "from" in file["key"]]
    names = [name for name in names if not name.endswith(".anchor.json")]
    with explain() as page:
        press(page, "bucket", "Home")
        states, totals = [], []
        for _ in range(10):
            states.append(page.locator("#bucket .files .there code").all_inner_texts())
            totals.append(int(info(page, "bucket")["bucketBytes"]))
            press(page, "bucket", "ArrowRight")
        assert int(info(page, "bucket")["version"]) == 8
        page.set_viewport_size({"width": 390, "height": 844})
        shown = [item for item in page.locator("#bucket .files code").all() if item.is_visible()]
        assert [item.inner_text() for item in shown] == names[-9:], "the latest, next to what replicas do"
        # On the way to version 3: its delta alone is no version, and then its manifest is there.
        for part, manifest in ((0.5, False), (0.8, True)):
            page.evaluate(
                """(at) => {
                    const range = document.querySelector("#bucket .toolbar input");
                    range.value = Math.round(1000 * at);
                    range.dispatchEvent(new Event("input"));
                }""",
                (3 + part) / 9,
            )
            there = page.locator("#bucket .files .there code").evaluate_all("all => all.map((e) => e.textContent)")
            assert ("manifests/00000003.json" in there) == manifest
            assert any(key.startswith("deltas/00000003") for key in there)
            assert info(page, "bucket")["version"] == ("3" if manifest else "2")
    assert states[0] == ["run.json"]
    assert states[-1] == names
    assert states[1] == names[:3]
    assert totals == sorted(set(totals))
    for version, shown in enumerate(states[1:]):
        assert f"manifests/{version:08}.json" in shown[-3:], "after its delta"
        assert all(read_document_key(key) or read_object_key(key) or key == "run.json" for key in shown)
