"""`deltawire explain` in a real browser: its arithmetic, and its scenes."""

import base64
import json
import re
from contextlib import contextmanager
from statistics import median

import ml_dtypes
import numpy as np
import pytest
from generate import read

from deltawire.pages.explain import serve, single_file, url_of
from deltawire.run.keys import read_document_key, read_object_key
from support import ROOT
from support.browser import LOOKS, fits
from support.pages import in_a_thread
from support.recorded import recorded_steps

SCENES = ("weight", "packets", "tokens", "bucket")
RECORDED = json.loads((ROOT / "src/deltawire/pages/static/explain/recorded.json").read_text())
LR1 = RECORDED["recordings"]["rl-lr1e-6"]
MEASURED = RECORDED["measured"]
RUN = MEASURED["runs"][0]


@pytest.fixture(scope="module")
def url():
    with in_a_thread(serve()) as server:
        yield url_of(server)


@pytest.fixture
def explain(open_page, url):
    """The page, complete; options as those of `open_page`. A link is what comes after the address."""

    @contextmanager
    def opened(address=url, link="", **options):
        with open_page(address + link, **options) as page:
            page.wait_for_selector("body[data-ready]")
            yield page

    return opened


def info(page, scene):
    return page.evaluate("id => ({...document.getElementById(id).dataset})", scene)


def slide(page, scene, name, index):
    """Move a slider to one of its values."""
    page.evaluate(
        """([scene, name, index]) => {
            const range = document.querySelector(`#${scene} [data-input=${name}] input`);
            range.value = index;
            range.dispatchEvent(new Event("input"));
        }""",
        [scene, name, index],
    )


def unfold(page):
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")


def press(page, scene, *keys):
    page.focus(f"#{scene}")
    for key in keys:
        page.keyboard.press(key)


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
        assert float(now["fullBytes"]) == 2 * 8.191e9
        assert float(now["deltaBytes"]) == pytest.approx(8.191e9 * RUN["density"] * RUN["bytes_per_change"])
        press(page, "packets", "End")
        assert page.get_attribute("#packets .landed", "d").count("z") == int(info(page, "packets")["arrived"])
        assert int(info(page, "packets")["arrived"]) == int(float(now["fullBytes"]) / float(now["deltaBytes"]))
        uploaded = MEASURED["uploads"]["all_to_single"] * float(now["deltaBytes"])
        assert f"{uploaded / 1e6:.3g} MB a step" in page.inner_text("#packets [data-uploaded]")


def phases(page):
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
        assert computed == pytest.approx(measured, rel=0.05), name


def test_the_gpu_times_go_through_the_measured_models(explain):
    small, large = MEASURED["gpu"]["models"]
    with explain(link="#tokens?density=0.01&weights=596050000") as page:
        press(page, "tokens", "End")
        assert phases(page)["diff"] == pytest.approx(small["blocked"], rel=1e-3)
    with explain(link="#tokens?density=0.01") as page:
        press(page, "tokens", "End")
        seconds = phases(page)
        expected = [large["blocked"], large["encode"], large["apply"] - large["pause"], large["pause"]]
        names = ("diff", "encode", "verify, decode and stage", "pause and write")
        assert [seconds[name] for name in names] == pytest.approx(expected, rel=1e-3)
        assert "stage" not in seconds
    with explain(link="#tokens?density=0.01&weights=405000000000") as page:
        press(page, "tokens", "End")
        assert phases(page)["pause and write"] == pytest.approx(large["pause"], rel=1e-3), "on many devices"


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
        assert float(slow["fullSeconds"]) == pytest.approx(2 * 8.191e9 / (0.1e9 / 8) + stop)
        assert "times sooner" in page.inner_text("#tokens [data-status]")
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
    assert states[0] == ["run.json"]
    assert states[-1] == names
    assert states[1] == names[:3]
    assert totals == sorted(set(totals))
    for version, shown in enumerate(states[1:]):
        assert f"manifests/{version:08}.json" in shown[-3:], "after its delta"
        assert all(read_document_key(key) or read_object_key(key) or key == "run.json" for key in shown)


# A story


def wait_until(page, condition):
    """The page's policy forbids what Playwright waits with."""
    page.evaluate(
        f"new Promise((done) => {{ const look = () => {condition} ? done() : requestAnimationFrame(look); look(); }})"
    )


def position_of(scene):
    return f"Number(document.getElementById('{scene}').dataset.position)"


def test_each_scene_plays_by_itself_once(explain):
    with explain() as page:
        for scene, before in zip(SCENES, (None, *SCENES), strict=False):
            page.locator(f"#{scene} [data-{'bits' if scene == 'weight' else 'stage'}]").scroll_into_view_if_needed()
            wait_until(page, f"{position_of(scene)} > 0.01")
            assert info(page, scene)["playing"] == "true"
            if before:
                assert info(page, before)["playing"] == "false", "one at a time"
        assert not page.locator("#bucket .invite").is_visible()
        press(page, "bucket", "End")
        assert page.locator("#bucket .invite").is_visible()
        page.evaluate("scrollTo(0, 0)")
        page.evaluate("new Promise((done) => setTimeout(done, 300))")
        assert [info(page, scene)["playing"] for scene in SCENES] == ["false"] * 4, "once"


def test_who_has_begun_is_left_alone(explain):
    with explain() as page:
        press(page, "tokens", "End")
        page.locator("#tokens [data-stage]").scroll_into_view_if_needed()
        page.evaluate("new Promise((done) => setTimeout(done, 300))")
        assert (info(page, "tokens")["playing"], info(page, "tokens")["position"]) == ("false", "1.0000")


@pytest.mark.parametrize("scene", SCENES)
def test_play_pause_and_keys(explain, scene):
    position = position_of(scene)
    with explain() as page:
        press(page, scene, "Home")
        assert page.evaluate(position) == 0
        page.keyboard.press("Space")
        assert info(page, scene)["playing"] == "true"
        assert page.inner_text(f"#{scene} .play") == "Pause"
        wait_until(page, f"{position} > 0.02")
        assert page.get_attribute(f"#{scene} [data-status]", "aria-live") == "off"
        page.keyboard.press("Space")
        stopped = page.evaluate(position)
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert info(page, scene)["playing"] == "false"
        assert page.evaluate(position) == stopped
        assert page.get_attribute(f"#{scene} [data-status]", "aria-live") == "polite"
        page.keyboard.press("ArrowRight")
        assert page.evaluate(position) > stopped
        page.keyboard.press("End")
        assert page.inner_text(f"#{scene} .play") == "Again"
        page.click(f"#{scene} .play")
        wait_until(page, f"{position} > 0 && {position} < 0.9")
        page.click(f"#{scene} [aria-label='Step back']")
        assert info(page, scene)["playing"] == "false"


def test_keys_of_a_control_stay_its_own(explain):
    with explain() as page:
        unfold(page)
        press(page, "weight", "Home")
        page.focus("#weight [data-input=lr] input")
        page.keyboard.press("ArrowRight")
        assert info(page, "weight")["position"] == "0.0000"
        assert page.locator("#weight [data-input=lr] output").inner_text() == "2e-6"


def test_less_motion_goes_from_stop_to_stop(explain):
    with explain(reduced_motion="reduce") as page:
        for scene in SCENES:
            page.locator(f"#{scene}").scroll_into_view_if_needed()
            assert info(page, scene)["playing"] == "false"
        assert page.evaluate("document.getAnimations().length") == 0
        press(page, "bucket", "Home", "Space")
        assert info(page, "bucket")["playing"] == "true"
        page.evaluate(
            """new Promise((done) => {
                globalThis.seen = [];
                const look = () => {
                    const { position, playing } = document.getElementById("bucket").dataset;
                    if (seen.at(-1) !== position) seen.push(position);
                    if (seen.length > 3 || playing === "false") done(); else setTimeout(look, 20);
                };
                look();
            })"""
        )
        assert page.evaluate("seen") == [f"{number / 9:.4f}" for number in range(4)]
        page.keyboard.press("Space")
        assert info(page, "bucket")["playing"] == "false"


def test_a_link_keeps_the_settings(explain, url):
    with explain() as page:
        unfold(page)
        page.locator("#tokens [data-input=machine] select").select_option("cpu")
        slide(page, "tokens", "gbits", 4)
        slide(page, "bucket", "joins", 2)
        link = page.evaluate("location.hash")
        assert page.get_attribute("#tokens .link", "href") == link.replace("#bucket", "#tokens")
        assert link == "#bucket?gbits=1&joins=3&machine=cpu"
        page.click("#bucket button:text-is('As in the story')")
        assert page.evaluate("location.hash") == "#bucket"
        assert page.locator("#packets [data-input=gbits] output").text_content() == "10 Gbit/s"
    with explain(link=link) as page:
        assert page.locator("#tokens [data-input=machine] select").input_value() == "cpu"
        assert page.locator("#packets [data-input=gbits] output").text_content() == "1 Gbit/s"
        assert page.evaluate("scrollY") > 500, "at its scene"
        assert page.locator("#bucket [data-input=joins] output").text_content() == "3"
    with explain(link="#tokens?gbits=3&machine=tpu&toString=1&weights=NaN") as page:
        assert page.locator("#packets [data-input=gbits] output").text_content() == "10 Gbit/s"
        assert page.get_attribute("#tokens .link", "href") == "#tokens"


@pytest.mark.parametrize("width", [390, 1440])
def test_there_is_room_for_a_finger(explain, width):
    with explain(width=width) as page:
        unfold(page)
        small = page.evaluate(
            """[...document.querySelectorAll("button, select, summary, a, input:not([type=checkbox]), label.tick")]
                .map((each) => [each.outerHTML.slice(0, 80), each.getBoundingClientRect()])
                .filter(([, box]) => box.width < 44 || box.height < 44).map(([text]) => text)"""
        )
    assert small == []


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_every_width_and_theme(explain, width, theme):
    from axe_playwright_python.sync_playwright import Axe

    with explain(width=width, theme=theme) as page:
        for scene in SCENES:
            press(page, scene, "Home", "ArrowRight", "ArrowRight", "End")
            label = page.locator(f"#{scene} [role=img]").first.get_attribute("aria-label")
            assert len(label) > 20
        unfold(page)
        assert fits(page)
        page.evaluate("Promise.all(document.getAnimations().map((each) => each.finished))")
        found = Axe().run(page).response["violations"]
        assert [(each["id"], [node["html"][:150] for node in each["nodes"]]) for each in found] == []
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (theme == "light")


def test_print_has_tables_and_no_controls(explain):
    with explain() as page:
        assert not page.locator("#tokens .numbers table").first.is_visible()
        page.emulate_media(media="print")
        for scene in SCENES:
            assert page.locator(f"#{scene} .numbers .sources").first.is_visible()
            assert not page.locator(f"#{scene} .toolbar").is_visible()
            assert page.locator(f"#{scene} [role=img]").first.is_visible()


def test_without_scripts_there_is_text(chromium, url):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(url)
    assert "need JavaScript" in page.inner_text("noscript")
    context.close()


@pytest.mark.timing
def test_the_first_paint_is_quick(explain, tmp_path, url):
    path = tmp_path / "page.html"
    path.write_text(single_file())
    for address in (url, path.as_uri()):
        times = []
        for _ in range(3):
            with explain(address) as page:
                paint = "performance.getEntriesByName('first-contentful-paint')"
                wait_until(page, f"{paint}.length")
                times.append(page.evaluate(f"{paint}[0].startTime"))
        assert min(times) < 500


# One file


def test_single_file_works_from_a_folder(explain, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(single_file())
    assert path.stat().st_size < 300_000
    with explain(path.as_uri()) as page:
        assert (
            page.evaluate("performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length")
            == 0
        )
        for scene in SCENES:
            press(page, scene, "Home")
            first = page.inner_html(f"#{scene} [data-status]")
            press(page, scene, "ArrowRight", "ArrowRight")
            assert page.inner_text(f"#{scene} [data-status]") != first or scene == "tokens"
        page.evaluate("location.hash = '#tokens?gbits=1'")
        assert page.evaluate("document.querySelector('#packets [data-input=gbits] output').textContent") == "1 Gbit/s"
    assert not re.search(r'(?:src|href)="(?!data:|#)', path.read_text())
